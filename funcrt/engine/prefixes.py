"""Cached beginnings of texts, to be forked instead of computed again."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from funcrt import cache
from funcrt.buckets import BucketPlan
from funcrt.cache import CacheSpec, CacheState
from funcrt.engine.request import Request
from funcrt.engine.rows import choose_capacity, copy_row

import mlx.core as mx

LEAST_SHARED = 8
"""A shorter common beginning costs more to copy than to compute."""


@dataclass(eq=False)
class Prefix:
    """A state of one row and the tokens that it has seen.

    Attributes:
        tokens: in the order of its slots.
        state: of one row.
        written: the highest length that the row has had, which bounds how far a ring goes back.
        nbytes: bytes that its arrays take.
        adapter: what it was computed with.
    """

    tokens: list[int]
    state: CacheState
    written: int
    nbytes: int
    adapter: int


class Rewind:
    """How far the rows of a cache can go back, from what its layers keep.

    Args:
        spec: the arrays of a cache state.
        slack: how many tokens a ring can give back: the largest call.
    """

    def __init__(self, spec: CacheSpec, slack: int) -> None:
        kinds = {entry.kind for entry in spec}
        self.is_free = not kinds & {"recurrent", "ring"}
        self._most = 0 if "recurrent" in kinds else slack

    def allows(self, written: int, length: int) -> bool:
        """Whether a row that has had `written` tokens can be cut to `length`."""
        return self.is_free or written - length <= self._most


class PrefixPool:
    """Rows of recently finished requests, the least recently used of which go first.

    Args:
        spec: the arrays of a cache state.
        plan: the declared buckets.
        rewind: how far rows can go back.
        limit: most bytes to keep.

    Attributes:
        nbytes: bytes that are kept.
    """

    def __init__(self, spec: CacheSpec, plan: BucketPlan, rewind: Rewind, limit: int) -> None:
        self.nbytes = 0
        self._spec = spec
        self._plan = plan
        self._rewind = rewind
        self._bytes_of = functools.cache(lambda slots: cache.state_bytes(spec, 1, slots))
        self._most = self._limit = limit
        self._entries: OrderedDict[Prefix, None] = OrderedDict()
        # By their first tokens: nearly all of many rows have nothing in common with a prompt.
        self._by_start: dict[tuple[int, ...], set[Prefix]] = {}  # the adapter, then tokens

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, finished: Mapping[int, Request], state: CacheState) -> list[mx.array]:
        """Keep copies of finished rows, of those that can be of use.

        Returns:
            The copies, which are scheduled: once they are known, `state` may be written.
        """
        entries = [self._keep(request, state, row) for row, request in finished.items()]
        # Not those that had to give way to others of these.
        kept = [entry for entry in entries if entry and entry in self._entries]
        copies = [array for entry in kept for array in entry.state.values()]
        mx.async_eval(copies)  # type: ignore[no-untyped-call]
        return copies

    def _keep(self, request: Request, state: CacheState, row: int) -> Prefix | None:
        tokens = request.sequence[: request.cached]
        length = len(tokens)  # fewer than cached where a text ended among accepted guesses
        capacity = choose_capacity(self._plan, self._spec, request.cached)
        nbytes = self._bytes_of(capacity)
        if (
            request.completion.finish_reason == "error"
            or length < LEAST_SHARED
            or nbytes > self._limit
            or not self._rewind.allows(request.written, length)
            or any(shared(e.tokens, tokens) == length for e in self._like(tokens, request.adapter))
        ):
            return None
        self._shrink(self._limit - nbytes)  # before there are both
        copied = copy_row(state, row, min(capacity, cache.state_size(state)[1]))
        if length < request.cached:
            copied = cache.trim(copied, request.cached - length)
        if self._rewind.is_free:  # a shorter row that this one contains is of no more use
            for other in list(self._like(tokens, request.adapter)):
                if shared(other.tokens, tokens) == len(other.tokens):
                    self._drop(other)
        entry = Prefix(tokens, copied, request.written, nbytes, request.adapter)
        self._entries[entry] = None
        self._by_start.setdefault(_start(tokens, entry.adapter), set()).add(entry)
        self.nbytes += nbytes
        return entry

    def bound(self, spare: int) -> None:
        """Keep within `spare` bytes as long as nothing else is said."""
        self._limit = max(0, min(self._most, spare))
        self._shrink(self._limit)

    def find(self, tokens: Sequence[int], adapter: int = 0) -> tuple[Prefix | None, int]:
        """The row that can be cut to the longest beginning of `tokens`, and that length.

        Only rows that were computed with the same adapter count.
        """
        best, length = None, 0
        for entry in self._like(tokens, adapter):
            common = self.reusable(entry.tokens, entry.written, tokens)
            if common > length:
                best, length = entry, common
        if best is not None:
            self._entries.move_to_end(best)
        return best, length

    def _like(self, tokens: Sequence[int], adapter: int) -> Collection[Prefix]:
        return self._by_start.get(_start(tokens, adapter), ())

    def _shrink(self, limit: int) -> None:
        while self._entries and self.nbytes > limit:
            self._drop(next(iter(self._entries)))

    def _drop(self, entry: Prefix) -> None:
        del self._entries[entry]
        start = _start(entry.tokens, entry.adapter)
        self._by_start[start].discard(entry)
        if not self._by_start[start]:
            del self._by_start[start]
        self.nbytes -= entry.nbytes

    def reusable(self, cached: Sequence[int], written: int, tokens: Sequence[int]) -> int:
        """How many of `tokens` a row can serve: not the last one, whose logits are wanted."""
        if cached[:LEAST_SHARED] != tokens[:LEAST_SHARED]:  # nearly always, and quickly told
            return 0
        common = min(shared(cached, tokens), len(tokens) - 1)
        if common < LEAST_SHARED or not self._rewind.allows(written, common):
            return 0
        return common


def _start(tokens: Sequence[int], adapter: int) -> tuple[int, ...]:
    return (adapter, *tokens[:LEAST_SHARED])


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning, by halving: comparing slices is quick, a loop is not."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
