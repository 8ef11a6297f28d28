"""One call: where its tokens go in the cache, and what they see of it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

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
        slots: int32 `[B, T]`, where each packed token is written (S - 1 for padding). Keys and
            values of a `first` call stand in a row instead, see `write_first`.
        visible: bool `[B, 1, T, S]`, packed: the caller's mask within what is written. A row may
            see nothing; `give_sight` makes such rows harmless, after any window.
        positions: int32 `[B, T]` packed, 0 for padding; None where position = `offset` + packed
            index.
        offset: int32 `[B]`, lengths before the call.
        lengths: int32 `[B]`, lengths after the call.
        seen: int32 `[B, T]`, how many slots each packed token sees, its own included, where it is
            known that those are all up to its own; 0 for padding. Or None.
        first: known to be causal over rows that hold nothing yet, so that new tokens are all that
            there is to see.
    """

    order: mx.array | None
    back: mx.array | None
    real: mx.array
    slots: mx.array
    visible: mx.array
    positions: mx.array | None
    offset: mx.array
    lengths: mx.array
    seen: mx.array | None = None
    first: bool = False

    @property
    def causal(self) -> bool:
        """Whether it is known that each real token sees all slots up to its own."""
        return self.seen is not None


Sight: TypeAlias = mx.array | Placement
"""What tokens see: a mask bool `[B, 1, T, S]`, or what was made of one already."""


def place(mask: Sight, lengths: mx.array, positions: mx.array | None = None) -> Placement:
    """Decide padding, slots and visibility for one call.

    Args:
        mask: bool `[B, 1, T, S]` in the caller's token order; what is placed stays as it is.
        lengths: int32 `[B]` before the call.
        positions: int32 `[B, T]` in the caller's order, replacing slot positions.
    """
    if isinstance(mask, Placement):
        return mask
    real = mx.any(mask, axis=(1, 3))  # [B,T]
    order, back, real, count = _pack(real)
    if order is not None:
        mask = mx.take_along_axis(mask, order[:, None, :, None], axis=2)
        if positions is not None:
            positions = mx.take_along_axis(positions, order, axis=1)
    if positions is not None:
        positions = mx.where(real, positions, 0)  # rope may depend on the largest of a row
    column, scratch = _columns(mask.shape[3])
    slot = lengths[:, None] + mx.arange(mask.shape[2], dtype=mx.int32)
    after = lengths + count
    written = column < mx.minimum(after, scratch)[:, None, None, None]
    return Placement(
        order=order,
        back=back,
        real=real,
        slots=_keep_inside(slot, real, scratch),
        visible=mask & written,
        positions=positions,
        offset=lengths,
        lengths=after,
    )


def place_causal(
    valid: mx.array, lengths: mx.array, capacity: int, *, first: bool = False
) -> Placement:
    """`place` of `masks.causal`, without the mask: what it says is known without looking at it.

    Args:
        valid: `[B, T]` of any dtype, nonzero = real token; padding may stand anywhere.
        lengths: int32 `[B]` before the call.
        capacity: S of the cache.
        first: `lengths` are known to be 0.
    """
    order, back, real, count = _pack(valid if valid.dtype == mx.bool_ else valid != 0)
    column, scratch = _columns(capacity)
    slot = lengths[:, None]
    if valid.shape[1] > 1:
        slot = slot + mx.arange(valid.shape[1], dtype=mx.int32)
    seen = mx.where(real, mx.minimum(slot + 1, scratch), 0)  # [B,T], how many slots
    return Placement(
        order=order,
        back=back,
        real=real,
        slots=_keep_inside(slot, real, scratch),
        visible=column < seen[:, None, :, None],
        positions=None,
        offset=lengths,
        lengths=lengths + count,
        seen=seen,
        first=first,
    )


def _pack(
    real: mx.array,
) -> tuple[mx.array | None, mx.array | None, mx.array, mx.array]:
    """Order and back, which packed tokens are real, and how many of each row `[B]`."""
    if real.shape[1] == 1:
        return None, None, real, real[:, 0].astype(mx.int32)
    step = mx.arange(real.shape[1], dtype=mx.int32)
    # Unique keys make the sort stable whatever the backend's algorithm.
    keys = mx.where(real, step, step + _BEYOND_ANY_CALL)
    order = mx.argsort(keys, axis=1).astype(mx.int32)
    back = mx.argsort(order, axis=1).astype(mx.int32)
    count = mx.sum(real.astype(mx.int32), axis=1)
    return order, back, step < count[:, None], count


def _columns(capacity: int) -> tuple[mx.array, mx.array]:
    """The numbers of all slots, int32 `[S]`, and that of scratch.

    An array, too: compilers bake numbers into kernels, and each capacity would be one.
    """
    column = mx.arange(capacity, dtype=mx.int32)
    return column, column[-1]


def _keep_inside(slot: mx.array, real: mx.array, scratch: mx.array) -> mx.array:
    """Where packed tokens are written.

    No length, however wrong, may lead a write elsewhere: MLX checks no index. Sums may even have
    wrapped.
    """
    return mx.where(real & (slot >= 0) & (slot < scratch), slot, scratch)


def give_sight(mask: mx.array, slots: mx.array) -> mx.array:
    """Let rows that see nothing see the slot that they write.

    Such a row would average every slot, unused ones included. Only its own slot surely holds
    nothing older: scratch, if it is padding.

    Args:
        mask: bool `[B, 1, T, N]`.
        slots: int32 `[B, T]`, columns of `mask`.
    """
    return _see_own(mask, mx.logical_not(mx.any(mask, axis=-1, keepdims=True)), slots)


def find_sight(call: Placement) -> mx.array:
    """Bool `[B, 1, T, S]`: `give_sight` of what is visible in all."""
    if not call.causal:
        return give_sight(call.visible, call.slots)
    return _see_own(call.visible, mx.logical_not(call.real)[:, None, :, None], call.slots)


def _see_own(mask: mx.array, blind: mx.array, slots: mx.array) -> mx.array:
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
    tokens: mx.array, mask: Sight, state: CacheState, positions: mx.array | None
) -> None:
    """Raise InputError unless shapes and dtypes of one call fit together (checked when traced)."""
    if isinstance(mask, Placement):
        mask = mask.visible
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
