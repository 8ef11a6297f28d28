"""GPT-2 (Radford et al. 2019): learned positions, layer norms, one matrix for all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt import low_rank, ops
from funcrt.config import ModelConfig, setting
from funcrt.errors import CacheError, ConfigError
from funcrt.layers import MLP, Attention, Embedding, LayerNorm, Linear, Network, Part, PreNorm, Run
from funcrt.packing import Transposed, quantization_of
from funcrt.params import ParamSpec

import mlx.core as mx

# What transformers takes for its own keys too.
_ALSO = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_ABSENT = ("attention_bias", "mlp_bias", "rope_parameters", "rope_scaling", "rope_theta")


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A GPT-2, as its first config.json spelled things."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "layer_norm_epsilon": 1e-5, "eos_token_id": 50256,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_cross_attention": (None, False),
        **dict.fromkeys(_ABSENT, (None,)),
    }
    # Of training, of heads that classify, of numerics, of first versions; n_ctx is n_positions.
    HARMLESS: ClassVar[frozenset[str]] = frozenset({
        "_num_labels", "attn_pdrop", "embd_pdrop", "gradient_checkpointing", "n_ctx", "n_special",
        "output_past", "predict_special_tokens", "reorder_and_upcast_attn", "resid_pdrop",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
        "summary_type", "summary_use_proj", "task_specific_params",
    })  # fmt: skip

    hidden_size: int = setting("n_embd")
    intermediate_size: int = setting("n_inner")
    num_layers: int = setting("n_layer")
    num_heads: int = setting("n_head")
    norm_eps: float = setting("layer_norm_epsilon")
    max_positions: int = setting("n_positions")
    hidden_act: str = setting("activation_function", "gelu_new")
    tie_word_embeddings: bool = setting("tie_word_embeddings", True)
    scale_attn_weights: bool = setting("scale_attn_weights", True)
    scale_attn_by_inverse_layer_idx: bool = setting("scale_attn_by_inverse_layer_idx", False)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        for other, key in _ALSO.items():
            value = hf.pop(other, hf.get(key))
            if hf.get(key) not in (None, value):
                raise ConfigError(f"config has {key}={hf[key]!r} and {other}={value!r}; keep one")
            hf[key] = value
        if hf["n_positions"] is None:
            hf["n_positions"] = 1024
        hf = super().fill(hf)
        if hf.get("n_inner") is None and hf.get("n_embd") is not None:
            hf["n_inner"] = 4 * hf["n_embd"]
        return hf

    @property
    def position_limit(self) -> int:
        return self.max_positions

    def unused_tensors(self) -> tuple[str, ...]:
        parts = ("bias", "masked_bias")  # the causal mask, and what it puts
        return tuple(f"h.{i}.attn.{part}" for i in range(self.num_layers) for part in parts)

    def to_hf(self) -> dict[str, Any]:
        absent = (*_ABSENT, "num_key_value_heads", "head_dim")
        hf = {key: value for key, value in super().to_hf().items() if key not in absent}
        names = list(self.architectures) or ["GPT2LMHeadModel"]
        return {**hf, "architectures": names, "n_ctx": self.max_positions}


@dataclass(frozen=True)
class Conv1D(Linear):
    """A linear map stored as `[I, O]`, or packed as `[O, I]`."""

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        params, name = run.params, self.name
        if quantization_of(params, name, self.inputs) is not None:
            return ops.linear(params, name, x)
        y = low_rank.add(params, name, x, x @ params[f"{name}.weight"].astype(x.dtype))
        return y + params[f"{name}.bias"].astype(x.dtype)

    def tensors(self) -> ParamSpec:
        weight, bias = Transposed((self.inputs, self.outputs)), (self.outputs,)
        return {f"{self.name}.weight": weight, f"{self.name}.bias": bias}


@dataclass(frozen=True)
class Embeddings(Part):
    """Of tokens, and of their positions. Raises CacheError for capacities that go beyond these."""

    tokens: Embedding
    positions: Embedding

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        capacity, limit = run.call.visible.shape[-1], self.positions.vocab
        if capacity > limit + 1:
            raise CacheError(
                f"cache: this model has {limit} positions, so its capacity is at most {limit + 1} "
                f"(one slot is scratch), got {capacity}"
            )
        return self.tokens(run, x) + self.positions(run, run.positions)


def network(config: Config) -> Network:
    """The layers of one config."""
    e = config.hidden_size
    return Network(
        embed=Embeddings(
            Embedding("wte", config.vocab_size, e), Embedding("wpe", config.max_positions, e)
        ),
        layers=tuple(layer(config, i) for i in range(config.num_layers)),
        norm=LayerNorm("ln_f", e, config.norm_eps),
        head=None if config.tie_word_embeddings else Linear("lm_head", e, config.vocab_size),
        tied_to="wte",
    )


def layer(config: Config, i: int) -> PreNorm:
    """One layer."""
    name, e, f, eps = f"h.{i}", config.hidden_size, config.intermediate_size, config.norm_eps
    up, down = Conv1D(f"{name}.mlp.c_fc", e, f), Conv1D(f"{name}.mlp.c_proj", f, e)
    return PreNorm(
        mix_norm=LayerNorm(f"{name}.ln_1", e, eps),
        mix=attention(config, i),
        mlp_norm=LayerNorm(f"{name}.ln_2", e, eps),
        mlp=MLP(up, down, config.hidden_act),
    )


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer."""
    name, e, d = f"h.{i}.attn", config.hidden_size, config.head_dim
    h, k = config.num_heads, config.num_kv_heads
    scale = d**-0.5 if config.scale_attn_weights else 1.0
    return Attention(
        layer=i,
        heads=h,
        kv_heads=k,
        head_dim=d,
        qkv=Conv1D(f"{name}.c_attn", e, (h + 2 * k) * d),
        out=Conv1D(f"{name}.c_proj", h * d, e),
        scale=scale / (i + 1) if config.scale_attn_by_inverse_layer_idx else scale,
        rope=None,
    )
