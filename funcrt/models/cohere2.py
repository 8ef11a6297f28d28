"""Command R7B and Command A (arXiv:2504.00698 §2): Command R with windows, and no turning without.

Three of four layers have a window, q - k < W, and turn; the others see everything in no order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config.patterns import PatternConfig
from funcrt.layers import Attention, Network
from funcrt.models import cohere, llama


@dataclass(frozen=True, kw_only=True)
class Config(cohere.CohereConfig, PatternConfig):
    """A Command R7B or Command A."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **cohere.CohereConfig.DEFAULTS, "sliding_window": 4096,
    }  # fmt: skip
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **cohere.CohereConfig.FIXED,
        "order_of_interleaved_layers": (None, "local_attn_first"),
        "use_qk_norm": (None, False),
    }
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {*cohere.CohereConfig.HARMLESS, "cache_implementation"}
    )
    PATTERN: ClassVar[int] = 4
    PATTERN_KEYS: ClassVar[tuple[str, ...]] = ("sliding_window_pattern", "layer_switch")

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`. Without a period, mlx-lm cannot read it, and says so."""
        return {**super().to_hf(), "sliding_window_pattern": self.period}


def network(config: Config) -> Network:
    """The layers of one config."""
    return cohere.stack(config, lambda i: cohere.layer(config, i, attention(config, i)))


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer."""
    window = config.window(i)
    rope = None if window is None else config.rope
    return replace(llama.attention(config, i), window=window, rope=rope)
