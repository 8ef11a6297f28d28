"""Youtu-LLM (arXiv:2512.24618): the attention of DeepSeek-V3, and a dense MLP in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.config import ModelConfig
from funcrt.layers import Network
from funcrt.models import llama
from funcrt.models.deepseek_v3 import TurningConfig, attention


@dataclass(frozen=True, kw_only=True)
class Config(TurningConfig):
    """A Youtu-LLM."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "kv_lora_rank": 512, "max_position_embeddings": 131072, "num_key_value_heads": 16,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "tie_word_embeddings": True, "v_head_dim": 128,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ModelConfig.FIXED, "mlp_bias": (None, False),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = TurningConfig.HARMLESS | {"embedding_initializer_range"}


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(config, lambda i: llama.layer(config, i, attention(config, i)))
