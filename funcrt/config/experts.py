"""Configs of models that choose among experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from funcrt.config.base import ModelConfig
from funcrt.config.fields import hf_keys, setting
from funcrt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(ModelConfig):
    """A model with X experts, of which each token goes through a few; families spell both keys."""

    # Losses and noise of training.
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
    )

    num_experts: int = setting("num_experts")
    experts_per_token: int = setting("num_experts_per_tok")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.num_experts:
            keys = hf_keys(type(self))
            raise ConfigError(
                f"config {keys['experts_per_token']}: expected at most {self.num_experts} "
                f"({keys['num_experts']}), got {self.experts_per_token}"
            )
