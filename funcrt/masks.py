"""Masks: who may look at what, bool `[B, 1, T, S]`, True = may attend.

Columns are cache slots. A row's real tokens land in slots `lengths, lengths + 1, ...` in their own
order, so a helper needs the lengths *before* the call. A query row without any True is padding.
Everything here is pure and traceable.
"""

from __future__ import annotations

from funcrt.errors import InputError

import mlx.core as mx


def causal(valid: mx.array, lengths: mx.array, capacity: int) -> mx.array:
    """Each real token sees what is cached, itself and the real tokens before it.

    With two cached slots and one left-padded call of four tokens, capacity 7::

        valid            slot 0 1 2 3 4 5 6
        0  (padding)          . . . . . . .
        1                     x x x . . . .
        1                     x x x x . . .
        1                     x x x x x . .

    Args:
        valid: `[B, T]` of any dtype, nonzero = real token; padding may stand anywhere.
        lengths: int32 `[B]`, slots filled before this call.
        capacity: S of the cache.

    Returns:
        bool `[B, 1, T, S]`.

    Raises:
        InputError: wrong ranks or batch sizes.
    """
    if valid.ndim != 2:
        raise InputError(f"valid: expected shape [B, T], got {valid.shape}")
    check_lengths(lengths, valid.shape[0])
    real = valid != 0
    rank = mx.cumsum(real.astype(mx.int32), axis=1) - 1  # [B,T]
    last = lengths[:, None] + rank  # the slot that a real token takes
    slots = mx.arange(capacity, dtype=mx.int32)
    mask = (slots <= last[..., None]) & real[..., None]  # [B,T,S]
    return mask[:, None]


def as_mask(array: mx.array) -> mx.array:
    """A boolean or integer attention mask of rank 2 to 4 as bool `[B or 1, 1, T, S]`.

    Args:
        array: `[T, S]`, `[B, T, S]` or `[B, 1, T, S]`; nonzero = may attend.

    Raises:
        InputError: wrong rank, a head axis other than 1, or a float (additive) mask.
    """
    if mx.issubdtype(array.dtype, mx.floating):
        raise InputError(
            f"mask: expected bool or integers (nonzero = may attend), got {array.dtype}"
        )
    if array.ndim == 2:
        array = array[None]
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim != 4 or array.shape[1] != 1:
        raise InputError(f"mask: expected [T, S], [B, T, S] or [B, 1, T, S], got {array.shape}")
    return array != 0


def check_lengths(lengths: mx.array, batch: int) -> None:
    """Raise InputError unless `lengths` is int32 `[B]`."""
    if lengths.shape != (batch,) or lengths.dtype != mx.int32:
        raise InputError(
            f"lengths: expected int32 [{batch}], got {lengths.dtype} {list(lengths.shape)}"
        )
