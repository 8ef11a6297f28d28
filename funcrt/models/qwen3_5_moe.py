"""Qwen3.5-MoE (Qwen team, 2026): Qwen3.5 with experts, stored as stacks, in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.layers import MoE, Network, StackedExperts
from funcrt.models import qwen2_moe, qwen3_5
from funcrt.models.qwen3_5 import delta, place
from funcrt.models.qwen3_next import layer, stack


@dataclass(frozen=True, kw_only=True)
class Config(qwen3_5.Config, qwen2_moe.SharedConfig):
    """The text part of a Qwen3.5-MoE."""

    ARCHITECTURE: ClassVar[str] = "Qwen3_5Moe"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **qwen3_5.Config.DEFAULTS,
        "num_key_value_heads": 2, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **qwen3_5.Config.FIXED, "decoder_sparse_step": (None, 1), "norm_topk_prob": (True,),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = (
        qwen3_5.Config.HARMLESS | qwen2_moe.SharedConfig.HARMLESS | {"intermediate_size"}
    )


def network(config: Config) -> Network:
    """The layers of one config."""
    return place(
        config, stack(config, lambda i: layer(config, i, delta(config, i), mlp(config, i)))
    )


def mlp(config: Config, i: int) -> MoE:
    """The experts of one layer."""
    mixture = qwen2_moe.mlp(config, i)
    assert mixture is not None
    return replace(mixture, experts=StackedExperts(**vars(mixture.experts)))
