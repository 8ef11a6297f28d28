"""Short texts fed to the functions of one batch and capacity, and what came out of every call.

A script calls `prefill` with each declared T, the smallest first, and then `decode_greedy`; the
state is passed on, so that all but the first call find a cache that is not empty. Calls of
`prefill_first`, which is nothing to pass a state to, come last. Its texts are the
same in every batch and capacity. Only functions that a plan has are called, so nothing compiles
that would not be used anyway, and states are remembered by their hashes, so that there is only one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from funcrt.buckets import Bucket, BucketPlan
from funcrt.cache import CacheSpec, CacheState, kind_of, state_size
from funcrt.cache.layout import slot_axis
from funcrt.compiled import Compiled
from funcrt.low_rank import take_last
from funcrt.params import array_bytes, hash_bytes
from funcrt.steps import FIRST, STEPS

import mlx.core as mx

PREFILL, DECODE = "prefill", "decode_greedy"
POISON = 1e4  # in float16 one product away from infinity

_PIECES = 8  # at most, of a call in chunks: so long are texts

Text = tuple[int, ...]
Places = list[int]


class Call(NamedTuple):
    """One call of a function.

    Attributes:
        function: `prefill`, `decode_greedy` or `prefill_first`.
        tokens: T.
        fresh: it begins from an empty state.
        rows: the real tokens of each row; a row without any is idle.
    """

    function: str
    tokens: int
    fresh: bool
    rows: tuple[Text, ...]


class Seen(NamedTuple):
    """What a call left behind.

    Attributes:
        key: of the function.
        logits: `[B, V]` of each row's last real token; those of an idle row mean nothing.
        lengths: of each row.
        state: for each array of the state the hash of what each row holds.
    """

    key: str
    logits: mx.array
    lengths: list[int]
    state: dict[str, list[str]]


def choose_capacities(plan: BucketPlan, spec: CacheSpec) -> tuple[int, ...]:
    """The capacities that differ: one where a state has no slots."""
    return plan.capacity if _has_slots(spec) else plan.capacity[:1]


def _has_slots(spec: CacheSpec) -> bool:
    return any("S" in entry.shape for entry in spec)


# --- scripts --------------------------------------------------------------------------------------


def make_script(compiled: Compiled, batch: int, longest: int) -> list[Call]:
    """Calls of `batch` rows whose texts stay below `longest` tokens and fit every capacity."""
    plan, room = compiled.plan, longest
    if _has_slots(compiled.cache_spec):
        room = min(room, plan.capacity[0] - 1)
    texts = [Random(row) for row in range(batch)]
    functions = list_functions(plan, compiled.present)
    script: list[Call] = []
    left = 0
    for number, (function, tokens) in enumerate(functions):
        later = max(0, len(plan.tokens) - number)
        fresh = left < 1 or function == FIRST
        left = room if fresh else left
        # Some padding, and a token left for each of the other calls where there is room for it.
        count = max(1, min(tokens * 3 // 4, _PIECES * plan.tokens[0], left - later))
        left -= count
        rows = tuple(
            _draw(text, max(1, count - row % 3), compiled.vocab_size)
            for row, text in enumerate(texts)
        )
        script.append(Call(function, tokens, fresh, rows))
    return script


def list_functions(plan: BucketPlan, present: Container[str]) -> list[tuple[str, int]]:
    """Name and T of what a script calls, of the functions that there are."""
    firsts = STEPS[FIRST].choose_sizes(plan.tokens) if FIRST in present else ()
    first = [(FIRST, tokens) for tokens in firsts]
    return [*((PREFILL, tokens) for tokens in plan.tokens), (DECODE, 1), *first]


def _draw(random: Random, count: int, vocab: int) -> Text:
    return tuple(random.randrange(vocab) for _ in range(count))


def replace_rows(script: Sequence[Call], turn: int, vocab: int) -> list[Call]:
    """Every other row, from the second (turn 0) or the first one: another text, or idle, by turns.

    Another row's lengths go with the other text, so that nothing overflows.
    """
    batch = len(script[0].rows)
    changed = range(1 - turn, batch, 2)
    texts = {row: Random(batch + row) for row in changed}

    def change(call: Call, row: int) -> Text:
        if row not in texts:
            return call.rows[row]
        if (changed.index(row) + turn) % 2:
            return ()
        return _draw(texts[row], len(call.rows[row - 1]), vocab)

    return [call._replace(rows=tuple(change(call, row) for row in range(batch))) for call in script]


def insert_idle(script: Iterable[Call]) -> Iterator[Call]:
    """A call in which every row is idle before every call of one token, which has no padding."""
    for call in script:
        if call.tokens > 1:
            yield call
            continue
        yield call._replace(rows=((),) * len(call.rows))
        yield call._replace(fresh=False)


def cut(call: Call, least: int) -> list[Call]:
    """The same text in pieces of at most `least` tokens, fed to the function of that T."""
    longest = max(map(len, call.rows))
    if call.function == DECODE or longest < 2:
        return [call]
    size = min(least, -(-longest // 2))
    pieces = [
        Call(PREFILL, least, False, tuple(row[start : start + size] for row in call.rows))
        for start in range(0, longest, size)
    ]
    return [pieces[0]._replace(fresh=call.fresh), *pieces[1:]]


# --- where the real tokens of a call stand --------------------------------------------------------

Arrange = Callable[[int, int, int], Places]
"""Columns of `count` real tokens among T, in order, and in turns."""


def to_the_left(count: int, tokens: int, turn: int) -> Places:
    """Padding on the right."""
    return list(range(count))


def elsewhere(count: int, tokens: int, turn: int) -> Places:
    """Padding on the left, or a hole in the middle."""
    front = count // 2 if turn % 2 else 0
    return [*range(front), *range(tokens - count + front, tokens)]


def _lay_out(
    call: Call, number: int, arrange: Arrange, filler: Callable[[], int]
) -> tuple[mx.array, mx.array]:
    """`tokens` int32 and `valid` bool, `[B, T]`."""
    ids = [[filler() for _ in range(call.tokens)] for _ in call.rows]
    valid = [[False] * call.tokens for _ in call.rows]
    for row, text in enumerate(call.rows):
        for place, token in zip(arrange(len(text), call.tokens, row + number), text, strict=True):
            ids[row][place], valid[row][place] = token, True
    return mx.array(ids, dtype=mx.int32), mx.array(valid)


# --- running --------------------------------------------------------------------------------------


def run(
    compiled: Compiled,
    capacity: int,
    script: Iterable[Call],
    *,
    arrange: Arrange = to_the_left,
    filler: Callable[[], int] = lambda: 0,
    poisoned: bool = False,
    hashed: bool = True,
) -> Iterator[tuple[Call, Seen]]:
    """Every call of a script and what came of it.

    Args:
        compiled: the functions.
        capacity: of the states.
        script: the calls.
        arrange: where the real tokens of a call stand.
        filler: gives the ids at padding.
        poisoned: whether unused slots hold large numbers.
        hashed: whether anybody wants the hashes of the state.
    """
    state: CacheState = {}
    for number, call in enumerate(script):
        if call.fresh:
            state = {}  # before the next one exists: two states are not held at once
            state = take_last(compiled.init_cache(len(call.rows), capacity))
        if poisoned:
            poison(state)
        ids, valid = _lay_out(call, number, arrange, filler)
        if call.function == PREFILL:
            logits, state = compiled.prefill(ids, valid, state)
        elif call.function == FIRST:
            logits, state = compiled.prefill_first(ids, valid, state)
        else:
            chosen, state = compiled.decode_greedy(ids[:, 0], valid[:, 0], state)
            assert chosen.logits is not None
            logits = chosen.logits
        mx.eval(logits, state)
        key = f"{call.function}_{Bucket(len(call.rows), call.tokens, capacity)}"
        yield call, Seen(key, logits, _lengths(state), hash_rows(state) if hashed else {})


def _lengths(state: CacheState) -> list[int]:
    lengths: list[int] = state["lengths"].tolist()  # type: ignore[assignment]
    return lengths


# --- states ---------------------------------------------------------------------------------------


def held_slots(name: str, state: CacheState) -> mx.array | None:
    """Which slots of an array hold a token that may still be seen; None where it has no slots.

    Bool, in a shape that broadcasts to the array's. Scratch never holds one.
    """
    kind, lengths = kind_of(name), state["lengths"][:, None]
    if kind in ("row", "recurrent"):
        return None
    if kind == "ring":
        size = state[name].shape[2] - 1
        column = mx.arange(size + 1, dtype=mx.int32)
        slot = lengths - 1 - (lengths - 1 - column) % size  # the newest that belongs there
        held = (slot >= 0) & (slot >= state["written"][:, None] - size) & (column < size)
    else:
        capacity = state_size(state)[1]
        held = mx.arange(capacity, dtype=mx.int32) < mx.minimum(lengths, capacity - 1)
    return held if kind == "positions" else held[:, None, :, None]


def poison(state: CacheState) -> None:
    """Fill every slot that holds nothing, scratch included, in place, one array after the other.

    Packed arrays get what large numbers are packed to, since no packing gives large scales.
    """
    for name in state:
        held = held_slots(name, state)
        if held is not None:
            large = _large(name, state[name].dtype)
            state[name] = mx.where(held, state[name], large)
            mx.eval(state[name])


def _large(name: str, dtype: mx.Dtype) -> mx.array:
    part = name.rpartition(".")[2]
    index = 0 if dtype == mx.uint32 else {"scales": 1, "biases": 2}.get(part)
    if index is None:
        return mx.array(POISON).astype(dtype)
    values = mx.full((1, 32), POISON, dtype=mx.float32 if dtype == mx.uint32 else dtype)
    # Of equal numbers any packing has one scale, one bias, and words of zeros.
    return mx.quantize(values, group_size=32, bits=8)[index].reshape(-1)[0]


def hash_rows(state: CacheState) -> dict[str, list[str]]:
    """Hashes of what every row of every array holds: used slots, and all of what has none."""
    return {name: [_hash(row) for row in _held_rows(name, state)] for name in state}


def _held_rows(name: str, state: CacheState) -> list[mx.array]:
    array, axis = state[name], slot_axis(name)
    if axis is not None:
        most = array.shape[axis] - 1
        lengths = [min(length, most) for length in _lengths(state)]
        return [
            array[row, :length] if axis == 1 else array[row, :, :length]
            for row, length in enumerate(lengths)
        ]
    held = held_slots(name, state)
    if held is not None:
        array = mx.where(held, array, mx.zeros((), array.dtype))
    return list(array)


def _hash(array: mx.array) -> str:
    if not array.size:
        return ""
    if mx.issubdtype(array.dtype, mx.floating):
        array = array + mx.zeros((), array.dtype)  # -0 equals 0
    return hash_bytes(array_bytes(array))
