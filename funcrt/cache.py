"""Cache state: everything a model remembers, as a flat dict of arrays in one fixed key order.

`lengths` int32 `[B]` counts the slots each row has filled; every layer adds its own arrays. Slot
S - 1 is scratch: padding and whatever does not fit is written there, and nothing ever sees it, so
the usable capacity is S - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from funcrt.errors import CacheError, InputError
from funcrt.params import FLOATS

import mlx.core as mx

CacheState = dict[str, mx.array]

_BEYOND_ANY_CALL = 1 << 24  # more tokens than one call can hold


class CacheEntry(NamedTuple):
    """One array of a cache state, for B rows and S slots: `[B, heads, S, width]`."""

    name: str
    heads: int
    width: int
    dtype: str

    def shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        """The array's shape."""
        return (batch, self.heads, capacity, self.width)


CacheSpec = tuple[CacheEntry, ...]


def init_cache(spec: CacheSpec, batch: int, capacity: int) -> CacheState:
    """An empty state of zeros for `batch` rows and `capacity` slots, one of them scratch.

    Raises CacheError unless batch >= 1 and capacity >= 2.
    """
    if batch < 1 or capacity < 2:
        raise CacheError(
            f"cache: expected batch >= 1 and capacity >= 2 (one slot is scratch), "
            f"got batch {batch}, capacity {capacity}"
        )
    state = {"lengths": mx.zeros((batch,), dtype=mx.int32)}
    for entry in spec:
        state[entry.name] = mx.zeros(entry.shape(batch, capacity), dtype=FLOATS[entry.dtype])
    return state


def check_state(spec: CacheSpec, state: Mapping[str, mx.array]) -> CacheState:
    """The same arrays in the fixed order (loading a file may reorder keys, and order retraces).

    Raises CacheError naming what is missing, unknown, misshapen or of another dtype.
    """
    names = ["lengths", *(entry.name for entry in spec)]
    if missing := [name for name in names if name not in state]:
        raise CacheError(f"cache of another model: it has no {', '.join(missing[:4])}")
    if unknown := sorted(state.keys() - set(names)):
        raise CacheError(f"cache of another model: unknown arrays {', '.join(unknown[:4])}")
    batch, capacity = state_size(state)
    if state["lengths"].shape != (batch,) or state["lengths"].dtype != mx.int32:
        raise CacheError(f"cache lengths: expected int32 [{batch}], got {state['lengths'].shape}")
    for entry in spec:
        array, expected = state[entry.name], entry.shape(batch, capacity)
        if array.shape != expected or array.dtype != FLOATS[entry.dtype]:
            raise CacheError(
                f"cache {entry.name}: expected {entry.dtype} {expected}, "
                f"got {array.dtype} {array.shape}"
            )
    return {name: state[name] for name in names}


def state_size(state: Mapping[str, mx.array]) -> tuple[int, int]:
    """Batch and capacity of a state. Raises CacheError where an array has other axes."""
    name, array = next(item for item in state.items() if item[0] != "lengths")
    if array.ndim != 4:
        raise CacheError(f"cache {name}: expected [B, heads, S, width], got {list(array.shape)}")
    return array.shape[0], array.shape[2]


def state_bytes(spec: CacheSpec, batch: int, capacity: int) -> int:
    """Bytes that `init_cache` allocates."""
    entries = sum(entry.heads * entry.width * FLOATS[entry.dtype].size for entry in spec)
    return batch * (4 + capacity * entries)


def grow(state: CacheState, capacity: int) -> CacheState:
    """The same contents with more slots. Pure; the old scratch slot becomes an ordinary free one.

    Raises CacheError when `capacity` is below the present one.
    """
    batch, old = state_size(state)
    if capacity < old:
        raise CacheError(f"grow: capacity {capacity} is below the present {old}")
    if capacity == old:
        return state
    grown = {"lengths": state["lengths"]}
    for name, array in state.items():
        if name != "lengths":
            room = mx.zeros(
                (batch, array.shape[1], capacity - old + 1, array.shape[3]), array.dtype
            )
            grown[name] = mx.concatenate([array[:, :, : old - 1], room], axis=2)
    return grown


def clear(state: CacheState, rows: mx.array) -> CacheState:
    """Empty the given rows and zero what they held. Pure.

    Zeroing matters: in MLX a value that is not finite leaks out of a masked slot.

    Args:
        state: any state.
        rows: int32 `[N]`, row numbers.
    """
    batch = state["lengths"].shape[0]
    cleared = mx.any(mx.arange(batch)[:, None] == rows[None], axis=1)  # [B]
    return {
        name: mx.where(cleared.reshape(batch, *[1] * (array.ndim - 1)), 0, array).astype(
            array.dtype
        )
        for name, array in state.items()
    }


# --- one call: where its tokens go and what they see ---------------------------------------------


class Placement(NamedTuple):
    """What one call does to the cache, decided once from the caller's mask, before any window.

    Tokens are packed: real ones first, in their own order, so that slot = position.

    Attributes:
        order: int32 `[B, T]`, packed index -> caller's index; None when T = 1.
        back: int32 `[B, T]`, caller's index -> packed index; None when T = 1.
        real: bool `[B, T]`, packed.
        slots: int32 `[B, T]`, where each packed token is written (S - 1 for padding).
        mask: bool `[B, 1, T, S]`, packed; what sees nothing sees the slot it writes.
        positions: int32 `[B, T]` packed, 0 for padding; None where position = `offset` + packed
            index.
        offset: int32 `[B]`, lengths before the call.
        lengths: int32 `[B]`, lengths after the call.
    """

    order: mx.array | None
    back: mx.array | None
    real: mx.array
    slots: mx.array
    mask: mx.array
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
    after = lengths + count
    written = column < mx.minimum(after, scratch)[:, None, None, None]
    visible = mask & written
    blind = mx.logical_not(mx.any(visible, axis=-1, keepdims=True))
    slots = mx.where(real & (slot < scratch), slot, scratch)
    return Placement(
        order=order,
        back=back,
        real=real,
        slots=slots,
        # A row that sees nothing would average every slot, unused ones included. Only the slot
        # that it writes itself surely holds nothing older: scratch, if it is padding.
        mask=visible | (blind & (column == slots[:, None, :, None])),
        positions=positions,
        offset=lengths,
        lengths=after,
    )


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


def write(buffer: mx.array, values: mx.array, placement: Placement) -> mx.array:
    """`buffer` `[B, K, S, D]` with packed `values` `[B, K, T, D]` in their slots.

    Slots never leave the buffer: MLX does not check indices, and past the end it would overwrite
    another head.
    """
    index = mx.broadcast_to(placement.slots[:, None, :, None], values.shape)
    return mx.put_along_axis(buffer, index, values.astype(buffer.dtype), axis=2)


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
