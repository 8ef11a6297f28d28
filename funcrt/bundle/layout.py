"""Which golden calls a plan gets, and on what inputs: lists of integers, the same on every machine.

Each batch and capacity gets every function once, in one chain that threads its cache state; the
chain begins again where the cache would overflow. Rows are padded left, right, in holes or not at
all, in turns; with more than one row, the last is idle in every other call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from funcrt.buckets import BucketPlan


class Step(NamedTuple):
    """One real token of a row, and the cached slot that it must not see (-1: it sees them all)."""

    token: int
    hidden: int


@dataclass
class Row:
    """The real tokens of one row since its cache was empty."""

    random: Random
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Spot:
    """An output row that is compared, and the token that it belongs to."""

    output: int
    row: Row
    index: int


@dataclass
class Call:
    """Inputs of one call, `[B][T]` and `[B]`, and where its outputs are compared."""

    function: str
    tokens: int
    fresh: bool
    ids: list[list[int]]
    valid: list[list[bool]]
    hidden: list[int]
    lengths: list[int]  # after the call
    spots: list[Spot]


@dataclass
class Case:
    """Calls of one batch and capacity."""

    batch: int
    capacity: int
    calls: list[Call]


def make_layout(plan: BucketPlan, vocab_size: int) -> list[Case]:
    """Every function of the plan in every bucket, once."""
    return [
        _make_case(plan, batch, capacity, vocab_size)
        for batch in plan.batch
        for capacity in plan.capacity
    ]


def _make_case(plan: BucketPlan, batch: int, capacity: int, vocab_size: int) -> Case:
    case = Case(batch, capacity, [])
    rows: list[Row] = []
    for number, (function, tokens) in enumerate(_order(plan)):
        valid = [_pattern(row, number, tokens, batch, capacity - 1) for row in range(batch)]
        fresh = not rows or any(
            len(row.steps) + sum(real) > capacity - 1 for row, real in zip(rows, valid, strict=True)
        )
        if fresh:
            rows = [Row(Random(index)) for index in range(batch)]
        case.calls.append(_make_call(function, tokens, fresh, rows, valid, vocab_size))
    if capacity == plan.capacity[0]:  # `sample` has no cache: once per batch is enough
        case.calls.append(_make_sample(case.calls[-1]))
    return case


def _order(plan: BucketPlan) -> list[tuple[str, int]]:
    """Long calls first: the short ones then have a past to look at."""
    prefills = ("prefill", "prefill_block", "forward")
    return [
        *((name, tokens) for name in prefills for tokens in plan.tokens[::-1]),
        ("decode_greedy", 1),
        ("decode", 1),
    ]


def _pattern(row: int, number: int, tokens: int, batch: int, most: int) -> list[bool]:
    """Which of the T tokens of a row are real, at most `most` of them."""
    if batch > 1 and row == batch - 1 and number % 2 == 0:
        return [False] * tokens
    short = max(1, tokens * 3 // 4)
    real = {
        0: [True] * tokens,
        1: [i >= tokens - short for i in range(tokens)],
        2: [i < short for i in range(tokens)],
        3: [i % 3 != 1 for i in range(tokens)],
    }[(row + number) % 4]
    return [is_real and sum(real[:i]) < most for i, is_real in enumerate(real)]


def _make_call(
    function: str, tokens: int, fresh: bool, rows: list[Row], valid: list[list[bool]], vocab: int
) -> Call:
    call = Call(function, tokens, fresh, [], valid, [], [], [])
    for index, (row, real) in enumerate(zip(rows, valid, strict=True)):
        past = len(row.steps)
        hidden = past // 2 if function == "forward" and past else -1
        ids = []
        for place, is_real in enumerate(real):
            if is_real:
                row.steps.append(Step(row.random.randrange(vocab), hidden))
                if function == "forward":  # the others answer for the last real token only
                    call.spots.append(Spot(index * tokens + place, row, len(row.steps) - 1))
            # What stands at padding must not matter.
            ids.append(row.steps[-1].token if is_real else (index + place) % vocab)
        if function != "forward" and any(real):
            call.spots.append(Spot(index, row, len(row.steps) - 1))
        call.ids.append(ids)
        call.hidden.append(hidden)
        call.lengths.append(len(row.steps))
    return call


def _make_sample(decode: Call) -> Call:
    """Choosing from the logits that the last decode call had."""
    batch = len(decode.ids)
    return Call("sample", 1, False, [[0]] * batch, [[True]] * batch, [-1] * batch, decode.lengths,
                decode.spots)  # fmt: skip
