"""EXAONE 4.0 (arXiv:2507.11407 §2.1): norms after attention and MLP, and of each head.

The larger model has a window, q - k < W, in three of four layers, and only those turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config.layer_types import FULL
from funcrt.config.patterns import PatternConfig
from funcrt.layers import Attention, Network
from funcrt.models import llama, olmo2, qwen3


@dataclass(frozen=True, kw_only=True)
class Config(PatternConfig):
    """An EXAONE 4.0. Without a window (null) every layer sees everything, and turns."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "eos_token_id": 2,
    }  # fmt: skip
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
    }
    PATTERN: ClassVar[int] = 4
    PATTERN_KEYS: ClassVar[tuple[str, ...]] = ("sliding_window_pattern",)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """See `PatternConfig`."""
        if hf.get("sliding_window") is None:
            hf = {**hf, "sliding_window_pattern": None}  # as transformers does
        return super().fill(hf)

    @classmethod
    def slides(cls, hf: Mapping[str, Any], layer: int) -> bool:
        """See `PatternConfig`."""
        return hf.get("sliding_window") is not None and super().slides(hf, layer)

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`. mlx-lm takes a letter for each layer, or null for no windows."""
        letters = "".join("G" if kind == FULL else "L" for kind in self.layer_types)
        pattern = None if self.sliding_window is None else letters
        return {**super().to_hf(), "sliding_window_pattern": pattern}


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(config, lambda i: olmo2.layer(config, i, attention(config, i)))


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer: that of Qwen3, which does not turn where windows are elsewhere."""
    turns = config.window(i) is not None or config.sliding_window is None
    return replace(qwen3.attention(config, i), rope=config.rope if turns else None)
