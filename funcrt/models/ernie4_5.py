"""ERNIE 4.5, the dense models (Baidu, 2025): Llama in which neighbours turn together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.config import ModelConfig
from funcrt.config.fields import setting
from funcrt.models.llama import network

__all__ = ["Config", "network"]


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """An ERNIE 4.5; all of its linear maps have biases, or none."""

    INTERLEAVED: ClassVar[bool] = True
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {"rope_theta": 500000.0}
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    }  # fmt: skip

    attention_bias: bool = setting("use_bias", False)
    mlp_bias: bool = setting("use_bias", False)
