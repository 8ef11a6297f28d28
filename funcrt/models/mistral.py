"""Mistral (arXiv:2310.06825): Llama with a sliding window, q - k < W, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from funcrt.config import ModelConfig
from funcrt.models.llama import network

__all__ = ["Config", "network"]


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A Mistral; its window may be null, which is none."""

    WINDOWED: ClassVar[bool] = True
    DEFAULTS: ClassVar[dict[str, object]] = {
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    }  # fmt: skip
