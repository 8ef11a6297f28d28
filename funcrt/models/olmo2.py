"""OLMo 2 (arXiv:2501.00656 §3.2): norms after attention and MLP, and over all queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.config import ModelConfig
from funcrt.layers import Attention, Network, Part, PostNorm, RMSNorm, Run
from funcrt.layers.mlp import gated_mlp
from funcrt.models import llama

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """An OLMo 2."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {"mlp_bias": (None, False)}


@dataclass(frozen=True, kw_only=True)
class WideNormAttention(Attention):
    """Attention with one norm over the queries of all heads, and one over the keys.

    Attributes:
        all_q_norm: of `[B, T, H D]`.
        all_k_norm: of `[B, T, K D]`.
    """

    all_q_norm: Part
    all_k_norm: Part

    def split(self, run: Run, qkv: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        ends = [self.heads * self.head_dim, (self.heads + self.kv_heads) * self.head_dim]
        q, k, v = mx.split(qkv, ends, axis=-1)
        normed = (self.all_q_norm(run, q), self.all_k_norm(run, k), v)
        q, k, v = (a.reshape(*qkv.shape[:2], -1, self.head_dim).swapaxes(1, 2) for a in normed)
        return *self.norm_and_turn(run, q, k), v


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(config, lambda i: layer(config, i, attention(config, i)))


def layer(config: ModelConfig, i: int, mix: Part) -> PostNorm:
    """One layer around its attention."""
    name, e, eps = f"model.layers.{i}", config.hidden_size, config.norm_eps
    return PostNorm(
        mix=mix,
        mix_norm=RMSNorm(f"{name}.post_attention_layernorm", e, eps),
        mlp=gated_mlp(f"{name}.mlp", e, config.intermediate_size, config.hidden_act),
        mlp_norm=RMSNorm(f"{name}.post_feedforward_layernorm", e, eps),
    )


def attention(config: ModelConfig, i: int) -> WideNormAttention:
    """Attention of one layer."""
    name, d, eps = f"model.layers.{i}.self_attn", config.head_dim, config.norm_eps
    plain = llama.attention(config, i)
    return WideNormAttention(
        **vars(plain),
        all_q_norm=RMSNorm(f"{name}.q_norm", config.num_heads * d, eps),
        all_k_norm=RMSNorm(f"{name}.k_norm", config.num_kv_heads * d, eps),
    )
