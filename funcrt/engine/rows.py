"""The running batch: a cache state in one bucket, and which request sits in which row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from funcrt import cache
from funcrt.buckets import BucketPlan
from funcrt.cache import CacheSpec, CacheState
from funcrt.engine.request import Request

import mlx.core as mx

_PATIENCE = 16  # steps in which a smaller bucket would do, before rows move to it


class Rows:
    """Requests in the rows of one state, which grows at once and shrinks with patience.

    Rows without a request are idle: rows of padding that change nothing. The batch is in the
    smallest declared bucket that holds the requests, but for the patience.

    Args:
        spec: the arrays of a cache state.
        plan: the declared buckets.

    Attributes:
        state: the cache state, or None while nobody sits.
        requests: who sits in each row.
    """

    def __init__(self, spec: CacheSpec, plan: BucketPlan) -> None:
        self._spec = spec
        self._plan = plan
        self._slack = 0
        self._readers: list[mx.array] = []
        self.state: CacheState | None = None
        self.requests: list[Request | None] = []
        self.capacity = 0

    @property
    def batch(self) -> int:
        """Rows of the state."""
        return len(self.requests)

    @property
    def seated(self) -> dict[int, Request]:
        """The requests by their rows."""
        return {row: request for row, request in enumerate(self.requests) if request is not None}

    def seat(self, request: Request) -> None:
        """Give a request a free and empty row; `fit` has made one."""
        free = self.requests.index(None)
        self.state = cache.clear(self._settle(), free)
        mx.eval(self.state)
        self.requests[free] = request

    def join(self, source: CacheState, joining: Mapping[int, Request]) -> None:
        """Give requests free rows, copies of those that they have in `source`."""
        free = [row for row, request in enumerate(self.requests) if request is None]
        targets = free[: len(joining)]
        self.state = cache.insert(self._settle(), targets, source, list(joining))
        mx.async_eval(self.state)  # type: ignore[no-untyped-call]  # the next step waits for it
        for row, request in zip(targets, joining.values(), strict=True):
            self.requests[row] = request

    def adopt(self, state: CacheState, requests: Sequence[Request | None]) -> None:
        """Take over a whole state: what `seat` does for the first rows, without a copy."""
        assert not self.seated
        self.state = state
        self.requests = list(requests)
        self.capacity = cache.state_size(state)[1]
        self._slack = 0

    def holds(self, rows: int, tokens: int) -> bool:
        """Whether `fit` would leave everybody in place."""
        batch, capacity = self._choose(rows, tokens)
        if self.state is None or batch > self.batch or capacity > self.capacity:
            return False
        return (batch, capacity) == (self.batch, self.capacity) or self._slack + 1 < _PATIENCE

    def fit(self, rows: int, tokens: int) -> None:
        """Be in a declared bucket for so many rows and so many tokens in the longest of them."""
        batch, capacity = self._choose(rows, tokens)
        if self.state is None:
            self.adopt(cache.init_cache(self._spec, batch, capacity), [None] * batch)
            return
        if self.holds(rows, tokens):
            smaller = (batch, capacity) != (self.batch, self.capacity)
            self._slack = self._slack + 1 if smaller else 0
            return
        if batch <= self.batch and capacity <= self.capacity:
            self._slack = _PATIENCE
        elif self._slack < _PATIENCE:  # one of the two grows: the other does not shrink on the way
            batch, capacity = max(batch, self.batch), max(capacity, self.capacity)
        self._move(batch, capacity)

    def release(self, row: int) -> None:
        """Leave a row idle; the last one to leave takes the state along."""
        self.requests[row] = None
        if not self.seated:
            self.state = None
            self._readers.clear()
            self.requests = []
            self.capacity = 0

    def let_read(self, readers: Iterable[mx.array]) -> None:
        """Do not write the state before these are known, which are scheduled and read it."""
        if self.state is not None:
            self._readers.extend(readers)

    def take(self) -> CacheState:
        """The state, for a call that replaces it: nothing else may hold it then."""
        self._finish_reading()
        state, self.state = self.state, None
        assert state is not None
        return state

    def _settle(self) -> CacheState:
        """The state. Rows are written in place only where nothing is still to read the old ones."""
        assert self.state is not None
        self._finish_reading()
        mx.eval(self.state)
        return self.state

    def _finish_reading(self) -> None:
        mx.eval(self._readers)
        self._readers.clear()

    def _choose(self, rows: int, tokens: int) -> tuple[int, int]:
        return self._plan.choose_batch(rows), choose_capacity(self._plan, self._spec, tokens)

    def _move(self, batch: int, capacity: int) -> None:
        seated = self.seated
        state = self.take()
        if len(seated) < self.batch:  # idle rows stay behind, whatever they hold
            state = cache.select(state, list(seated))
            mx.eval(state)  # the larger one is let go before the next copy
        self.requests = [*seated.values(), *[None] * (batch - len(seated))]
        self.state = stack(self._spec, [state], batch, capacity)
        mx.eval(self.state)
        self.capacity = capacity
        self._slack = 0


def copy_row(state: CacheState, row: int, capacity: int | None = None) -> CacheState:
    """A state of one row. Once it is evaluated, nothing keeps the others' arrays.

    Args:
        state: of any number of rows.
        row: the one that is copied.
        capacity: slots of the copy, no more than there are, which hold the row; None keeps all.
    """
    present = cache.state_size(state)[1]
    if state["lengths"].shape[0] == 1 and capacity in (None, present):
        return state
    copied = {}
    for name, array in state.items():
        cut = [slice(row, row + 1), *[slice(None)] * (array.ndim - 1)]
        axis = cache.slot_axis(name)
        if axis is not None:  # whatever is in the new scratch slot: nothing sees it
            cut[axis] = slice(capacity)
        copied[name] = mx.contiguous(array[tuple(cut)])
    return copied


def stack(spec: CacheSpec, states: Sequence[CacheState], batch: int, capacity: int) -> CacheState:
    """The rows of all states in one bucket; what is left of it is empty."""
    sized = [resize(state, capacity) for state in states]
    missing = batch - sum(state["lengths"].shape[0] for state in sized)
    if missing:
        sized.append(cache.init_cache(spec, missing, capacity))
    return cache.join(sized)


def pad(texts: Mapping[int, Sequence[int]], batch: int, width: int) -> tuple[mx.array, mx.array]:
    """Tokens of some rows, filled up at their ends: ids int32 `[B, T]`, and bool which are real."""
    ids, counts = [[0] * width for _ in range(batch)], [0] * batch
    for row, text in texts.items():
        ids[row][: len(text)] = text
        counts[row] = len(text)
    return mx.array(ids, dtype=mx.int32), mx.arange(width) < mx.array(counts)[:, None]


def resize(state: CacheState, capacity: int) -> CacheState:
    """The same rows with so many slots."""
    present = cache.state_size(state)[1]
    if present == 1:  # nothing has slots
        return state
    return cache.grow(state, capacity) if present < capacity else cache.shrink(state, capacity)


def choose_capacity(plan: BucketPlan, spec: CacheSpec, tokens: int) -> int:
    """The smallest declared capacity for a text; 1 where nothing has slots."""
    if not any("S" in entry.shape for entry in spec):
        return 1
    return plan.choose_capacity(tokens)
