"""LFM2 (arXiv:2511.23404): double-gated short convolutions, and attention in some layers.

Queries and keys are normed by head before they turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.config.layer_types import FULL, LayeredConfig
from funcrt.errors import ConfigError
from funcrt.layers import Attention, GatedMLP, Linear, Network, Part, PreNorm, RMSNorm, Run, Stacked
from funcrt.layers.conv import ShortConv
from funcrt.layers.fusing import added, normed
from funcrt.models import llama

import mlx.core as mx

CONV = "conv"
_OLDER = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}


@dataclass(frozen=True, kw_only=True)
class ConvConfig(LayeredConfig):
    """What LFM2 with and without experts share."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "tie_word_embeddings": True, "eos_token_id": 2,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ModelConfig.FIXED,
        "attention_bias": (None, False),
        "block_use_swiglu": (None, True),
        "hidden_act": (None, "silu"),
        "mlp_bias": (None, False),
        "use_pos_enc": (None, True),
    }
    HARMLESS: ClassVar[frozenset[str]] = frozenset({
        "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
        "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads",
        "theta",
    })  # fmt: skip
    LAYER_TYPES: ClassVar[tuple[str, ...]] = (FULL, CONV)
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {"rope_theta": 1e6}

    norm_eps: float = setting("norm_eps")
    conv_bias: bool = setting("conv_bias", False)
    conv_width: int = setting("conv_L_cache", 3, least=2)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        for old, key in _OLDER.items():
            if hf.get(old) is not None:
                hf[key] = hf.pop(old)
        hf = super().fill(hf)
        full, types = hf.pop("full_attn_idxs", None), hf.get("layer_types")
        if full is not None and types is not None and sorted(full) != _attending(types):
            raise ConfigError(
                f"config full_attn_idxs={full!r} and the layer_types {list(types)} disagree; "
                "keep the one the weights were trained with"
            )
        return hf

    @classmethod
    def layer_type(cls, hf: Mapping[str, Any], layer: int) -> str:
        full = hf.get("full_attn_idxs")
        return FULL if full is None or layer in full else CONV


@dataclass(frozen=True, kw_only=True)
class Config(ConvConfig):
    """An LFM2. The width of its MLP follows from `intermediate_size`, see `inner`."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {**ConvConfig.DEFAULTS, "intermediate_size": 12288}

    adjust_inner: bool = setting("block_auto_adjust_ff_dim", True)
    inner_factor: float | None = setting("block_ffn_dim_multiplier", 1.0)
    inner_multiple: int = setting("block_multiple_of", 256)

    @property
    def inner(self) -> int:
        """F: two thirds of `intermediate_size`, scaled, up to the next multiple; or as it is."""
        inner = self.intermediate_size
        if self.adjust_inner:
            inner = int(2 * inner / 3)
            if self.inner_factor is not None:
                inner = int(self.inner_factor * inner)
                inner += -inner % self.inner_multiple
        return inner

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner < 1:
            raise ConfigError(
                f"config block_ffn_dim_multiplier={self.inner_factor!r} leaves no width of an "
                f"intermediate_size of {self.intermediate_size}"
            )

    def to_hf(self) -> dict[str, Any]:
        return {**super().to_hf(), "block_dim": self.hidden_size}


def _attending(types: Sequence[str]) -> list[int]:
    return [layer for layer, kind in enumerate(types) if kind == FULL]


def network(config: Config) -> Network:
    """The layers of one config."""
    return stack(config, lambda i: mlp(config, i, config.inner))


def stack(config: ConvConfig, make_mlp: Callable[[int], Part]) -> Network:
    """The layers of one config, with the MLPs that `make_mlp` gives for their numbers."""
    return replace(
        llama.stack(config, lambda i: layer(config, i, make_mlp(i))),
        norm=RMSNorm("model.embedding_norm", config.hidden_size, config.norm_eps),
    )


def layer(config: ConvConfig, i: int, mlp: Part) -> PreNorm:
    """One layer."""
    name, e, eps = f"model.layers.{i}", config.hidden_size, config.norm_eps
    return PreNorm(
        mix_norm=RMSNorm(f"{name}.operator_norm", e, eps),
        mix=attention(config, i) if config.layer_types[i] == FULL else convolution(config, i),
        mlp_norm=RMSNorm(f"{name}.ffn_norm", e, eps),
        mlp=mlp,
    )


def mlp(config: ConvConfig, i: int, inner: int) -> GatedMLP:
    """The MLP of one layer."""
    name, e = f"model.layers.{i}.feed_forward", config.hidden_size
    gate, up = (Linear(f"{name}.{part}", e, inner) for part in ("w1", "w3"))
    down = Linear(f"{name}.w2", inner, e)
    return GatedMLP(Stacked(f"{name}.w1_w3", (gate, up)), down, config.hidden_act)


def attention(config: ConvConfig, i: int) -> Attention:
    """Attention of one layer."""
    name, d, eps = f"model.layers.{i}.self_attn", config.head_dim, config.norm_eps
    return replace(
        llama.attention(config, i),
        out=Linear(f"{name}.out_proj", config.num_heads * d, config.hidden_size),
        q_norm=RMSNorm(f"{name}.q_layernorm", d, eps),
        k_norm=RMSNorm(f"{name}.k_layernorm", d, eps),
    )


def convolution(config: ConvConfig, i: int) -> GatedConv:
    """The convolution of one layer."""
    name, e, bias = f"model.layers.{i}.conv", config.hidden_size, config.conv_bias
    return GatedConv(
        gates=Linear(f"{name}.in_proj", e, 3 * e, bias),
        conv=ShortConv(f"{name}.conv", i, e, config.conv_width, bias),
        out=Linear(f"{name}.out_proj", e, e, bias),
    )


@dataclass(frozen=True)
class GatedConv(Part):
    """`out(c * conv(b * x))`; `gates` gives b, c and x, of width E each, side by side."""

    FLAT = True

    gates: Part
    conv: ShortConv
    out: Part

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return self.out(run, self._look_back(run, self.gates(run, x)))

    def branch(self, run: Run, norm: Part, x: mx.array) -> mx.array:
        gates = normed(run, norm, self.gates, x)
        return added(run, self.out, self._look_back(run, gates), x)

    def _look_back(self, run: Run, gates: mx.array) -> mx.array:
        b, c, x = mx.split(gates, 3, axis=-1)
        return c * self.conv(run, b * x)
