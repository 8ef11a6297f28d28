"""Positions as arrays where modules expect Python integers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class Offset(mx.array):
    """An int32 `[B]` array that knows how far it is from the offset of its call.

    Modules build ranges such as `arange(offset, offset + L)`. Their length is the distance of the
    two, which is known while the offset itself is not.
    """

    def __init__(self, value: Any, distance: int = 0) -> None:
        super().__init__(value)
        self.distance = distance

    def __add__(self, other: Any) -> Any:
        total = super().__add__(other)
        return Offset(total, self.distance + other) if isinstance(other, int) else total

    __radd__ = __add__
    __iadd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, int) else super().__sub__(other)
