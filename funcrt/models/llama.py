"""Llama (arXiv:2302.13971, 2307.09288): RMS norms, rotary grouped-query attention, gated MLP.

Mistral (arXiv:2310.06825) is the same with a sliding window: a query sees q - k < W.
"""

from __future__ import annotations

from collections.abc import Iterator

from funcrt import ops
from funcrt.attention import Attend
from funcrt.cache import (
    CacheLayout,
    CacheSpec,
    CacheState,
    attention_entries,
    check_call,
    pack,
    place,
    row_entries,
    unpack,
)
from funcrt.config import ModelConfig
from funcrt.params import FLOATS, Fusions, Params, ParamSpec

import mlx.core as mx

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


def param_spec(config: ModelConfig) -> ParamSpec:
    """Name -> dense shape of every tensor, in the order of the network."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    h, k = config.num_heads * d, config.num_kv_heads * d
    spec: ParamSpec = {"model.embed_tokens.weight": (config.vocab_size, e)}
    for layer in _layers(config):
        spec[f"{layer}.input_layernorm.weight"] = (e,)
        for name, rows, columns in [("q", h, e), ("k", k, e), ("v", k, e), ("o", e, h)]:
            spec[f"{layer}.self_attn.{name}_proj.weight"] = (rows, columns)
            if config.attention_bias:
                spec[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        spec[f"{layer}.post_attention_layernorm.weight"] = (e,)
        for name, rows, columns in [("gate", f, e), ("up", f, e), ("down", e, f)]:
            spec[f"{layer}.mlp.{name}_proj.weight"] = (rows, columns)
            if config.mlp_bias:
                spec[f"{layer}.mlp.{name}_proj.bias"] = (rows,)
    spec["model.norm.weight"] = (e,)
    if not config.tie_word_embeddings:
        spec["lm_head.weight"] = (config.vocab_size, e)
    return spec


def cache_spec(config: ModelConfig, layout: CacheLayout) -> CacheSpec:
    """Keys and values of every layer."""
    heads, width, window = config.num_kv_heads, config.head_dim, config.sliding_window
    entries = [*row_entries(layout, window)]
    for i in range(config.num_layers):
        entries += attention_entries(i, heads, width, config.dtype, layout, window)
    return tuple(entries)


def fusions(config: ModelConfig) -> Fusions:
    """Matrices that read the same input, stacked by `prepare` into one."""
    fused: Fusions = {}
    for layer in _layers(config):
        fused[f"{layer}.self_attn.qkv_proj"] = tuple(f"{layer}.self_attn.{n}" for n in QKV)
        fused[f"{layer}.mlp.gate_up_proj"] = tuple(f"{layer}.mlp.{n}" for n in GATE_UP)
    return fused


def hidden(
    config: ModelConfig,
    params: Params,
    tokens: mx.array,
    mask: mx.array,
    cache_state: CacheState,
    positions: mx.array | None = None,
) -> tuple[mx.array, CacheState]:
    """Everything but the last projection: `[B, T]` -> `[B, T, E]` in the caller's token order."""
    check_call(tokens, mask, cache_state, positions)
    call = place(mask, cache_state["lengths"], positions)
    rotary = ops.make_rotary(
        config.rope, config.head_dim, call.offset, call.lengths, tokens.shape[1], call.positions
    )
    x = ops.embed(
        params, "model.embed_tokens", pack(tokens, call), config.hidden_size, FLOATS[config.dtype]
    )
    x = mx.where(call.real[..., None], x, 0)  # padding stays harmless through every layer
    attend = Attend(call, cache_state)
    for i, layer in enumerate(_layers(config)):
        normed = ops.rms_norm(params, f"{layer}.input_layernorm", x, config.norm_eps)
        x = x + _attention(config, params, layer, i, normed, rotary, attend)
        normed = ops.rms_norm(params, f"{layer}.post_attention_layernorm", x, config.norm_eps)
        x = x + _mlp(config, params, f"{layer}.mlp", normed)
    x = ops.rms_norm(params, "model.norm", x, config.norm_eps)
    return unpack(x, call), attend.state


def unembed(config: ModelConfig, params: Params, x: mx.array) -> mx.array:
    """Logits `[..., V]` of `x [..., E]`."""
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return ops.linear(params, name, x)


def _layers(config: ModelConfig) -> Iterator[str]:
    return (f"model.layers.{i}" for i in range(config.num_layers))


def _attention(
    config: ModelConfig,
    params: Params,
    layer: str,
    index: int,
    x: mx.array,
    rotary: ops.Rotary,
    attend: Attend,
) -> mx.array:
    name, heads, kv = f"{layer}.self_attn", config.num_heads, config.num_kv_heads
    members = tuple(f"{name}.{member}" for member in QKV)
    qkv = ops.fused_linear(params, f"{name}.qkv_proj", members, x)  # [B,T,(H+2K)*D]
    qkv = qkv.reshape(*x.shape[:2], heads + 2 * kv, config.head_dim).swapaxes(1, 2)
    qk, v = rotary(qkv[:, : heads + kv]), qkv[:, heads + kv :]  # one rotation for both
    # yarn scales cos and sin, so the scores by its square.
    scale = config.head_dim**-0.5 * ops.rope_attention_factor(config.rope) ** 2
    out = attend(
        index, qk[:, :heads], qk[:, heads:], v, scale=scale, window=config.sliding_window
    )  # [B,H,T,D]
    out = out.swapaxes(1, 2).reshape(*x.shape[:2], heads * config.head_dim)
    return ops.linear(params, f"{name}.o_proj", out)


def _mlp(config: ModelConfig, params: Params, name: str, x: mx.array) -> mx.array:
    members = tuple(f"{name}.{member}" for member in GATE_UP)
    both = ops.fused_linear(params, f"{name}.gate_up_proj", members, x)
    gate, up = mx.split(both, 2, axis=-1)
    return ops.linear(params, f"{name}.down_proj", ops.ACTIVATIONS[config.hidden_act](gate) * up)
