"""What can be known of an array while a function is traced."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def read(array: mx.array) -> Any:
    """The array's values as Python numbers and lists, or None while it is traced.

    Checks that need values use it: they run wherever a function is called directly.
    """
    try:
        return array.tolist()
    except ValueError:  # MLX: arrays cannot be evaluated during a transformation
        return None
