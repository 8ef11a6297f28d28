"""The host loop: requests are admitted, prefilled in chunks, decoded together and retired.

It runs in one thread and waits for nothing but the model. A round is at most one chunk of prompts
and then one step of the running batch, so that no running row waits longer than one chunk. What
either of them gives is delivered before the other begins.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Sequence

from funcrt.cache import CacheState
from funcrt.compiled import Compiled
from funcrt.engine.admission import Admission
from funcrt.engine.calls import Call, read_choices
from funcrt.engine.decoding import Decoding
from funcrt.engine.handle import Handle
from funcrt.engine.prefixes import PrefixPool, Rewind
from funcrt.engine.prompts import Prefilling
from funcrt.engine.request import Choice, Chunk, Request
from funcrt.engine.rows import Rows
from funcrt.engine.stats import Meter, OnStep, Stats
from funcrt.errors import EngineError
from funcrt.machine import is_on_gpu

_POOL_SHARE = 0.1  # of the memory budget, for rows of finished requests


class Scheduler:
    """What runs now, what waits, and what comes next.

    Args:
        compiled: the step functions.
        admission: memory.
        on_step: called after every call of the model.
    """

    def __init__(
        self, compiled: Compiled, admission: Admission, on_step: OnStep | None = None
    ) -> None:
        # A GPU works on its own. On a CPU scheduling is most of the work.
        self._ahead = is_on_gpu()
        self._compiled = compiled
        self._admission = admission
        self._meter = Meter(compiled.traces, on_step)
        self._rewind = Rewind(compiled.cache_spec, compiled.plan.tokens[-1])
        self._requests: dict[Handle, Request] = {}  # all that have not ended
        self._waiting: deque[Request] = deque()
        self._outbox: list[tuple[Request, Chunk | BaseException]] = []
        self._dropped: list[Request] = []  # ended by their callers' functions, rows not yet free
        self.begin()

    def begin(self) -> None:
        """Start with empty states."""
        spec, plan = self._compiled.cache_spec, self._compiled.plan
        limit = int(_POOL_SHARE * self._admission.budget)
        self._prefixes = PrefixPool(spec, plan, self._rewind, limit)
        self._running = Rows(spec, plan)
        self._prompts = Prefilling(self._compiled, self._prefixes, self._running, self._ahead)
        self._decoding = Decoding(self._compiled, self._running, self._ahead)

    def end(self) -> None:
        """Let go of all rows, of those that were kept, too."""
        self._decoding.forget()
        self.begin()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._requests or self._dropped)

    @property
    def handles(self) -> list[Handle]:
        """Of all requests that have not ended."""
        return list(self._requests)

    @property
    def stats(self) -> Stats:
        """Counters."""
        return self._meter.stats

    def watch(self, traces: Counter[str]) -> None:
        """Count the traces of a draft model, too."""
        self._meter.traces.append(traces)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self._requests[request.handle] = request
        self._waiting.append(request)

    def cancel(self, handle: Handle) -> None:
        """End a request where it is; nothing happens if it has ended."""
        request = self._requests.get(handle)
        if request is not None:
            self._leave(request)
            self._outbox.append((request, request.cancel()))

    def fail(self, error: BaseException) -> None:
        """End everything with an error, and begin anew: what states hold is not known any more."""
        self._waiting.clear()
        self._dropped.clear()
        self.end()
        ended = {request for request, chunk in self._outbox if _ends(chunk)}
        for request in list(self._requests.values()):
            if request not in ended:  # what was given is given
                failure = EngineError(f"the model failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._outbox.append((request, failure))

    def deliver(self) -> None:
        """Call callers' functions with what there is for them; needs nothing of MLX."""
        self._meter.deliver()
        outbox, self._outbox = self._outbox, []
        for request, chunk in outbox:
            if request.handle not in self._requests:  # an earlier chunk was its last
                continue
            if isinstance(chunk, BaseException):
                self._fail(request, chunk)
                continue
            try:
                request.handle.push(chunk)
            except BaseException as error:  # noqa: BLE001 (the caller's own callback)
                self._dropped.append(request)
                self._fail(request, error)
            else:
                if chunk.finish_reason:
                    self._forget(request)

    def feed(self) -> None:
        """Admit what fits, then one chunk of prompts: half a round."""
        self._drop()
        self._admit()
        if self._prompts.requests:
            self._prefill()

    def step(self) -> None:
        """One step of the running batch: the other half."""
        self._drop()
        if self._running.seated:
            self._decode()
        if not self.busy:
            self._decoding.forget()

    def _drop(self) -> None:
        for request in self._dropped:
            self._leave(request)
        self._dropped.clear()

    def _admit(self) -> None:
        """First come, first served: what does not fit yet makes those behind it wait, too."""
        while self._waiting:
            active = [*self._prompts.requests, *self._running.seated.values()]
            if len(active) == self._compiled.plan.batch[-1]:
                return
            spare = self._admission.spare([*active, self._waiting[0]])
            if spare < 0 and active:
                return
            self._prefixes.bound(spare)
            self._prompts.requests.append(self._waiting.popleft())

    def _prefill(self) -> None:
        begin = time.perf_counter()
        call, flight, state = self._prompts.prefill()
        if flight is None:
            call.seconds = time.perf_counter() - begin
            self._count(call, 0)
            return
        # Rows join before their first token is read, so that the device goes on meanwhile; those
        # that end with it need no place.
        staying = {row: r for row, r in flight.rows.items() if r.remaining > 1}
        try:
            self._seat([staying.get(row) for row in range(call.bucket.batch)], state)
        finally:  # whatever becomes of the rows, what was chosen is theirs
            call.choices = read_choices(flight.sampled, flight.tops, flight.rows)
            call.seconds = time.perf_counter() - begin
            new = self._record(call)
        leaving = {row: request for row, request in flight.rows.items() if row not in staying}
        self._running.let_read(self._prefixes.keep(leaving, state))
        self._retire([request for request in staying.values() if request.finished])
        self._count(call, new)

    def _seat(self, seats: Sequence[Request | None], state: CacheState) -> None:
        """Rows whose prompt is in the cache join the running batch, or are it."""
        joining = {row: request for row, request in enumerate(seats) if request is not None}
        if not joining:
            return
        seated = self._running.seated.values()
        if not seated:
            self._running.adopt(state, seats)
            return
        self._decoding.drop_built()
        longest = max(request.cached for request in [*seated, *joining.values()])
        self._running.fit(len(seated) + len(joining), longest)
        self._running.join(state, joining)

    def _decode(self) -> None:
        call = self._decoding.decode()
        new = self._record(call)
        self._retire([request for request in call.rows.values() if request.finished])
        self._count(call, new)

    # --- results ---------------------------------------------------------------------------------

    def _record(self, call: Call) -> int:
        """Add new tokens to their texts, up to the end of each; how many there were."""
        new = 0
        for request, choices in call.choices.items():
            for choice in choices:
                new += self._take(request, choice)
                if request.finished:
                    break
        return new

    def _take(self, request: Request, choice: Choice) -> bool:
        """Add one token to a text; whether there was one."""
        try:
            chunk = request.take(choice)
        except Exception as error:  # noqa: BLE001 (of this text only: the others go on)
            request.completion.finish_reason = "error"
            self._outbox.append((request, error))
            return False
        self._outbox.append((request, chunk))
        return chunk.finish_reason != "error"

    def _count(self, call: Call, new: int) -> None:
        """Before what the call gave is handed out: whoever gets it finds it counted."""
        self._meter.count(
            call,
            new,
            waiting=len(self._waiting),
            prefilling=len(self._prompts.requests),
            running=len(self._running.seated),
            prefix_bytes=self._prefixes.nbytes,
        )

    # --- ends ------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: BaseException) -> None:
        request.completion.finish_reason = "error"
        self._forget(request)
        request.handle.fail(error)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.handle, None)
        self.stats.requests += 1
        request.leave_drafter()

    def _leave(self, request: Request) -> None:
        """Take a request out of wherever it is."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._prompts.requests:
            self._prompts.requests.remove(request)
            request.row = None
        elif request in self._running.requests:
            self._retire([request])

    def _retire(self, requests: Collection[Request]) -> None:
        """Free rows, and keep what they hold for prompts that begin like theirs."""
        if not requests:
            return
        assert self._running.state is not None
        self._decoding.drop_built()
        # Rows may have moved since the step was begun that these end with.
        rows = {self._running.requests.index(request): request for request in requests}
        self._running.let_read(self._prefixes.keep(rows, self._running.state))
        for row in rows:
            self._running.release(row)


def _ends(chunk: Chunk | BaseException) -> bool:
    return isinstance(chunk, BaseException) or bool(chunk.finish_reason)
