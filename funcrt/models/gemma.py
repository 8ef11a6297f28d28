"""Gemma (arXiv:2403.08295): Llama with scaled embeddings, norms around 1 + weight, GeGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.layers import Embedding, Network, Part, RMSNorm
from funcrt.models import llama

TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A Gemma. Its first files say "gelu" and mean the approximation by tanh."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
        "eos_token_id": 1,
    }  # fmt: skip
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_activation": (None, TANH),
        "mlp_bias": (None, False),
        "use_bidirectional_attention": (None, False),
    }

    hidden_act: str = setting("hidden_act", TANH)
    tie_word_embeddings: bool = setting("tie_word_embeddings", True)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        hf = super().fill(hf)
        return {**hf, "hidden_act": TANH} if hf.get("hidden_act") == "gelu" else hf


def network(config: Config) -> Network:
    """The layers of one config."""
    return stack(config, lambda i: layer(config, i))


def stack(config: ModelConfig, make_layer: Callable[[int], Part]) -> Network:
    """What every Gemma has around the layers that `make_layer` gives for their numbers."""
    e = config.hidden_size
    return replace(
        llama.stack(config, make_layer),
        embed=Embedding("model.embed_tokens", config.vocab_size, e, scale=e**0.5),
        norm=norm(config, "model.norm"),
    )


def layer(config: Config, i: int) -> Part:
    """One layer."""
    name = f"model.layers.{i}"
    return replace(
        llama.layer(config, i, llama.attention(config, i)),
        mix_norm=norm(config, f"{name}.input_layernorm"),
        mlp_norm=norm(config, f"{name}.post_attention_layernorm"),
    )


def norm(config: ModelConfig, name: str) -> RMSNorm:
    """A norm of the residual stream, whose weights are stored less 1."""
    return RMSNorm(name, config.hidden_size, config.norm_eps, offset=1.0)
