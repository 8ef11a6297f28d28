"""Moving whole rows of a cache state, and giving it more slots. Pure functions; every one traces.

Checks that need values (a row number out of range) raise on arrays that can be read, and are left
to the caller while a function is traced: a traced row number is clipped into the batch.

`fork`, `insert` and `clear` write only the rows they move, in place, if nothing else holds the old
state. Within a traced function `fork` copies the state, since it reads what it also writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from funcrt.cache.layout import CacheState, kind_of, slot_axis, state_size
from funcrt.errors import CacheError
from funcrt.tracing import read, settle

import mlx.core as mx

Rows = mx.array | int | Sequence[int]


def grow(state: CacheState, capacity: int) -> CacheState:
    """The same contents with more slots; the old scratch slot becomes an ordinary free one.

    Rings and recurrent states stay as they are, everything else is copied.

    Raises:
        CacheError: `capacity` is below the present one; a row was given more than it could hold.
    """
    old = state_size(state)[1]
    if capacity < old:
        raise CacheError(f"grow: capacity {capacity} is below the present {old}")
    if capacity == old:
        return state
    _check_nothing_lost(state, old)
    return {name: _with_slots(name, array, old - 1, capacity) for name, array in state.items()}


def _check_nothing_lost(state: CacheState, capacity: int) -> None:
    """What did not fit was dropped, and more slots would show zeros in its place."""
    longest = read(mx.max(state["lengths"]))
    if any(slot_axis(name) for name in state) and longest is not None and longest >= capacity:
        raise CacheError(
            f"grow: a row was given {longest} tokens and held {capacity - 1} of them: trim the "
            "lost ones, or grow before writing"
        )


def _with_slots(name: str, array: mx.array, used: int, capacity: int) -> mx.array:
    """The first `used` slots of an array, and zeros up to `capacity`."""
    axis = slot_axis(name)
    if axis is None:
        return array
    shape = list(array.shape)
    shape[axis] = capacity - used
    kept = array[:, :used] if axis == 1 else array[:, :, :used]
    return mx.concatenate([kept, mx.zeros(shape, array.dtype)], axis=axis)


def shrink(state: CacheState, capacity: int) -> CacheState:
    """The same contents with fewer slots; rings and recurrent states stay as they are.

    Raises:
        CacheError: `capacity` is above the present one, below 2, or too small for a row.
    """
    old = state_size(state)[1]
    if capacity == old:
        return state
    if not 2 <= capacity < old:
        raise CacheError(
            f"shrink: expected a capacity from 2 to {old}, the present, got {capacity}"
        )
    longest = read(mx.max(state["lengths"]))
    if longest is not None and longest > capacity - 1:
        raise CacheError(
            f"shrink: a row holds {longest} tokens, capacity {capacity} has room for {capacity - 1}"
        )
    return {name: _with_slots(name, array, capacity - 1, capacity) for name, array in state.items()}


def join(states: Sequence[CacheState]) -> CacheState:
    """The rows of several states of one model, one after another, as one state.

    Raises:
        CacheError: no state, states of different models, or of different capacities.
    """
    if not states:
        raise CacheError("join: expected at least one state")
    first = states[0]
    for other in states[1:]:
        if other.keys() != first.keys():
            raise CacheError("join: the states do not have the same arrays")
        for name, array in first.items():
            if other[name].shape[1:] != array.shape[1:] or other[name].dtype != array.dtype:
                raise CacheError(
                    f"join: {name} is {array.dtype} {list(array.shape[1:])} in one state, "
                    f"{other[name].dtype} {list(other[name].shape[1:])} in another: grow or shrink "
                    "them to one capacity"
                )
    if len(states) == 1:
        return first
    return {name: mx.concatenate([state[name] for state in states]) for name in first}


def fork(state: CacheState, source_row: Rows, target_row: Rows) -> CacheState:
    """Copy rows: one prefix, many continuations.

    Args:
        state: any state; all sources are read before any target is written.
        source_row: the row to copy, or one per target.
        target_row: the row, or rows int32 `[N]`, that become copies.

    Raises:
        CacheError: a row out of range, onto itself, or named twice as a target.
    """
    batch = _batch(state)
    targets = as_rows(target_row, batch, "target_row")
    sources = as_rows(source_row, batch, "source_row")
    if sources.size not in (1, targets.size):
        raise CacheError(f"fork: {sources.size} source rows for {targets.size} target rows")
    sources = mx.broadcast_to(sources, targets.shape)
    named = read(targets)
    if read(mx.any(sources == targets)) is True:
        raise CacheError(f"fork: row {named} onto itself; name another target row")
    if named is not None and len(set(named)) < len(named):
        raise CacheError(f"fork: a target row is named twice: {named}")
    copies = select(state, sources)
    settle(copies.values())
    return _put(state, targets, copies)


def select(state: CacheState, rows: Rows) -> CacheState:
    """A state of the given rows, in that order; a row may come more than once.

    The chosen rows are copied. Raises CacheError for no row, or one out of range.
    """
    chosen = as_rows(rows, _batch(state), "rows")
    if not chosen.size:
        raise CacheError("select: expected at least one row")
    return {name: mx.take(array, chosen, axis=0) for name, array in state.items()}


def insert(state: CacheState, row: Rows, other: CacheState, other_row: Rows) -> CacheState:
    """`state` with its `row` replaced by `other_row` of another state of the same model.

    Args:
        state: any state.
        row: the row to replace, or several.
        other: a state with the same arrays; it may have another batch, and another capacity.
        other_row: the row of `other` to copy, or one for each.

    Raises:
        CacheError: rows out of range, states of different models, a row that does not fit.
    """
    if state.keys() != other.keys():
        raise CacheError("insert: the other state does not have the same arrays")
    capacity = state_size(state)[1]
    target = as_rows(row, _batch(state), "row")
    source = as_rows(other_row, _batch(other), "other_row")
    if target.size != source.size:
        raise CacheError(f"insert: {source.size} other rows for {target.size} rows: name one each")
    span = _find_span(source)
    moved = select(other, source) if span is None else {n: a[span] for n, a in other.items()}
    resize = grow if state_size(other)[1] < capacity else shrink
    moved = resize(moved, capacity)
    for name, array in state.items():
        if array.shape[1:] != moved[name].shape[1:] or array.dtype != moved[name].dtype:
            raise CacheError(
                f"insert: {name} is {moved[name].dtype} {list(moved[name].shape[1:])} there, "
                f"{array.dtype} {list(array.shape[1:])} here"
            )
    if any(array is other[name] for name, array in state.items()):  # read before it is written
        settle(moved.values())
    return _put(state, target, moved)


def clear(state: CacheState, rows: Rows) -> CacheState:
    """Empty the given rows and zero what they held.

    Zeroing matters: in MLX a value that is not finite leaks out of a masked slot.

    Args:
        state: any state.
        rows: row numbers, int32 `[N]`; none leaves the state as it is.

    Raises:
        CacheError: a row out of range.
    """
    chosen = as_rows(rows, _batch(state), "rows")
    if not chosen.size:
        return state
    empty = {
        name: mx.zeros((chosen.size, *array.shape[1:]), array.dtype)
        for name, array in state.items()
        if name != "slack"  # belongs to the layout, not to what a row holds
    }
    return _put(state, chosen, empty)


def reset(state: CacheState, rows: Rows) -> CacheState:
    """Empty the given rows for their next users, at the cost of what is per row, not per slot.

    Unlike `clear` it leaves the slots as they are, which nothing sees any more; that is safe as
    long as they are finite.

    Args:
        state: any state.
        rows: int32 `[N]`, row numbers.

    Raises:
        CacheError: a row out of range.
    """
    small = {name: array for name, array in state.items() if kind_of(name) in ("row", "recurrent")}
    return {**state, **clear(small, rows)}


def forget(state: CacheState) -> CacheState:
    """`reset` of all rows, whatever they hold; each keeps the adapter that it has chosen."""
    kept = ("slack", "adapter")
    small = [name for name in state if kind_of(name) in ("row", "recurrent") and name not in kept]
    return {**state, **{name: mx.zeros_like(state[name]) for name in small}}


def _put(state: CacheState, rows: mx.array, values: CacheState) -> CacheState:
    """`state` with `values` `[N, ...]` in its `rows` int32 `[N]`."""
    changed, span = dict(state), _find_span(rows)
    for name, new in values.items():
        if span is None:
            index = mx.broadcast_to(rows.reshape(-1, *[1] * (new.ndim - 1)), new.shape)
            changed[name] = mx.put_along_axis(state[name], index, new, axis=0)
        else:  # one copy, which needs no index
            changed[name] = state[name][...]
            changed[name][span] = new
    return changed


def _find_span(rows: mx.array) -> slice | None:
    """The slice that names the same rows, if they are known and follow each other."""
    named = read(rows)
    if not named or named != list(range(named[0], named[0] + len(named))):
        return None
    return slice(named[0], named[0] + len(named))


def _batch(state: CacheState) -> int:
    return state["lengths"].shape[0]


def as_rows(rows: Rows, batch: int, name: str) -> mx.array:
    """Row numbers as int32 `[N]`. Raises CacheError for one outside `0 .. batch - 1`."""
    index = as_integers(rows, name)
    if index.ndim != 1:  # a reshape is computed, and to read it is to wait for all that is before
        index = index.reshape(-1)
    values = read(index)
    if values is None:  # a traced index out of range must not leave the array
        return mx.clip(index, 0, batch - 1)
    if any(not 0 <= row < batch for row in values):
        raise CacheError(f"{name}: rows are 0 to {batch - 1}, got {values}")
    return index


def per_row(numbers: Rows, batch: int, name: str) -> mx.array:
    """Numbers as int32 `[B]`; one stands for all rows. Raises CacheError for other shapes."""
    array = as_integers(numbers, name)
    if array.ndim > 1 or array.size not in (1, batch):
        raise CacheError(f"{name}: expected int32 [{batch}] or one number, got {list(array.shape)}")
    return mx.broadcast_to(array.reshape(-1), (batch,))


def as_integers(numbers: Rows, name: str) -> mx.array:
    """Numbers as an int32 array. Raises CacheError for other kinds of numbers."""
    if not isinstance(numbers, mx.array):
        values = [numbers] if isinstance(numbers, int) else list(numbers)
        numbers = mx.array(values, dtype=mx.int32 if not values else None)
    if not mx.issubdtype(numbers.dtype, mx.integer):
        raise CacheError(f"{name}: expected integers, got {numbers.dtype}")
    return numbers.astype(mx.int32)
