"""Configs of models whose layers with and without a window follow each other in a pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.config.layer_types import FULL, SLIDING, MixedConfig
from funcrt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PatternConfig(MixedConfig):
    """A model whose config.json lists `layer_types`, or says the pattern that repeats, or both.

    Class attributes of a family:
        PATTERN: where config.json says neither.
        PATTERN_KEYS: where it may say the pattern; the first of them counts, others repeat it.
    """

    PATTERN: ClassVar[int] = 2
    PATTERN_KEYS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """See `MixedConfig`. Raises ConfigError where layer types and patterns disagree."""
        hf = super().fill(hf)
        types = hf.get("layer_types")
        for key in cls.PATTERN_KEYS:
            pattern = hf.pop(key, None)
            if pattern is None or not isinstance(types, Sequence):
                continue
            if list(types) != _repeat(key, pattern, len(types)):
                raise ConfigError(
                    f"config {key}={pattern!r} does not fit the layer_types {list(types)}; "
                    "keep the one that the weights were trained with"
                )
        return hf

    @classmethod
    def slides(cls, hf: Mapping[str, Any], layer: int) -> bool:
        """See `MixedConfig`."""
        for key in cls.PATTERN_KEYS[:1]:
            if hf.get(key) is not None:
                return has_window(key, hf[key], layer)
        return has_window("", cls.PATTERN, layer)

    @property
    def period(self) -> int | None:
        """The n of which every n-th layer sees everything, or None if it is not so."""
        types = list(self.layer_types)
        n = types.index(FULL) + 1 if FULL in types else len(types) + 1
        return n if types == _repeat("", n, len(types)) else None


def has_window(key: str, pattern: int | str, layer: int) -> bool:
    """Whether a layer has a window.

    Args:
        key: of config.json, for the error.
        pattern: n, where every n-th layer sees everything; or a letter for each layer of a period,
            L for those with a window, G for those without.
        layer: its number.

    Raises ConfigError for anything else.
    """
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return pattern[layer % len(pattern)] == "L"
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return (layer + 1) % pattern != 0
    raise ConfigError(
        f"config {key}: expected a positive whole number, or the letters L and G, got {pattern!r}"
    )


def _repeat(key: str, pattern: int | str, count: int) -> list[str]:
    return [SLIDING if has_window(key, pattern, i) else FULL for i in range(count)]
