"""gpt-oss (arXiv:2508.10925): sinks, windows in every second layer, experts with clamped gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from funcrt.config import setting
from funcrt.config.experts import ExpertConfig
from funcrt.config.layer_types import MixedConfig
from funcrt.layers import Attention, Linear, MoE, Network, StackedExperts
from funcrt.models import llama
from funcrt.models.llama import layer, stack
from funcrt.ops.experts import stored_stack
from funcrt.ops.routing import route_top_softmax
from funcrt.packing import Transposed
from funcrt.params import Params, ParamSpec

import mlx.core as mx

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(MixedConfig, ExpertConfig):
    """A gpt-oss with dense weights."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "sliding_window": 128, "attention_bias": True,
        "num_local_experts": 128, "num_experts_per_tok": 4,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ExpertConfig.FIXED,
        "hidden_act": (None, "silu"),
    }
    # The two are repeated by keys that are read.
    HARMLESS: ClassVar[frozenset[str]] = ExpertConfig.HARMLESS | {
        "experts_per_token",
        "initial_context_length",
    }
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {"rope_theta": 150000.0}

    num_experts: int = setting("num_local_experts")
    swiglu_alpha: float = setting("swiglu_alpha", 1.702)
    swiglu_limit: float = setting("swiglu_limit", 7.0)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """See `ModelConfig`; without any rope scaling it is that of the published models."""
        if hf.get("rope_parameters") is None and hf.get("rope_scaling") is None:
            hf["rope_scaling"] = _YARN
        return super().fill(hf)

    @classmethod
    def slides(cls, hf: Mapping[str, Any], layer: int) -> bool:
        """Every second layer, the first one too."""
        return layer % 2 == 0


@dataclass(frozen=True, kw_only=True)
class ClampedExperts(StackedExperts):
    """`down((up + 1) * gate * sigmoid(alpha * gate))` of gates up to `limit`, ups within it.

    Stacks are stored with inputs before outputs, gates and ups in turns, and have biases.
    """

    FLAT = True
    IN_TURNS: ClassVar[bool] = True

    alpha: float
    limit: float

    def activate(self, gate_up: mx.array) -> mx.array:
        gate = mx.minimum(gate_up[..., ::2], self.limit)
        up = mx.clip(gate_up[..., 1::2], -self.limit, self.limit)
        return (up + 1) * (gate * mx.sigmoid(gate * self.alpha))

    def stacks(self, params: Params) -> Params:
        stacks: Params = {}
        for name in (self.gate_up, self.down):
            stacks |= stored_stack(params, name, transposed=True)
            stacks[f"{name}.bias"] = params[f"{name}_bias"]
        return stacks

    def tensors(self) -> ParamSpec:
        spec: ParamSpec = {}
        for name, (experts, outputs, inputs) in super().tensors().items():
            spec[name] = Transposed((experts, inputs, outputs))
            spec[f"{name}_bias"] = (experts, outputs)
        return spec


def network(config: Config) -> Network:
    """The layers of one config."""
    return stack(config, lambda i: layer(config, i, attention(config, i), moe(config, i)))


def attention(config: Config, i: int) -> Attention:
    """Llama's, with a sink for each head, and a window in some layers."""
    sinks = f"model.layers.{i}.self_attn.sinks"
    return replace(llama.attention(config, i), window=config.window(i), sinks=sinks)


def moe(config: Config, i: int) -> MoE:
    """The experts of one layer."""
    name, e, x = f"model.layers.{i}.mlp", config.hidden_size, config.num_experts
    return MoE(
        router=Linear(f"{name}.router", e, x, bias=True),
        rule=partial(route_top_softmax, count=config.experts_per_token),
        experts=ClampedExperts(
            f"{name}.experts", x, e, config.intermediate_size, config.hidden_act,
            alpha=config.swiglu_alpha, limit=config.swiglu_limit,
        ),
    )  # fmt: skip
