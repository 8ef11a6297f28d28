"""LFM2 with experts (arXiv:2511.23404), chosen as those of DeepSeek-V3, in all but some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from funcrt.config import setting
from funcrt.config.experts import ExpertConfig
from funcrt.layers import Experts, Linear, Network, Part
from funcrt.models import lfm2
from funcrt.models.deepseek_v3 import CorrectedMoE
from funcrt.models.lfm2 import ConvConfig, stack
from funcrt.ops.routing import route_sigmoid


@dataclass(frozen=True, kw_only=True)
class Config(ConvConfig, ExpertConfig):
    """An LFM2 with experts."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **ConvConfig.DEFAULTS,
        "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
        "num_experts_per_tok": 4,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ConvConfig.FIXED, "use_expert_bias": (None, True),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = ConvConfig.HARMLESS | ExpertConfig.HARMLESS

    moe_intermediate_size: int = setting("moe_intermediate_size")
    dense_layers: int = setting("num_dense_layers", 2, least=0)
    normalize: bool = setting("norm_topk_prob", True)
    routed_scale: float = setting("routed_scaling_factor", 1.0)

    def to_hf(self) -> dict[str, Any]:
        return {**super().to_hf(), "use_expert_bias": True}


def network(config: Config) -> Network:
    """The layers of one config."""
    return stack(config, lambda i: mlp(config, i))


def mlp(config: Config, i: int) -> Part:
    """The experts of one layer, or its MLP."""
    if i < config.dense_layers:
        return lfm2.mlp(config, i, config.intermediate_size)
    name, e = f"model.layers.{i}.feed_forward", config.hidden_size
    return CorrectedMoE(
        router=Linear(f"{name}.gate", e, config.num_experts),
        rule=partial(
            route_sigmoid, count=config.experts_per_token, groups=1, kept=1,
            normalize=config.normalize, scale=config.routed_scale, eps=1e-6,
        ),
        experts=Experts(
            name=f"{name}.experts",
            count=config.num_experts,
            width=e,
            inner=config.moe_intermediate_size,
            act=config.hidden_act,
            projections=("w1", "w3", "w2"),
        ),
        bias=f"{name}.expert_bias",
    )  # fmt: skip
