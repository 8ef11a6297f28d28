"""Which golden calls a plan gets, and on what inputs: lists of integers, the same on every machine.

Each batch and capacity gets every function once, in one chain that threads its cache state. Where
the cache would overflow, the chain begins again, with a short `prefill` more: a function that finds
an empty cache could as well not read it. `prefill_first` must not read it, and finds other texts
there. Rows are padded left, right, in holes or not at all, in turns; with more than one row, the
last is idle in every other call.

How many guesses are accepted depends on the model, so calls that verify guesses are undone: the
next call goes on from the state before them. Right guesses are filled in by the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from funcrt.buckets import BucketPlan
from funcrt.bundle.format.manifest import GROW
from funcrt.steps import FIRST, STEPS

LIKELIEST = -1
"""Stands for the token that the reference finds most likely after those before it."""

JUDGED = 5  # real places of a row in a call with guesses whose choice is compared
VERIFYING = ("verify_greedy", "verify")
_RIGHT = (1, 3, 0, 2)  # right guesses of a row, in turns; the others are arbitrary
_SHORT = 8  # tokens at most that a chain begins again with


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
    lengths: list[int]  # after the call; without accepted guesses
    spots: list[Spot]
    undo: bool = False


@dataclass
class Case:
    """Calls of one batch and capacity."""

    batch: int
    capacity: int
    calls: list[Call]


def make_layout(
    plan: BucketPlan, vocab_size: int, hides: bool = True, grows: bool = True
) -> list[Case]:
    """Every function of the plan in every bucket, once.

    `hides` false leaves out hidden slots, which a model with a recurrent state refuses; `grows`
    false leaves out growing, of a model without slots.
    """
    return [
        _make_case(plan, batch, capacity, vocab_size, hides, grows)
        for batch in plan.batch
        for capacity in plan.capacity
    ]


def _make_case(
    plan: BucketPlan, batch: int, capacity: int, vocab_size: int, hides: bool, grows: bool
) -> Case:
    case, room = Case(batch, capacity, []), capacity - 1
    rows = _make_rows(batch)
    for number, (function, tokens) in enumerate(_order(plan)):
        # Both functions that verify guesses judge the same ones, which are computed only once.
        turn = plan.tokens.index(tokens) if function in VERIFYING else number
        valid = _patterns(turn, tokens, batch, room)
        if function == FIRST:
            rows = _make_rows(batch)  # but the state goes on
        if any(len(row.steps) + sum(real) > room for row, real in zip(rows, valid, strict=True)):
            rows = _make_rows(batch)
            if room > 1:
                valid = _patterns(turn, tokens, batch, room - 1)
                left = room - max(map(sum, valid))
                case.calls.append(_make_start(rows, plan.tokens[0], left, vocab_size))
        fresh = function != FIRST and not any(row.steps for row in rows)
        if function in VERIFYING:
            call = _make_guesses(function, tokens, fresh, rows, valid, vocab_size)
        else:
            call = _make_call(function, tokens, fresh, rows, valid, vocab_size, hides)
        case.calls.append(call)
    if capacity == plan.capacity[0]:  # what has no cache: once per batch is enough
        case.calls += [_make_stateless(name, case.calls[-1]) for name in ("sample", "top")]
    if grows and capacity != plan.capacity[-1]:  # last, since the state is another one after it
        case.calls.append(_make_stateless(GROW, case.calls[-1]))
    return case


def _make_rows(batch: int) -> list[Row]:
    return [Row(Random(index)) for index in range(batch)]


def _make_start(rows: list[Row], tokens: int, left: int, vocab: int) -> Call:
    """A text of at most `left` tokens in every row: the next call finds something cached."""
    most = min(tokens, left, _SHORT)
    counts = [max(1, most - index % 3) for index in range(len(rows))]
    valid = [[place < count for place in range(tokens)] for count in counts]
    return _make_call("prefill", tokens, True, rows, valid, vocab, hides=False)


def _order(plan: BucketPlan) -> list[tuple[str, int]]:
    """Guesses behind a short text, whose reference is quick; then long calls before short ones."""
    calls = [
        (name, tokens)
        for name in ("prefill", "prefill_block", "forward")
        for tokens in plan.tokens[::-1]
    ]
    calls.remove(("prefill", plan.tokens[0]))
    firsts = [(FIRST, tokens) for tokens in STEPS[FIRST].choose_sizes(plan.tokens)]
    guesses = [
        (name, tokens) for tokens in STEPS["verify"].choose_sizes(plan.tokens) for name in VERIFYING
    ]
    first = ("prefill", plan.tokens[0])
    return [first, *guesses, *firsts, *calls, ("decode_greedy", 1), ("decode", 1)]


def _patterns(number: int, tokens: int, batch: int, most: int) -> list[list[bool]]:
    return [_pattern(row, number, tokens, batch, most) for row in range(batch)]


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
    function: str,
    tokens: int,
    fresh: bool,
    rows: list[Row],
    valid: list[list[bool]],
    vocab: int,
    hides: bool,
) -> Call:
    call = Call(function, tokens, fresh, [], valid, [], [], [])
    for index, (row, real) in enumerate(zip(rows, valid, strict=True)):
        past = len(row.steps)
        hidden = past // 2 if function == "forward" and past and hides else -1
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


def _make_guesses(
    function: str, tokens: int, fresh: bool, rows: list[Row], valid: list[list[bool]], vocab: int
) -> Call:
    """A token and guesses behind each row's text, which stays as it is."""
    call = Call(function, tokens, fresh, [], valid, [-1] * len(rows), [], [], undo=True)
    for index, (row, real) in enumerate(zip(rows, valid, strict=True)):
        past = len(row.steps)
        branch = Row(Random(index + tokens), list(row.steps))
        ids = []
        for place, is_real in enumerate(real):
            guess = len(branch.steps) - past  # the first real token is none
            if is_real:
                is_right = 1 <= guess <= _RIGHT[index % len(_RIGHT)]
                token = LIKELIEST if is_right else branch.random.randrange(vocab)
                branch.steps.append(Step(token, -1))
                if guess < JUDGED:
                    call.spots.append(Spot(index * tokens + place, branch, past + guess))
            ids.append(branch.steps[-1].token if is_real else (index + place) % vocab)
        call.ids.append(ids)
        call.lengths.append(past + any(real))
    return call


def _make_stateless(function: str, decode: Call) -> Call:
    """Choosing from the logits that the last decode call had."""
    batch = len(decode.ids)
    return Call(function, 1, False, [[0]] * batch, [[True]] * batch, [-1] * batch, decode.lengths,
                decode.spots)  # fmt: skip
