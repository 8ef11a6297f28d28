"""StarCoder 2 (arXiv:2402.19173): rotary grouped-query attention with a window, plain MLPs.

It has layer norms and biases throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.config import ModelConfig
from funcrt.config.fields import setting
from funcrt.layers import MLP, LayerNorm, Linear, Network, PreNorm
from funcrt.models import llama


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A StarCoder 2; all of its linear maps have biases, or none."""

    WINDOWED: ClassVar[bool] = True
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "norm_epsilon": 1e-5,
        "tie_word_embeddings": True, "eos_token_id": 50256,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mlp_type": (None, "default"), "norm_type": (None, "layer_norm"),
        "scale_attn_weights": (None, True), "activation_function": (None, "gelu"),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {
            "attention_softmax_in_fp32", "embedding_dropout", "layer_norm_epsilon",
            "residual_dropout", "scale_attention_softmax_in_fp32",
        }
    )  # fmt: skip

    norm_eps: float = setting("norm_epsilon")
    hidden_act: str = setting("hidden_act", "gelu_pytorch_tanh")
    attention_bias: bool = setting("use_bias", True)
    mlp_bias: bool = setting("use_bias", True)


def network(config: Config) -> Network:
    """The layers of one config."""
    norm = LayerNorm("model.norm", config.hidden_size, config.norm_eps)
    return llama.stack(config, lambda i: layer(config, i), norm)


def layer(config: Config, i: int) -> PreNorm:
    """One layer."""
    name, e, f = f"model.layers.{i}", config.hidden_size, config.intermediate_size
    return PreNorm(
        mix_norm=LayerNorm(f"{name}.input_layernorm", e, config.norm_eps),
        mix=llama.attention(config, i),
        mlp_norm=LayerNorm(f"{name}.post_attention_layernorm", e, config.norm_eps),
        mlp=MLP(
            Linear(f"{name}.mlp.c_fc", e, f, config.mlp_bias),
            Linear(f"{name}.mlp.c_proj", f, e, config.mlp_bias),
            config.hidden_act,
        ),
    )
