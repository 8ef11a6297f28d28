"""Qwen3-Next (Qwen team, 2025): three layers of the gated delta rule to one of gated attention.

Norms are around 1 + weight, a part of each head turns, and most layers have experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.config.layer_types import FULL, LayeredConfig
from funcrt.errors import ConfigError
from funcrt.layers import Linear, Network, Part, PreNorm, RMSNorm, Stacked
from funcrt.layers.attention import GatedAttention, split_qkv
from funcrt.layers.conv import ShortConv
from funcrt.layers.delta import GatedDelta
from funcrt.models import llama, qwen2_moe
from funcrt.models.gemma import norm

import mlx.core as mx

LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(LayeredConfig):
    """What Qwen3-Next and Qwen3.5 share; every `full_attention_interval`-th layer sees all."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ModelConfig.FIXED, "attn_output_gate": (None, True), "mlp_bias": (None, False),
    }  # fmt: skip
    LAYER_TYPES: ClassVar[tuple[str, ...]] = (FULL, LINEAR)
    PARTIAL_ROTARY: ClassVar[bool] = True
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.25}

    conv_width: int = setting("linear_conv_kernel_dim", 4, least=2)
    key_dim: int = setting("linear_key_head_dim", 128)
    value_dim: int = setting("linear_value_head_dim", 128)
    key_heads: int = setting("linear_num_key_heads", 16)
    value_heads: int = setting("linear_num_value_heads", 32)

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"linear_num_value_heads ({self.value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.key_heads})"
            )

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        hf = super().fill(hf)
        hf.pop("full_attention_interval", None)  # `layer_types` has the last word
        return hf

    @classmethod
    def layer_type(cls, hf: Mapping[str, Any], layer: int) -> str:
        return LINEAR if (layer + 1) % hf.get("full_attention_interval", 4) else FULL

    def unused_tensors(self) -> tuple[str, ...]:
        return ("mtp.",)  # guesses of the tokens after the next

    def to_hf(self) -> dict[str, Any]:
        hf, types = super().to_hf(), list(self.layer_types)
        every = types.index(FULL) + 1 if FULL in types else len(types) + 1
        if types == [
            self.layer_type({"full_attention_interval": every}, i) for i in range(len(types))
        ]:
            hf["full_attention_interval"] = every  # all that mlx-lm reads of them
        return hf


@dataclass(frozen=True, kw_only=True)
class Config(DeltaConfig, qwen2_moe.SharedConfig):
    """A Qwen3-Next."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **DeltaConfig.DEFAULTS,
        "intermediate_size": 5632, "moe_intermediate_size": 512, "num_experts": 512,
        "num_experts_per_tok": 10, "norm_topk_prob": True, "shared_expert_intermediate_size": 512,
    }  # fmt: skip


def network(config: Config) -> Network:
    """The layers of one config."""
    return stack(config, lambda i: layer(config, i, delta(config, i), qwen2_moe.mlp(config, i)))


def stack(config: DeltaConfig, make_layer: Callable[[int], Part]) -> Network:
    """What is around the layers that `make_layer` gives for their numbers."""
    return replace(llama.stack(config, make_layer), norm=norm(config, "model.norm"))


def layer(config: DeltaConfig, i: int, linear: Part, mlp: Part | None) -> PreNorm:
    """One layer: `linear`, or attention in its place; None stands for a plain MLP."""
    name = f"model.layers.{i}"
    mix = linear if config.layer_types[i] == LINEAR else attention(config, i)
    return replace(
        llama.layer(config, i, mix, mlp),
        mix_norm=norm(config, f"{name}.input_layernorm"),
        mlp_norm=norm(config, f"{name}.post_attention_layernorm"),
    )


def attention(config: DeltaConfig, i: int) -> GatedAttention:
    """Attention of one layer."""
    name, d, eps = f"model.layers.{i}.self_attn", config.head_dim, config.norm_eps
    kept = {
        **vars(llama.attention(config, i)),
        "qkv": split_qkv(
            name,
            width=config.hidden_size,
            heads=2 * config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=d,
            bias=config.attention_bias,
        ),
        "q_norm": RMSNorm(f"{name}.q_norm", d, eps, offset=1.0),
        "k_norm": RMSNorm(f"{name}.k_norm", d, eps, offset=1.0),
    }
    return GatedAttention(**kept)


def delta(config: Config, i: int) -> MixedDelta:
    """The gated delta rule of one layer."""
    rows = (2 * config.keys + 2 * config.values, 2 * config.value_heads)
    return MixedDelta(**delta_parts(config, i, {"in_proj_qkvz": rows[0], "in_proj_ba": rows[1]}))


def delta_parts(config: DeltaConfig, i: int, projections: Mapping[str, int]) -> dict[str, Any]:
    """Fields of a `GatedDelta` with `projections` of these names and widths."""
    name, e = f"model.layers.{i}.linear_attn", config.hidden_size
    members = tuple(Linear(f"{name}.{part}", e, width) for part, width in projections.items())
    return {
        "name": name,
        "layer": i,
        "heads": config.value_heads,
        "key_heads": config.key_heads,
        "key_dim": config.key_dim,
        "value_dim": config.value_dim,
        "act": config.hidden_act,
        "eps": config.norm_eps,
        "projections": Stacked(f"{name}.in_proj", members),
        "conv": ShortConv(f"{name}.conv1d", i, 2 * config.keys + config.values, config.conv_width),
        "out": Linear(f"{name}.out_proj", config.values, e),
    }


@dataclass(frozen=True, kw_only=True)
class MixedDelta(GatedDelta):
    """Projections in which all that belongs to one key head is together."""

    def split(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        lead, k, d = x.shape[:2], self.key_heads, self.key_dim
        shared = self.heads * self.value_dim // k
        mixed, rates = mx.split(x, [2 * k * (d + shared)], axis=-1)
        parts = mx.split(mixed.reshape(*lead, k, -1), [d, 2 * d, 2 * d + shared], axis=-1)
        *qkv, gate = (part.reshape(*lead, -1) for part in parts)
        rate, decay = mx.split(rates.reshape(*lead, k, -1), 2, axis=-1)
        return (
            mx.concatenate(qkv, axis=-1),
            gate,
            rate.reshape(*lead, -1),
            decay.reshape(*lead, -1),
        )
