"""Rows of one batch: padded calls, idle rows, one that joins, and what each of them is alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from funcrt import cache
from funcrt.cache import CacheLayout, CacheState
from funcrt.model import Model
from funcrt.params import Params
from tests.cache_histories import held_slots, poison
from tests.families.cases import Case, causal
from tests.families.results import CAPACITY, WIDTH
from tests.helpers import Array, to_numpy

import mlx.core as mx
import numpy as np

# Tokens of each row in each call, 0 is idle: more than the windows, and single ones at the end.
COUNTS = ((8, 5, 0, 8, 1, 8, 1, 1), (3, 8, 8, 0, 2, 7, 1, 0), (6, 8, 7, 4, 8, 0, 1, 1))
JOINS = 3  # the call before which the last row joins
ROWS, STEPS = len(COUNTS), 2  # calls of one token at the end
FILLERS = (-1, 7, 2**31 - 1, 0)  # ids under padding


class Batch(NamedTuple):
    """What came out: logits `[N, V]` of each row's real tokens, and the last state."""

    logits: list[Array]
    state: CacheState


def texts(case: Case) -> list[list[int]]:
    """What each row is fed in all."""
    return [case.tokens(sum(counts), 40 + row) for row, counts in enumerate(COUNTS)]


def run_together(
    case: Case, model: Model, layout: CacheLayout, *, left: bool, params: Params | None = None
) -> Batch:
    """All rows, unused slots poisoned and arbitrary ids under padding; the last row joins.

    Before that it ran in another state, and its place held another text.
    """
    runner = _Runner(case, model, layout, left=left, dirty=True, params=params)
    everyone, last = list(range(ROWS)), ROWS - 1
    state, waiting = runner.empty(), runner.empty()
    logits: list[list[Array]] = [[] for _ in everyone]
    for call in range(len(COUNTS[0])):
        if call < JOINS:
            found, waiting = runner.feed(waiting, call, [last])
            logits[last].append(found[last])
        elif call == JOINS:
            chosen = cache.select(waiting, [last])
            state = cache.insert(state, last, chosen, 0)
        # Before it joins, the last row's place runs what belongs to row 0.
        stand_in = {last: 0} if call < JOINS else {}
        found, state = runner.feed(state, call, everyone, stand_in)
        for row in everyone if call >= JOINS else everyone[:last]:
            logits[row].append(found[row])
    return Batch([np.concatenate(parts) for parts in logits], state)


def run_alone(
    case: Case, model: Model, layout: CacheLayout, row: int, params: Params | None = None
) -> Batch:
    """One row of the same shape of batch; all other rows idle, nothing poisoned."""
    runner = _Runner(case, model, layout, left=False, dirty=False, params=params)
    state, parts = runner.empty(), []
    for call in range(len(COUNTS[0])):
        found, state = runner.feed(state, call, [row])
        parts.append(found[row])
    return Batch([np.concatenate(parts)], state)


def held(state: CacheState, row: int) -> dict[str, Array]:
    """What a row holds: the slots that its tokens took, and all of a recurrent state."""
    kept = {}
    for name, array in state.items():
        values = to_numpy(array)[row]
        slots = held_slots(name, state)
        if slots is not None:
            chosen = np.broadcast_to(np.array(slots), array.shape)[row]
            values = np.where(chosen, values, 0)
        kept[name] = values
    return kept


class _Runner:
    def __init__(
        self, case: Case, model: Model, layout: CacheLayout, *, left: bool, dirty: bool,
        params: Params | None,
    ) -> None:  # fmt: skip
        self.model, self.layout, self.left, self.dirty = model, layout, left, dirty
        self.params = model.params if params is None else params
        self.texts = texts(case)

    def empty(self) -> CacheState:
        return self.model.init_cache(ROWS, CAPACITY, max_tokens=self.layout.max_tokens)

    def feed(
        self,
        state: CacheState,
        call: int,
        rows: Sequence[int],
        stand_in: Mapping[int, int] | None = None,
    ) -> tuple[dict[int, Array], CacheState]:
        """Logits `[n, V]` of the real tokens of `rows`; all others idle."""
        width = WIDTH if call < len(COUNTS[0]) - STEPS else 1
        tokens = [[FILLERS[i % 4] if self.dirty else 0 for i in range(width)] for _ in range(ROWS)]
        valid = np.zeros((ROWS, width), bool)
        for row in rows:
            source = (stand_in or {}).get(row, row)
            before, count = sum(COUNTS[source][:call]), COUNTS[source][call]
            start = width - count if self.left else 0
            tokens[row][start : start + count] = self.texts[source][before : before + count]
            valid[row, start : start + count] = True
        state = poison(state) if self.dirty else state
        mask = causal(mx.array(valid), state)
        ids = mx.array(tokens, dtype=mx.int32)
        logits, state = self.model.forward(self.params, ids, mask, state)
        mx.eval(logits, state)
        return {row: to_numpy(logits[row])[valid[row]] for row in rows}, state
