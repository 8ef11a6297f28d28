"""Command R (Cohere, 2024): attention and MLP side by side, layer norms, neighbours that turn.

Norms have no bias; one serves attention and MLP. Larger models norm each head of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.layers import Attention, LayerNorm, Network, Parallel, Part, Run
from funcrt.layers.mlp import gated_mlp
from funcrt.models import llama
from funcrt.params import ParamSpec

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class CohereConfig(ModelConfig):
    """What Command R and R7B share."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "eos_token_id": 255001,
    }  # fmt: skip
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "layer_norm_bias": (None, False),
        "mlp_bias": (None, False),
        "position_embedding_type": (None, "rope_gptj"),
        "rotary_pct": (None, 1),
        "use_embedding_sharing": (None, True),
        "use_gated_activation": (None, True),
        "use_parallel_block": (None, True),
    }
    HARMLESS: ClassVar[frozenset[str]] = frozenset({"model_max_length", "use_parallel_embedding"})
    INTERLEAVED: ClassVar[bool] = True

    norm_eps: float = setting("layer_norm_eps")
    tie_word_embeddings: bool = setting("tie_word_embeddings", True)
    logit_scale: float = setting("logit_scale", 0.0625)


@dataclass(frozen=True, kw_only=True)
class Config(CohereConfig):
    """A Command R."""

    ROPE_DEFAULTS: ClassVar[dict[str, Any]] = {"rope_theta": 500000.0}

    qk_norm: bool = setting("use_qk_norm", False)


@dataclass(frozen=True)
class HeadsNorm(Part):
    """Layer norm of every head of `[B, N, T, D]`, times a weight `[N, D]` of its own."""

    name: str
    heads: int
    width: int
    eps: float

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        weight = run.params[f"{self.name}.weight"].astype(mx.float32)[:, None]
        normed = mx.fast.layer_norm(x.astype(mx.float32), None, None, self.eps)
        return (normed * weight).astype(x.dtype)  # rounded once, as in training

    def tensors(self) -> ParamSpec:
        return {f"{self.name}.weight": (self.heads, self.width)}


def network(config: Config) -> Network:
    """The layers of one config."""
    return stack(config, lambda i: layer(config, i, attention(config, i)))


def stack(config: CohereConfig, make_layer: Callable[[int], Part]) -> Network:
    """What stands around the layers that `make_layer` gives for their numbers."""
    return replace(
        llama.stack(config, make_layer),
        norm=norm(config, "model.norm"),
        logit_scale=config.logit_scale,
    )


def layer(config: CohereConfig, i: int, mix: Part) -> Parallel:
    """One layer around its attention."""
    name, e = f"model.layers.{i}", config.hidden_size
    return Parallel(
        mix_norm=norm(config, f"{name}.input_layernorm"),
        mix=mix,
        mlp=gated_mlp(f"{name}.mlp", e, config.intermediate_size, config.hidden_act),
    )


def norm(config: CohereConfig, name: str) -> LayerNorm:
    """A norm of the residual stream."""
    return LayerNorm(name, config.hidden_size, config.norm_eps, bias=False)


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer."""
    plain = llama.attention(config, i)
    if not config.qk_norm:
        return plain
    name, d, eps = f"model.layers.{i}.self_attn", config.head_dim, config.norm_eps
    return replace(
        plain,
        q_norm=HeadsNorm(f"{name}.q_norm", config.num_heads, d, eps),
        k_norm=HeadsNorm(f"{name}.k_norm", config.num_kv_heads, d, eps),
    )
