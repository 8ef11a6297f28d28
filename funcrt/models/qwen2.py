"""Qwen2 and Qwen2.5 (arXiv:2407.10671, 2412.15115): Llama with biases on queries, keys and values.

Where windows are in use, the first layers see everything and the last ones look through a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig
from funcrt.config.fields import setting
from funcrt.config.layer_types import SwitchedConfig
from funcrt.layers import Attention, Network
from funcrt.models import llama


@dataclass(frozen=True, kw_only=True)
class Config(SwitchedConfig):
    """A Qwen2; layers from `max_window_layers` on have the window if `use_sliding_window`."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096,
        "max_window_layers": 28,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ModelConfig.FIXED, "attention_bias": (None, True), "mlp_bias": (None, False),
    }  # fmt: skip

    attention_bias: bool = setting("attention_bias", True)  # but for the output
    max_window_layers: int = setting("max_window_layers", 28, least=0)

    @classmethod
    def slides(cls, hf: Mapping[str, Any], layer: int) -> bool:
        """See `MixedConfig`."""
        return hf["sliding_window"] is not None and layer >= hf["max_window_layers"]


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(config, lambda i: llama.layer(config, i, attention(config, i)))


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer."""
    return replace(llama.attention_with_plain_output(config, i), window=config.window(i))
