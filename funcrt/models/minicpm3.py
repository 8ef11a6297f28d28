"""MiniCPM3 (arXiv:2404.06395 §4): dense, with latent attention and muP's multipliers.

The embedding is multiplied, so is what each layer adds; the logits are divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.layers import Embedding, Network, PreNorm
from funcrt.models import llama
from funcrt.models.deepseek_v2 import LatentConfig, attention


@dataclass(frozen=True, kw_only=True)
class Config(LatentConfig):
    """A MiniCPM3."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "dim_model_base": 256, "kv_lora_rank": 256, "max_position_embeddings": 32768,
        "num_key_value_heads": 40, "q_lora_rank": 768, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5, "scale_depth": 1.4, "scale_emb": 12,
        "tie_word_embeddings": True,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ModelConfig.FIXED, "mlp_bias": (None, False),
    }  # fmt: skip

    scale_emb: float = setting("scale_emb")
    scale_depth: float = setting("scale_depth")
    dim_model_base: int = setting("dim_model_base")

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        width, heads, layers = (
            hf.get(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        if width and heads and hf.get("v_head_dim") is None:
            hf["v_head_dim"] = width // heads
        if layers and hf["scale_depth"] is None:  # null is a scale of 1
            hf["scale_depth"] = math.sqrt(layers)
        if hf["dim_model_base"] is None:
            hf["dim_model_base"] = width
        return super().fill(hf)


def network(config: Config) -> Network:
    """The layers of one config."""
    v, e = config.vocab_size, config.hidden_size
    return replace(
        llama.stack(config, lambda i: layer(config, i)),
        embed=Embedding("model.embed_tokens", v, e, config.scale_emb),
        logit_scale=config.dim_model_base / e,
    )


def layer(config: Config, i: int) -> PreNorm:
    """One layer."""
    scale = config.scale_depth / math.sqrt(config.num_layers)
    return replace(llama.layer(config, i, attention(config, i)), scale=scale)
