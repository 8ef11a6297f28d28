"""GPT-NeoX (arXiv:2204.06745): attention and MLP in parallel, a quarter of each head turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.layers import (
    MLP,
    Attention,
    Embedding,
    LayerNorm,
    Linear,
    Network,
    Parallel,
    Part,
    PreNorm,
    Run,
)

import mlx.core as mx

_ROPE_KEYS = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A GPT-NeoX; what turns is spelled in its own keys, or as `rope_parameters`."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"layer_norm_eps": 1e-5, "eos_token_id": 2}
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "rope_theta": (None,), "partial_rotary_factor": (None,),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = frozenset({
        *_ROPE_KEYS, "attention_probs_dropout_prob", "classifier_dropout", "custom_pipelines",
        "hidden_dropout", "hidden_dropout_prob", "is_decoder",
    })  # fmt: skip
    PARTIAL_ROTARY: ClassVar[bool] = True
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.25}

    norm_eps: float = setting("layer_norm_eps")
    hidden_act: str = setting("hidden_act", "gelu")
    attention_bias: bool = setting("attention_bias", True)
    use_parallel_residual: bool = setting("use_parallel_residual", True)

    @classmethod
    def ropes(cls, hf: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {"rope": {**hf, **{new: hf.get(old) for old, new in _ROPE_KEYS.items()}}}

    def unused_tensors(self) -> tuple[str, ...]:
        names = [f"gpt_neox.layers.{i}.attention" for i in range(self.num_layers)]
        return tuple(f"{name}.{part}" for name in names for part in ("bias", "masked_bias"))

    def to_hf(self) -> dict[str, Any]:
        hf = super().to_hf()
        own = {old: hf.pop(new, 1.0) for old, new in _ROPE_KEYS.items()}
        return {**hf, **own, "architectures": list(self.architectures) or ["GPTNeoXForCausalLM"]}


@dataclass(frozen=True, kw_only=True)
class HeadByHead(Attention):
    """Attention whose projection gives each head's query, key and value side by side."""

    def split(self, run: Run, qkv: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        qkv = qkv.reshape(*qkv.shape[:2], self.heads, 3 * self.head_dim)
        q, k, v = mx.split(qkv.swapaxes(1, 2), 3, axis=-1)
        return *self.norm_and_turn(run, q, k), v


def network(config: Config) -> Network:
    """The layers of one config."""
    e, v, embedding = config.hidden_size, config.vocab_size, "gpt_neox.embed_in"
    return Network(
        embed=Embedding(embedding, v, e),
        layers=tuple(layer(config, i) for i in range(config.num_layers)),
        norm=LayerNorm("gpt_neox.final_layer_norm", e, config.norm_eps),
        head=None if config.tie_word_embeddings else Linear("embed_out", e, v),
        tied_to=embedding,
    )


def layer(config: Config, i: int) -> Part:
    """One layer."""
    name, e, f = f"gpt_neox.layers.{i}", config.hidden_size, config.intermediate_size
    make = Parallel if config.use_parallel_residual else PreNorm
    return make(
        mix_norm=LayerNorm(f"{name}.input_layernorm", e, config.norm_eps),
        mix=attention(config, i),
        mlp_norm=LayerNorm(f"{name}.post_attention_layernorm", e, config.norm_eps),
        mlp=MLP(
            Linear(f"{name}.mlp.dense_h_to_4h", e, f, bias=True),
            Linear(f"{name}.mlp.dense_4h_to_h", f, e, bias=True),
            config.hidden_act,
        ),
    )


def attention(config: Config, i: int) -> HeadByHead:
    """Attention of one layer."""
    name, e, d = f"gpt_neox.layers.{i}.attention", config.hidden_size, config.head_dim
    h, bias = config.num_heads, config.attention_bias
    return HeadByHead(
        layer=i,
        heads=h,
        kv_heads=h,
        head_dim=d,
        qkv=Linear(f"{name}.query_key_value", e, 3 * h * d, bias),
        out=Linear(f"{name}.dense", h * d, e, bias),
        scale=d**-0.5,
        rope=config.rope,
    )
