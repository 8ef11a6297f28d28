"""Llama (arXiv:2302.13971, 2307.09288): RMS norms, rotary grouped-query attention, gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from funcrt.config import ModelConfig
from funcrt.layers import Attention, Embedding, Linear, Network, Part, PreNorm, RMSNorm
from funcrt.layers.attention import split_qkv
from funcrt.layers.mlp import gated_mlp

Config = ModelConfig


def network(config: Config) -> Network:
    """The layers of one config."""
    return stack(config, lambda i: layer(config, i, attention(config, i)))


def stack(config: Config, make_layer: Callable[[int], Part], norm: Part | None = None) -> Network:
    """Embedding, the layers that `make_layer` gives for their numbers, norm and last projection.

    None stands for Llama's own norm.
    """
    e, v = config.hidden_size, config.vocab_size
    return Network(
        embed=Embedding("model.embed_tokens", v, e),
        layers=tuple(make_layer(i) for i in range(config.num_layers)),
        norm=norm or RMSNorm("model.norm", e, config.norm_eps),
        head=None if config.tie_word_embeddings else Linear("lm_head", e, v),
    )


def layer(config: Config, i: int, mix: Part, mlp: Part | None = None) -> PreNorm:
    """One layer around its attention; None stands for Llama's own MLP."""
    name, e, eps = f"model.layers.{i}", config.hidden_size, config.norm_eps
    return PreNorm(
        mix_norm=RMSNorm(f"{name}.input_layernorm", e, eps),
        mix=mix,
        mlp_norm=RMSNorm(f"{name}.post_attention_layernorm", e, eps),
        mlp=mlp
        or gated_mlp(
            f"{name}.mlp", e, config.intermediate_size, config.hidden_act, config.mlp_bias
        ),
    )


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer; `sliding_window` is that of Mistral."""
    name, e, d = f"model.layers.{i}.self_attn", config.hidden_size, config.head_dim
    h, k, bias = config.num_heads, config.num_kv_heads, config.attention_bias
    return Attention(
        layer=i,
        heads=h,
        kv_heads=k,
        head_dim=d,
        qkv=split_qkv(name, width=e, heads=h, kv_heads=k, head_dim=d, bias=bias),
        out=Linear(f"{name}.o_proj", h * d, e, bias),
        scale=d**-0.5,
        rope=config.rope,
        window=config.sliding_window,
    )


def attention_with_plain_output(config: ModelConfig, i: int) -> Attention:
    """The same, whose output has no bias even where queries, keys and values have one."""
    out = Linear(
        f"model.layers.{i}.self_attn.o_proj",
        config.num_heads * config.head_dim,
        config.hidden_size,
    )
    return replace(attention(config, i), out=out)
