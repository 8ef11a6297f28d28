"""OLMo 3 (arXiv:2512.13961): OLMo 2 with a window, q - k < W, in three of four layers.

Only the layers without one turn slower for longer contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config.local_rope import LocalRopeConfig
from funcrt.errors import ConfigError
from funcrt.layers import Network
from funcrt.models import llama, olmo2

THETA = 500000.0


@dataclass(frozen=True, kw_only=True)
class Config(LocalRopeConfig):
    """An OLMo 3."""

    DEFAULTS: ClassVar[dict[str, Any]] = {**olmo2.Config.DEFAULTS, "sliding_window": 4096}
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = olmo2.Config.FIXED
    ROPE_DEFAULTS: ClassVar[dict[str, Any]] = {"rope_theta": THETA}
    PATTERN: ClassVar[int] = 4

    @classmethod
    def local_theta(cls, hf: Mapping[str, Any]) -> Any:
        """See `LocalRopeConfig`."""
        theta = hf.get("rope_theta")
        if theta not in (None, THETA) and hf.get("rope_parameters") is None:
            # Older versions of transformers take it for all layers, newer ones for some.
            raise ConfigError(
                f"config rope_theta={theta!r}: expected {THETA}, or rope_parameters that give "
                "the base of each layer type"
            )
        return None

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`. With other bases than that one, mlx-lm cannot read it, and says so."""
        hf = super().to_hf()
        if {self.rope.theta, self.local_rope.theta} != {THETA}:
            del hf["rope_theta"], hf["rope_scaling"]
            hf["rope_parameters"] = self.ropes_by_type()
        return hf


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(config, lambda i: olmo2.layer(config, i, attention(config, i)))


def attention(config: Config, i: int) -> olmo2.WideNormAttention:
    """Attention of one layer."""
    window = config.window(i)
    rope = config.rope if window is None else config.local_rope
    return replace(olmo2.attention(config, i), window=window, rope=rope)
