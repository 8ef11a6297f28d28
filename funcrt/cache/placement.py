"""One call: where its tokens go in the cache, and what they see of it."""

from __future__ import annotations

from typing import NamedTuple

from funcrt.cache.layout import CacheState, state_size
from funcrt.errors import InputError

import mlx.core as mx

_BEYOND_ANY_CALL = 1 << 24  # more tokens than one call can hold


class Placement(NamedTuple):
    """What one call does to the cache, decided once from the caller's mask, before any window.

    Tokens are packed: real ones first, in their own order, so that slot = position.

    Attributes:
        order: int32 `[B, T]`, packed index -> caller's index; None when T = 1.
        back: int32 `[B, T]`, caller's index -> packed index; None when T = 1.
        real: bool `[B, T]`, packed.
        slots: int32 `[B, T]`, where each packed token is written (S - 1 for padding).
        visible: bool `[B, 1, T, S]`, packed: the caller's mask within what is written. A row may
            see nothing; `give_sight` makes such rows harmless, after any window.
        positions: int32 `[B, T]` packed, 0 for padding; None where position = `offset` + packed
            index.
        offset: int32 `[B]`, lengths before the call.
        lengths: int32 `[B]`, lengths after the call.
    """

    order: mx.array | None
    back: mx.array | None
    real: mx.array
    slots: mx.array
    visible: mx.array
    positions: mx.array | None
    offset: mx.array
    lengths: mx.array


def place(mask: mx.array, lengths: mx.array, positions: mx.array | None = None) -> Placement:
    """Decide padding, slots and visibility for one call.

    Args:
        mask: bool `[B, 1, T, S]` in the caller's token order.
        lengths: int32 `[B]` before the call.
        positions: int32 `[B, T]` in the caller's order, replacing slot positions.
    """
    _, _, tokens, capacity = mask.shape
    step = mx.arange(tokens, dtype=mx.int32)
    real = mx.any(mask, axis=(1, 3))  # [B,T]
    count = mx.sum(real.astype(mx.int32), axis=1)  # [B]
    order = back = None
    if tokens > 1:
        # Unique keys make the sort stable whatever the backend's algorithm.
        keys = mx.where(real, step, step + _BEYOND_ANY_CALL)
        order = mx.argsort(keys, axis=1).astype(mx.int32)
        back = mx.argsort(order, axis=1).astype(mx.int32)
        mask = mx.take_along_axis(mask, order[:, None, :, None], axis=2)
        if positions is not None:
            positions = mx.take_along_axis(positions, order, axis=1)
        real = step < count[:, None]
    if positions is not None:
        positions = mx.where(real, positions, 0)  # rope may depend on the largest of a row
    column = mx.arange(capacity, dtype=mx.int32)
    # An array, not a number: compilers bake numbers into kernels, and each capacity would be one.
    scratch = column[-1]
    slot = lengths[:, None] + step
    # No length, however wrong, may lead a write elsewhere; sums may even have wrapped.
    fits = (slot >= 0) & (slot < scratch)
    after = lengths + count
    written = column < mx.minimum(after, scratch)[:, None, None, None]
    return Placement(
        order=order,
        back=back,
        real=real,
        slots=mx.where(real & fits, slot, scratch),
        visible=mask & written,
        positions=positions,
        offset=lengths,
        lengths=after,
    )


def give_sight(mask: mx.array, slots: mx.array) -> mx.array:
    """Let rows that see nothing see the slot that they write.

    Such a row would average every slot, unused ones included. Only its own slot surely holds
    nothing older: scratch, if it is padding.

    Args:
        mask: bool `[B, 1, T, N]`.
        slots: int32 `[B, T]`, columns of `mask`.
    """
    blind = mx.logical_not(mx.any(mask, axis=-1, keepdims=True))
    column = mx.arange(mask.shape[-1], dtype=mx.int32)
    return mask | (blind & (column == slots[:, None, :, None]))


def pack(array: mx.array, placement: Placement) -> mx.array:
    """`[B, T, ...]` from the caller's token order to the packed one."""
    return _reorder(array, placement.order)


def unpack(array: mx.array, placement: Placement) -> mx.array:
    """`[B, T, ...]` from the packed token order to the caller's."""
    return _reorder(array, placement.back)


def _reorder(array: mx.array, index: mx.array | None) -> mx.array:
    if index is None:
        return array
    return mx.take_along_axis(array, index.reshape(*index.shape, *[1] * (array.ndim - 2)), axis=1)


def check_call(
    tokens: mx.array, mask: mx.array, state: CacheState, positions: mx.array | None
) -> None:
    """Raise InputError unless shapes and dtypes of one call fit together (checked when traced)."""
    batch, capacity = state_size(state)
    if tokens.ndim != 2 or tokens.dtype != mx.int32 or tokens.shape[0] != batch:
        raise InputError(
            f"tokens: expected int32 [B={batch}, T], got {tokens.dtype} {list(tokens.shape)}"
        )
    expected = (batch, 1, tokens.shape[1], capacity)
    if mask.dtype != mx.bool_ or mask.shape != expected:
        raise InputError(
            f"mask: expected bool {list(expected)} (capacity {capacity} of the cache), "
            f"got {mask.dtype} {list(mask.shape)}; funcrt.masks builds it"
        )
    if positions is not None and (positions.shape != tokens.shape or positions.dtype != mx.int32):
        raise InputError(
            f"positions: expected int32 {list(tokens.shape)}, "
            f"got {positions.dtype} {list(positions.shape)}"
        )
