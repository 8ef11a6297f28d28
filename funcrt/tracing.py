"""What can be known of arrays while a function is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import mlx.core as mx


def read(array: mx.array) -> Any:
    """The array's values as Python numbers and lists, or None while it is traced.

    Checks that need values use it: they run wherever a function is called directly.
    """
    values = read_all(array)
    return None if values is None else values[0]


def read_all(*arrays: mx.array) -> list[Any] | None:
    """`read` of several arrays, waiting for the device once; None while any of them is traced."""
    try:
        mx.eval(*arrays)
    except ValueError:  # MLX: arrays cannot be evaluated during a transformation
        return None
    return [array.tolist() for array in arrays]


def settle(arrays: Iterable[mx.array]) -> None:
    """Evaluate arrays, or leave them as they are while a function is traced.

    What was read of a buffer has to be settled before the same buffer is written: in one graph
    with the read, MLX would copy the whole buffer instead of writing in place.
    """
    with contextlib.suppress(ValueError):  # MLX: arrays cannot be evaluated in a transformation
        mx.eval(*arrays)
