"""Prompts on their way into the cache, in chunks of several at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from funcrt import cache, sampling
from funcrt.buckets import Bucket, choose_overhead
from funcrt.cache import CacheState
from funcrt.compiled import Compiled
from funcrt.engine.calls import Call, find_tops
from funcrt.engine.controls import is_greedy, make
from funcrt.engine.flight import Flight, begin_pieces
from funcrt.engine.grouping import cut, most_places
from funcrt.engine.prefixes import LEAST_SHARED, Prefix, PrefixPool
from funcrt.engine.request import Request
from funcrt.engine.rows import Rows, choose_capacity, copy_row, pad, stack
from funcrt.low_rank import ROWS

import mlx.core as mx


class Prefilling:
    """Requests whose prompt is not all in the cache yet.

    Each that holds something has a state of one row to itself. For a call some of these are
    stacked in a bucket; rows whose prompt is done are then handed over, the others wait for their
    next turn.

    Args:
        compiled: the step functions.
        prefixes: rows of finished requests.
        running: the running batch, whose rows can be forked, too.
        ahead: the device works on its own, so that what is scheduled first is done first.

    Attributes:
        requests: in the order of their arrival.
    """

    def __init__(
        self, compiled: Compiled, prefixes: PrefixPool, running: Rows, ahead: bool
    ) -> None:
        self.requests: list[Request] = []
        self._compiled = compiled
        self._plan = compiled.plan
        self._spec = compiled.cache_spec
        self._prefixes = prefixes
        self._running = running
        self._ahead = ahead
        self._overhead = choose_overhead()
        self._most_places = most_places(self._plan)

    def prefill(self) -> tuple[Call, Flight | None, CacheState]:
        """Schedule one chunk.

        Returns:
            The call; what it chooses for the prompts that are done, if any are, which have left;
            and the state, whose rows are theirs.
        """
        group = self._choose_group()
        new = [request for request in group if request.row is None]
        for request in new:
            self._start(request)
        width = self._plan.choose_chunk(max(r.pending for r in group), self._overhead)
        counts = [min(width, request.pending) for request in group]
        batch = self._plan.choose_batch(len(group))
        longest = max(r.cached + n for r, n in zip(group, counts, strict=True))
        is_first = not any(request.cached for request in group)
        if is_first and self._compiled.has_first(width):
            # It looks at no slots: there may be as many as in the batch to join.
            longest = max([longest, *(r.cached for r in self._running.seated.values())])
        capacity = choose_capacity(self._plan, self._spec, longest)
        state = self._gather(group, batch, capacity)
        chunks = {}
        for row, (request, count) in enumerate(zip(group, counts, strict=True)):
            chunks[row] = request.prompt[request.cached : request.cached + count]
            request.cached += count
            request.written = max(request.written, request.cached)
        tokens, valid = pad(chunks, batch, width)
        logits, state = self._compiled.prefill(tokens, valid, state, first=is_first)
        begun = begin_pieces(state) if self._ahead else 0
        rows = dict(enumerate(group))
        reused = sum(request.completion.reused_tokens for request in new)
        bucket = Bucket(batch, width, capacity)
        call = Call("prefill", bucket, rows, sum(counts), reused=reused)
        ready = {row: request for row, request in rows.items() if not request.pending}
        flight = self._choose(logits, bucket, group, ready) if ready else None
        if flight is not None:
            flight.begun = begun
            flight.finish(state)
        copies = []
        for row, request in rows.items():
            if row in ready:
                self.requests.remove(request)
            else:
                fitting = choose_capacity(self._plan, self._spec, request.cached)
                request.row = copy_row(state, row, fitting)
                copies.append(request.row)
        mx.eval(copies)  # before others write what they are copied from
        return call, flight, state

    def _choose_group(self) -> list[Request]:
        """The requests of the next chunk: one of the calls that are the cheapest way through all.

        It is that of the request with the shortest rest, so that a short prompt does not wait for
        a long one; every chunk that a request waited for counts for it, so that none waits for
        ever.
        """
        longest = self._plan.tokens[-1]
        begun = [request for request in self.requests if request.row is not None]
        queue = [request for request in self.requests if not self._waits(request, begun)]
        by_turn = sorted(queue, key=lambda r: r.pending - r.waited * longest)
        queue.sort(key=lambda r: r.pending)
        pending = [request.pending for request in queue]
        ends = cut(pending, self._plan, self._overhead, self._most_places)
        calls = (queue[begin:end] for begin, end in pairwise([0, *ends]))
        call = next(call for call in calls if by_turn[0] in call)
        group: list[Request] = []
        for request in by_turn:
            if request in call and not self._waits(request, group):
                group.append(request)
        for request in self.requests:
            request.waited += request not in group
        return group

    def _waits(self, request: Request, others: Collection[Request]) -> bool:
        """Whether a request had better fork what is about to be computed for one of the others."""
        if request.row is not None:
            return False
        soon = [
            self._prefixes.reusable(other.prompt, len(other.prompt), request.prompt)
            for other in others
            if other.adapter == request.adapter
        ]
        return any(soon) and max(soon) >= self._find_prefix(request)[1] + LEAST_SHARED

    def _gather(self, group: Sequence[Request], batch: int, capacity: int) -> CacheState:
        """The rows of a call in one bucket, none of which belongs to anybody else."""
        if any(request.row is not None for request in group):
            rows = [_take_row(request) or self._make_empty([request]) for request in group]
            return stack(self._spec, rows, batch, capacity)
        return self._make_empty(group, batch, capacity)

    def _make_empty(
        self, group: Sequence[Request], batch: int = 1, capacity: int | None = None
    ) -> CacheState:
        capacity = choose_capacity(self._plan, self._spec, 1) if capacity is None else capacity
        state = cache.init_cache(self._spec, batch, capacity)
        if any(request.adapter for request in group):
            adapters = [request.adapter for request in group]
            state[ROWS] = mx.array(adapters + [0] * (batch - len(group)), dtype=mx.int32)
        return state

    def _start(self, request: Request) -> None:
        """The longest beginning of a prompt that is cached, as the row of its request."""
        source, length = self._find_prefix(request)
        if source is None:
            return
        if isinstance(source, Prefix):
            row, held = source.state, len(source.tokens)
        else:
            row, held = self._row_of(source), source.cached
        request.row = cache.trim(row, held - length) if held > length else row
        request.cached = request.completion.reused_tokens = length
        request.written = source.written

    def _find_prefix(self, request: Request) -> tuple[Prefix | Request | None, int]:
        """Whose row begins like the prompt, and for how many tokens."""
        best: Prefix | Request | None
        best, length = self._prefixes.find(request.prompt, request.adapter)
        for other in [*self._running.seated.values(), *self.requests]:
            if other.adapter != request.adapter:
                continue
            held = other.sequence[: other.cached]
            common = self._prefixes.reusable(held, other.written, request.prompt)
            if common > length:
                best, length = other, common
        return best, length

    def _row_of(self, request: Request) -> CacheState:
        """What a request that goes on holds. Arrays may be shared: whoever writes next copies."""
        if request.row is not None:
            return request.row
        assert self._running.state is not None
        copied = copy_row(self._running.state, self._running.requests.index(request))
        mx.eval(copied)  # nothing may hold the state when the next step writes it
        return copied

    def _choose(
        self, logits: mx.array, bucket: Bucket, group: Sequence[Request], ready: dict[int, Request]
    ) -> Flight:
        """The first new tokens of prompts that are done; at those of the others nobody looks."""
        if is_greedy(group):
            sampled = sampling.greedy(logits)
        else:
            requests = [*group, *[None] * (bucket.batch - len(group))]
            positions = mx.array([r.cached if r else 0 for r in requests], dtype=mx.int32)
            settings = make(requests, self._compiled.vocab_size)
            sampled = self._compiled.sample(logits, positions, settings)
        sampled = sampled._replace(logits=logits)
        tops = find_tops(self._compiled, sampled, ready.values())
        return Flight(bucket, ready, sampled, tops)


def _take_row(request: Request) -> CacheState | None:
    """The row of a request, if it holds something, which then belongs to the caller alone."""
    row, request.row = request.row, None
    return row
