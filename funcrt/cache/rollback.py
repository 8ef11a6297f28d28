"""Taking tokens back: trims, accepted branches of token trees, snapshots. All but reads trace.

Checks that need values (a trim below zero) raise on arrays that can be read, and are left to the
caller while a function is traced.
"""

from __future__ import annotations

from funcrt.cache.layout import CacheState, kind_of, slot_axis, state_size
from funcrt.cache.rows import Rows, as_integers, per_row
from funcrt.errors import CacheError
from funcrt.tracing import read, settle

import mlx.core as mx


def can_trim(state: CacheState, counts: Rows) -> mx.array:
    """Whether every row can give back its last `counts` tokens: a scalar bool array.

    False below zero, past what a ring still holds (`written - new length <= slack`), and for any
    token of a recurrent state, which only a `snapshot` brings back.

    Args:
        state: any state.
        counts: int32 `[B]`, or one number for all rows.

    Raises:
        CacheError: `counts` of another shape, or not integers.
    """
    counts = per_row(counts, state["lengths"].shape[0], "counts")
    after = state["lengths"] - counts
    possible = (counts >= 0) & (after >= 0) & _is_held(state, after)
    if _is_recurrent(state):
        possible = possible & (counts == 0)
    return mx.all(possible)


def trim(state: CacheState, counts: Rows) -> CacheState:
    """Forget the last `counts` tokens of each row.

    Args:
        state: any state; the slots keep their contents, which nothing sees any more.
        counts: int32 `[B]`, or one number for all rows.

    Raises:
        CacheError: where `can_trim` is false, saying why; `counts` of another shape.
    """
    counts = per_row(counts, state["lengths"].shape[0], "counts")
    if read(can_trim(state, counts)) is False:
        raise CacheError(_why_not(state, counts))
    after = state["lengths"] - mx.maximum(counts, 0)
    return {**state, "lengths": mx.maximum(after, 0)}


def _is_held(state: CacheState, lengths: mx.array) -> mx.array:
    """Bool `[B]`: whether rings still hold all that rows of these `lengths` look back at."""
    if "written" not in state:
        return mx.ones(lengths.shape, dtype=mx.bool_)
    return state["written"] - lengths <= state["slack"]


def _is_recurrent(state: CacheState) -> bool:
    return any(kind_of(name) == "recurrent" for name in state)


def _why_not(state: CacheState, counts: mx.array) -> str:
    asked, lengths = read(counts), read(state["lengths"])
    if min(asked) < 0 or any(n > length for n, length in zip(asked, lengths, strict=True)):
        return f"trim: cannot take {asked} tokens from rows of {lengths}"
    if _is_recurrent(state):
        return (
            "trim: a recurrent state cannot go back: keep `snapshot(state)` before the call, "
            "`restore` it and run the accepted tokens again"
        )
    slack = read(state["slack"] - state["written"] + state["lengths"])
    return (
        f"trim: the ring of a sliding window has wrapped: at most {slack} tokens can be taken "
        f"from the rows, {asked} were asked for; use a larger max_tokens, or keep a copy"
    )


# --- branches of a token tree --------------------------------------------------------------------


def keep(state: CacheState, slots: mx.array, lengths: mx.array | None = None) -> CacheState:
    """Keep one branch of a token tree: its slots move together, its siblings are forgotten.

    With five cached tokens and a tree in slots 5 to 8, `keep(state, [[5, 7, -1]])`::

        slot     0 1 2 3 4 5 6 7 8        0 1 2 3 4 5 6
        before   a b c d e p q r s   ->   a b c d e p r

    Args:
        state: after the call that ran the tree. Only the moved slots are written, in place, if
            nothing else holds it; a traced function copies the state.
        slots: integers `[B, N]`, the slots of the accepted tokens in order; -1 fills up at the
            end.
        lengths: integers `[B]`, lengths before the tree; a row of only -1 goes back to them. None
            takes the first accepted slot of each row, which is right for a tree with one root,
            and leaves a row of only -1 as it is. Pass them where a tree has several roots, or
            where all of it may be rejected.

    Raises:
        CacheError: recurrent states; slots that are not filled or not in order; what a ring no
            longer holds.
    """
    if _is_recurrent(state):
        raise CacheError("keep: a recurrent state cannot hold a token tree; run the branch again")
    slots = as_integers(slots, "keep: slots")
    if slots.ndim != 2 or slots.shape[0] != state["lengths"].shape[0] or not slots.size:
        raise CacheError(f"keep: slots: expected int32 [B, N], got {list(slots.shape)}")
    accepted = slots >= 0
    if lengths is None:
        lengths = mx.where(accepted[:, 0], slots[:, 0], state["lengths"])
    lengths = per_row(lengths, slots.shape[0], "keep: lengths")
    _check_branch(slots, lengths, state)
    target = lengths[:, None] + mx.arange(slots.shape[1], dtype=mx.int32)
    places: dict[str, tuple[mx.array, int]] = {}
    moved: CacheState = {}
    for name, array in state.items():
        axis = 2 if kind_of(name) == "ring" else slot_axis(name)
        if axis is None:
            continue
        # A ring's slots go round; the last slot of either is scratch, for what is not accepted.
        size = array.shape[axis] - 1
        turn = size if kind_of(name) == "ring" else size + 1
        source = _along(mx.where(accepted, slots % turn, size), axis, array.ndim)
        moved[name] = mx.take_along_axis(array, source, axis=axis)
        places[name] = _along(mx.where(accepted, target % turn, size), axis, array.ndim), axis
    settle(moved.values())
    kept = dict(state)
    for name, values in moved.items():
        index, axis = places[name]
        kept[name] = mx.put_along_axis(
            state[name], mx.broadcast_to(index, values.shape), values, axis=axis
        )
    kept["lengths"] = lengths + mx.sum(accepted.astype(mx.int32), axis=1)
    return kept


def _along(index: mx.array, axis: int, ndim: int) -> mx.array:
    """`[B, N]` as `[B, 1.., N, 1..]`, with N at `axis`."""
    shape = [index.shape[0], *[1] * (ndim - 1)]
    shape[axis] = index.shape[1]
    return index.reshape(shape)


def _check_branch(slots: mx.array, lengths: mx.array, state: CacheState) -> None:
    values = [read(array) for array in (slots, lengths, state["lengths"], _is_held(state, lengths))]
    if any(value is None for value in values):
        return
    room = state_size(state)[1] - 1 if any(slot_axis(name) for name in state) else None
    for row, first, filled, held in zip(*values, strict=True):
        end = filled if room is None else min(filled, room)
        branch = [slot for slot in row if slot >= 0]
        ordered = branch == sorted(set(branch)) and row[: len(branch)] == branch
        if not ordered or min(row) < -1 or any(not first <= slot < end for slot in branch):
            raise CacheError(
                f"keep: expected slots in order from {first} to {end - 1}, -1 only at the end, "
                f"got {row}"
            )
        if not 0 <= first <= filled:
            raise CacheError(f"keep: lengths before the tree: expected 0 to {filled}, got {first}")
        if not held:
            raise CacheError(
                f"keep: the ring of a sliding window has wrapped past length {first}: "
                "use a larger max_tokens"
            )


# --- snapshots -----------------------------------------------------------------------------------


def snapshot(state: CacheState) -> CacheState:
    """What `restore` needs to undo calls that a `trim` cannot: lengths and recurrent arrays.

    It shares them with `state`: as long as it is kept, the next call copies the recurrent arrays.
    """
    return {name: array for name, array in state.items() if kind_of(name) in ("row", "recurrent")}


def restore(state: CacheState, saved: CacheState) -> CacheState:
    """`state` as it was when `saved = snapshot(...)` was taken, slots written since forgotten.

    Nothing but calls may lie between: a trim below the snapshot and other text over it cannot be
    undone.

    Raises:
        CacheError: a ring has lost what the snapshot saw, a row is shorter than then, or it is
            another state's snapshot.
    """
    expected = snapshot(state)
    if saved.keys() != expected.keys():
        strange = ", ".join(sorted(saved.keys() ^ expected.keys())[:4])
        raise CacheError(f"restore: a snapshot of another state: {strange}")
    for name, array in expected.items():
        if saved[name].shape != array.shape or saved[name].dtype != array.dtype:
            raise CacheError(
                f"restore: a snapshot of another state: {name} is {saved[name].dtype} "
                f"{list(saved[name].shape)} there, {array.dtype} {list(array.shape)} here"
            )
    if read(mx.any(saved["lengths"] > state["lengths"])) is True:
        raise CacheError(
            f"restore: rows of {read(state['lengths'])} tokens are shorter than in the snapshot, "
            f"{read(saved['lengths'])}: it can only be gone back to"
        )
    if read(mx.all(_is_held(state, saved["lengths"]))) is False:
        raise CacheError("restore: the ring of a sliding window has wrapped past the snapshot")
    restored = {**state, **saved}
    if "written" in state:
        # The ring keeps what was written since; only its own record says what it still holds.
        restored["written"] = state["written"]
    return restored
