"""StableLM 3B and StableLM 2 (arXiv:2402.17834): Llama with layer norms, of which a part turns.

The 12B model has one norm for attention and MLP, side by side (as GPT-NeoX), and norms of every
query and key head, each head with a weight of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig
from funcrt.config.fields import setting
from funcrt.layers import Attention, LayerNorm, Network, Parallel, Part, Run
from funcrt.layers.mlp import gated_mlp
from funcrt.models import llama
from funcrt.params import Fusions, ParamSpec

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A StableLM."""

    PARTIAL_ROTARY: ClassVar[bool] = True
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.25}
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "architectures": ("StableLmForCausalLM",), "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "eos_token_id": 0,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mlp_bias": (None, False)}
    HARMLESS: ClassVar[frozenset[str]] = frozenset({"hidden_dropout"})

    norm_eps: float = setting("layer_norm_eps")
    attention_bias: bool = setting("use_qkv_bias", False)
    qk_layernorm: bool = setting("qk_layernorm", False)
    use_parallel_residual: bool = setting("use_parallel_residual", False)


def network(config: Config) -> Network:
    """The layers of one config."""
    norm = LayerNorm("model.norm", config.hidden_size, config.norm_eps)
    return llama.stack(config, lambda i: layer(config, i), norm)


def layer(config: Config, i: int) -> Part:
    """One layer."""
    name, e, eps = f"model.layers.{i}", config.hidden_size, config.norm_eps
    mix, mix_norm = attention(config, i), LayerNorm(f"{name}.input_layernorm", e, eps)
    mlp = gated_mlp(f"{name}.mlp", e, config.intermediate_size, config.hidden_act)
    if config.use_parallel_residual:
        return Parallel(mix_norm, mix, mlp)
    mlp_norm = LayerNorm(f"{name}.post_attention_layernorm", e, eps)
    return replace(llama.layer(config, i, mix, mlp), mix_norm=mix_norm, mlp_norm=mlp_norm)


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer."""
    name, h, k = f"model.layers.{i}.self_attn", config.num_heads, config.num_kv_heads
    d, eps = config.head_dim, config.norm_eps
    base = llama.attention_with_plain_output(config, i)
    if not config.qk_layernorm:
        return base
    return replace(
        base,
        q_norm=HeadNorms(f"{name}.q_layernorm", h, d, eps),
        k_norm=HeadNorms(f"{name}.k_layernorm", k, d, eps),
    )


@dataclass(frozen=True)
class HeadNorms(Part):
    """Layer norm of every head `[B, N, T, D]`, without biases, by a weight for each."""

    name: str
    heads: int
    width: int
    eps: float

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        weights = run.params.get(f"{self.name}.weight")
        if weights is None:  # not prepared
            weights = mx.concatenate([run.params[name] for name in self.tensors()])
        weights = weights.reshape(self.heads, 1, self.width).astype(x.dtype)
        return mx.fast.layer_norm(x, None, None, self.eps) * weights

    def tensors(self) -> ParamSpec:
        return {f"{name}.weight": (self.width,) for name in self._members()}

    def fused(self) -> Fusions:
        return {self.name: self._members()}

    def _members(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.norms.{head}" for head in range(self.heads))
