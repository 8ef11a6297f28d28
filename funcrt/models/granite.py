"""Granite 3 (IBM): Llama with four multipliers (maximal update parametrization, arXiv:2203.03466).

The embedding is multiplied, so are the scores in place of 1 / sqrt(D) and what each layer adds; the
logits are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig
from funcrt.config.fields import setting
from funcrt.errors import ConfigError
from funcrt.layers import Embedding, Network, PreNorm
from funcrt.models import llama


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A Granite."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"eos_token_id": 2}

    embedding_multiplier: float = setting("embedding_multiplier", 1.0)
    attention_multiplier: float = setting("attention_multiplier", 1.0)
    residual_multiplier: float = setting("residual_multiplier", 1.0)
    logits_scaling: float = setting("logits_scaling", 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.logits_scaling:
            raise ConfigError("config logits_scaling: expected other than 0, logits are divided")


def network(config: Config) -> Network:
    """The layers of one config."""
    return replace(
        llama.stack(config, lambda i: layer(config, i)),
        embed=Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, config.embedding_multiplier
        ),
        logit_scale=1 / config.logits_scaling,
    )


def layer(config: Config, i: int) -> PreNorm:
    """One layer."""
    attention = replace(llama.attention(config, i), scale=config.attention_multiplier)
    return replace(llama.layer(config, i, attention), scale=config.residual_multiplier)
