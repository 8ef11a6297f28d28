"""Moving, trimming and growing rows of a cache state. Pure functions; every one traces.

Checks that need values (a trim below zero, a row number out of range) raise on arrays that can be
read, and are left to the caller while a function is traced.
"""

from __future__ import annotations

from collections.abc import Sequence

from funcrt.cache.layout import CacheState, kind_of, slot_axis, state_size
from funcrt.errors import CacheError
from funcrt.tracing import read

import mlx.core as mx

Rows = mx.array | int | Sequence[int]


def grow(state: CacheState, capacity: int) -> CacheState:
    """The same contents with more slots; the old scratch slot becomes an ordinary free one.

    Rings and recurrent states stay as they are. Raises CacheError when `capacity` is below the
    present one.
    """
    old = state_size(state)[1]
    if capacity < old:
        raise CacheError(f"grow: capacity {capacity} is below the present {old}")
    if capacity == old:
        return state
    return {name: _with_slots(name, array, old - 1, capacity) for name, array in state.items()}


def _with_slots(name: str, array: mx.array, used: int, capacity: int) -> mx.array:
    """The first `used` slots of an array, and zeros up to `capacity`."""
    axis = slot_axis(name)
    if axis is None:
        return array
    shape = list(array.shape)
    shape[axis] = capacity - used
    kept = array[:, :used] if axis == 1 else array[:, :, :used]
    return mx.concatenate([kept, mx.zeros(shape, array.dtype)], axis=axis)


# --- shorter rows --------------------------------------------------------------------------------


def can_trim(state: CacheState, counts: Rows) -> mx.array:
    """Whether every row can give back its last `counts` tokens: a scalar bool array.

    False below zero, past what a ring still holds (`written - new length <= slack`), and for any
    token of a recurrent state, which only a `snapshot` brings back.

    Args:
        state: any state.
        counts: int32 `[B]`, or one number for all rows.
    """
    counts = _per_row(state, counts, "counts")
    after = state["lengths"] - counts
    possible = (counts >= 0) & (after >= 0)
    if "written" in state:
        possible = possible & (state["written"] - after <= state["slack"])
    if any(kind_of(name) == "recurrent" for name in state):
        possible = possible & (counts == 0)
    return mx.all(possible)


def trim(state: CacheState, counts: Rows) -> CacheState:
    """Forget the last `counts` tokens of each row.

    Args:
        state: any state; the slots keep their contents, which nothing sees any more.
        counts: int32 `[B]`, or one number for all rows.

    Raises:
        CacheError: where `can_trim` is false, saying why.
    """
    counts = _per_row(state, counts, "counts")
    if read(can_trim(state, counts)) is False:
        raise CacheError(_why_not(state, counts))
    return {**state, "lengths": mx.maximum(state["lengths"] - counts, 0)}


def _why_not(state: CacheState, counts: mx.array) -> str:
    asked, lengths = read(counts), read(state["lengths"])
    if min(asked) < 0 or any(n > length for n, length in zip(asked, lengths, strict=True)):
        return f"trim: cannot take {asked} tokens from rows of {lengths}"
    if any(kind_of(name) == "recurrent" for name in state):
        return (
            "trim: a recurrent state cannot go back: keep `snapshot(state)` before the call, "
            "`restore` it and run the accepted tokens again"
        )
    slack = [
        length - (written - limit)
        for length, written, limit in zip(
            lengths, read(state["written"]), read(state["slack"]), strict=True
        )
    ]
    return (
        f"trim: the ring of a sliding window has wrapped: at most {slack} tokens can be taken "
        f"from the rows, {asked} were asked for; use a larger max_tokens, or keep a copy"
    )


def keep(state: CacheState, slots: mx.array, lengths: mx.array | None = None) -> CacheState:
    """Keep one branch of a token tree: its slots move together, its siblings are forgotten.

    With five cached tokens and a tree in slots 5 to 8, `keep(state, [[5, 7, -1]])`::

        slot     0 1 2 3 4 5 6 7 8        0 1 2 3 4 5 6
        before   a b c d e p q r s   ->   a b c d e p r

    Args:
        state: after the call that ran the tree.
        slots: int32 `[B, N]`, the slots of the accepted tokens in order; -1 fills up at the end.
        lengths: int32 `[B]`, lengths before the tree. None takes the first accepted slot of each
            row, which is right for a tree with one root (a row of only -1 stays as it is).

    Raises:
        CacheError: recurrent states; slots that are not filled or not in order.
    """
    if any(kind_of(name) == "recurrent" for name in state):
        raise CacheError("keep: a recurrent state cannot hold a token tree; run the branch again")
    if slots.ndim != 2 or slots.shape[0] != state["lengths"].shape[0]:
        raise CacheError(f"keep: slots: expected int32 [B, N], got {list(slots.shape)}")
    slots = slots.astype(mx.int32)
    accepted = slots >= 0
    if lengths is None:
        lengths = mx.where(accepted[:, 0], slots[:, 0], state["lengths"])
    _check_branch(slots, lengths, state)
    step = mx.arange(slots.shape[1], dtype=mx.int32)
    target = lengths[:, None] + step
    kept: CacheState = {}
    for name, array in state.items():
        axis = 2 if kind_of(name) == "ring" else slot_axis(name)
        if axis is None:
            kept[name] = array
            continue
        # A ring's slots go round; the last slot of either is scratch, for what is not accepted.
        size = array.shape[axis] - 1
        turn = size if kind_of(name) == "ring" else size + 1
        source = mx.where(accepted, slots % turn, size)
        kept[name] = _move(array, source, mx.where(accepted, target % turn, size), axis)
    kept["lengths"] = lengths + mx.sum(accepted.astype(mx.int32), axis=1)
    return kept


def _move(array: mx.array, source: mx.array, target: mx.array, axis: int) -> mx.array:
    shape = [source.shape[0], *[1] * (array.ndim - 1)]
    shape[axis] = source.shape[1]
    wide = list(array.shape)
    wide[axis] = source.shape[1]
    values = mx.take_along_axis(array, source.reshape(shape), axis=axis)
    return mx.put_along_axis(array, mx.broadcast_to(target.reshape(shape), wide), values, axis=axis)


def _check_branch(slots: mx.array, lengths: mx.array, state: CacheState) -> None:
    rows = read(slots)
    if rows is None:
        return
    for row, first, filled in zip(rows, read(lengths), read(state["lengths"]), strict=True):
        branch = [slot for slot in row if slot >= 0]
        ordered = branch == sorted(set(branch)) and row[: len(branch)] == branch
        if not ordered or any(not first <= slot < filled for slot in branch):
            raise CacheError(
                f"keep: expected slots in order from {first} to {filled - 1}, -1 only at the end, "
                f"got {row}"
            )


def snapshot(state: CacheState) -> CacheState:
    """What `restore` needs to undo calls that a `trim` cannot: lengths and recurrent arrays."""
    return {name: array for name, array in state.items() if kind_of(name) in ("row", "recurrent")}


def restore(state: CacheState, saved: CacheState) -> CacheState:
    """`state` as it was when `saved = snapshot(...)` was taken, slots written since forgotten.

    Raises CacheError where a ring has lost what the snapshot saw, or for another state's snapshot.
    """
    if unknown := sorted(saved.keys() - state.keys()):
        raise CacheError(f"restore: a snapshot of another state: {', '.join(unknown[:4])}")
    if "written" in state:
        # The ring keeps what was written since; only its own record says what it still holds.
        saved = {**saved, "written": state["written"]}
        lost = mx.any(state["written"] - saved["lengths"] > state["slack"])
        if read(lost) is True:
            raise CacheError("restore: the ring of a sliding window has wrapped past the snapshot")
    return {**state, **saved}


# --- whole rows ----------------------------------------------------------------------------------


def fork(state: CacheState, source_row: Rows, target_row: Rows) -> CacheState:
    """Copy rows: one prefix, many continuations.

    Args:
        state: any state.
        source_row: the row to copy, or one per target.
        target_row: the row, or rows int32 `[N]`, that become copies.

    Raises:
        CacheError: a row out of range, or onto itself.
    """
    batch = state["lengths"].shape[0]
    targets = _as_rows(target_row, batch, "target_row")
    sources = mx.broadcast_to(_as_rows(source_row, batch, "source_row"), targets.shape)
    if read(mx.any(sources == targets)) is True:
        raise CacheError(f"fork: row {read(targets)} onto itself; name another target row")
    rows = mx.put_along_axis(mx.arange(batch, dtype=mx.int32), targets, sources, axis=0)
    return _take(state, rows)


def select(state: CacheState, rows: Rows) -> CacheState:
    """A state of the given rows, in that order; a row may come more than once.

    Raises CacheError for a row out of range.
    """
    return _take(state, _as_rows(rows, state["lengths"].shape[0], "rows"))


def insert(state: CacheState, row: Rows, other: CacheState, other_row: Rows) -> CacheState:
    """`state` with its `row` replaced by `other_row` of another state of the same model.

    The other state may have fewer slots.

    Raises:
        CacheError: rows out of range, states of different models, more slots than here.
    """
    if list(state) != list(other):
        raise CacheError("insert: the other state does not have the same arrays")
    capacity, other_capacity = state_size(state)[1], state_size(other)[1]
    if other_capacity > capacity:
        raise CacheError(
            f"insert: the other state has {other_capacity} slots, this one {capacity}: grow it"
        )
    target = _as_rows(row, state["lengths"].shape[0], "row")
    source = _as_rows(other_row, other["lengths"].shape[0], "other_row")
    if target.size != 1 or source.size != 1:
        raise CacheError("insert: one row at a time")
    moved = grow(select(other, source), capacity)
    chosen = mx.arange(state["lengths"].shape[0], dtype=mx.int32) == target
    for name, array in state.items():
        if array.shape[1:] != moved[name].shape[1:] or array.dtype != moved[name].dtype:
            raise CacheError(
                f"insert: {name} is {moved[name].dtype} {list(moved[name].shape[1:])} there, "
                f"{array.dtype} {list(array.shape[1:])} here"
            )
    return {name: _where(chosen, moved[name], array) for name, array in state.items()}


def clear(state: CacheState, rows: Rows) -> CacheState:
    """Empty the given rows and zero what they held.

    Zeroing matters: in MLX a value that is not finite leaks out of a masked slot.

    Args:
        state: any state.
        rows: int32 `[N]`, row numbers.
    """
    batch = state["lengths"].shape[0]
    chosen = _as_rows(rows, batch, "rows")
    cleared = mx.any(mx.arange(batch)[:, None] == chosen[None], axis=1)  # [B]
    return {
        name: array if name == "slack" else _where(cleared, mx.zeros_like(array), array)
        for name, array in state.items()
    }


def reset(state: CacheState, rows: Rows) -> CacheState:
    """Empty the given rows for their next users, at the cost of what is per row, not per slot.

    Unlike `clear` it leaves the slots as they are, which nothing sees any more; that is safe as
    long as they are finite.

    Args:
        state: any state.
        rows: int32 `[N]`, row numbers.
    """
    small = {name: array for name, array in state.items() if kind_of(name) in ("row", "recurrent")}
    return {**state, **clear(small, rows)}


def _take(state: CacheState, rows: mx.array) -> CacheState:
    return {name: mx.take(array, rows, axis=0) for name, array in state.items()}


def _where(chosen: mx.array, yes: mx.array, no: mx.array) -> mx.array:
    return mx.where(chosen.reshape(-1, *[1] * (no.ndim - 1)), yes, no)


def _as_rows(rows: Rows, batch: int, name: str) -> mx.array:
    index = _as_array(rows).reshape(-1)
    values = read(index)
    if values is not None and any(not 0 <= row < batch for row in values):
        raise CacheError(f"{name}: rows are 0 to {batch - 1}, got {values}")
    return mx.clip(index, 0, batch - 1)  # a traced index out of range must not leave the array


def _per_row(state: CacheState, counts: Rows, name: str) -> mx.array:
    batch = state["lengths"].shape[0]
    array = _as_array(counts)
    if array.ndim > 1 or array.size not in (1, batch):
        raise CacheError(f"{name}: expected int32 [{batch}] or one number, got {list(array.shape)}")
    return mx.broadcast_to(array.reshape(-1), (batch,))


def _as_array(numbers: Rows) -> mx.array:
    if isinstance(numbers, mx.array):
        return numbers.astype(mx.int32)
    return mx.array(numbers if isinstance(numbers, int) else list(numbers), dtype=mx.int32)
