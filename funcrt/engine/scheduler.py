"""The host loop: requests are admitted, prefilled in chunks, decoded together and retired.

It runs in one thread and waits for nothing but the model. A round is at most one chunk of prompts
and then one step of the running batch, so that no running row waits longer than one chunk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funcrt import cache, sampling
from funcrt.buckets import Bucket, choose_overhead
from funcrt.compiled import Compiled
from funcrt.engine.admission import Admission
from funcrt.engine.controls import Controls, is_greedy, make
from funcrt.engine.prefixes import LEAST_SHARED, Prefix, PrefixPool, Rewind, reusable
from funcrt.engine.request import Choice, Chunk, Request
from funcrt.engine.rows import Rows, choose_capacity, copy_row, resize, stack
from funcrt.engine.speculative import LARGEST_PAUSE
from funcrt.engine.stats import Stats, StepReport
from funcrt.sampling import Sampled
from funcrt.steps import STEPS

import mlx.core as mx

_POOL_SHARE = 0.1  # of the budget, for rows of finished requests
_WHOLE_CALL = 4  # a call of so many times the overhead spends most of its time on tokens

OnStep = Callable[[StepReport], None]


class Scheduler:
    """What runs now, what waits, and what comes next.

    Args:
        compiled: the step functions.
        admission: memory.
        on_step: called after every call of the model.

    Attributes:
        stats: counters.
    """

    def __init__(
        self, compiled: Compiled, admission: Admission, on_step: OnStep | None = None
    ) -> None:
        self.compiled = compiled
        self.plan = compiled.plan
        self.spec = compiled.cache_spec
        self.stats = Stats()
        self._admission = admission
        self._on_step = on_step
        self._overhead = choose_overhead()
        self._most_places = max(self.plan.tokens[-1], _WHOLE_CALL * self._overhead)
        self._verify_sizes = STEPS["verify"].choose_sizes(self.plan.tokens)
        self._rewind = Rewind(self.spec, self.plan.tokens[-1])
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._running = Rows(self.spec, self.plan)
        self._controls = Controls(compiled.vocab_size)
        self._prefixes = PrefixPool(self._rewind, int(_POOL_SHARE * admission.budget))

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._prefilling or self._running.seated)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request where it is; nothing happens if it has ended."""
        if request.finished:
            return
        self._leave(request)
        self._hand_out(request, request.cancel())

    def fail(self, error: BaseException) -> None:
        """End everything with an error, and begin anew: what states hold is not known any more."""
        failed = [*self._waiting, *self._prefilling, *self._running.seated.values()]
        self._waiting.clear()
        self._prefilling.clear()
        self._running = Rows(self.spec, self.plan)
        self._prefixes.shrink(0)
        for request in failed:
            self._fail(request, error)

    def round(self) -> None:
        """Admit what fits, then one chunk of prompts, then one step of the running batch."""
        self._admit()
        if self._prefilling:
            self._prefill()
        if self._running.seated:
            self._decode()
        if not self.busy:
            self._controls.forget()

    # --- admission -------------------------------------------------------------------------------

    def _admit(self) -> None:
        """First come, first served: what does not fit yet makes those behind it wait, too."""
        while self._waiting:
            active = [*self._prefilling, *self._running.seated.values()]
            if len(active) == self.plan.batch[-1]:
                return
            spare = self._admission.spare([*active, self._waiting[0]])
            if spare < 0 and active:
                return
            self._prefixes.shrink(max(0, spare))
            self._prefilling.append(self._waiting.popleft())

    # --- prompts ---------------------------------------------------------------------------------

    def _prefill(self) -> None:
        begin = time.perf_counter()
        group = self._choose_group()
        for request in group:
            if request.row is None:
                self._start(request)
        width = self.plan.choose_chunk(max(r.pending for r in group), self._overhead)
        counts = [min(width, request.pending) for request in group]
        batch = self.plan.choose_batch(len(group))
        longest = max(r.cached + n for r, n in zip(group, counts, strict=True))
        capacity = choose_capacity(self.plan, self.spec, longest)
        state = stack(self.spec, [_take_row(request) for request in group], batch, capacity)
        tokens = [[0] * width for _ in range(batch)]
        for row, (request, count) in enumerate(zip(group, counts, strict=True)):
            tokens[row][:count] = request.prompt[request.cached : request.cached + count]
            request.cached += count
            request.written = request.cached
        real = mx.array([*counts, *[0] * (batch - len(group))])[:, None]
        logits, state = self.compiled.prefill(
            mx.array(tokens, dtype=mx.int32), mx.arange(width) < real, state
        )
        ready = {row: request for row, request in enumerate(group) if not request.pending}
        choices: dict[int, list[Choice]] = {}
        if ready:
            sampled = self._sample(logits, group, batch)
            choices = self._read(sampled, ready, state)
        else:
            mx.eval(state)
        seconds = time.perf_counter() - begin
        self.stats.prompt_tokens += sum(counts)
        self.stats.prompt_seconds += seconds
        new = self._settle(group, ready, choices, state)
        self._report("prefill", Bucket(batch, width, capacity), group, sum(counts), new, seconds)

    def _choose_group(self) -> list[Request]:
        """The requests of the next chunk: as many as make a token cheapest.

        Those with the shortest rest go first, so that a short prompt does not wait for a long one;
        every chunk that a request waited for counts for it, so that none waits for ever.
        """
        longest = self.plan.tokens[-1]
        queue = sorted(self._prefilling, key=lambda r: r.pending - r.waited * longest)
        group: list[Request] = []
        best, cheapest = 1, float("inf")
        for request in queue:
            if any(self._waits_for(request, other) for other in group):
                continue
            group.append(request)
            width = self.plan.choose_chunk(max(r.pending for r in group), self._overhead)
            places = self.plan.choose_batch(len(group)) * width
            if places > self._most_places and len(group) > 1:
                group.pop()
                break
            cost = (places + self._overhead) / sum(min(width, r.pending) for r in group)
            if cost < cheapest:
                best, cheapest = len(group), cost
        group = group[:best]
        for request in self._prefilling:
            if request not in group:
                request.waited += 1
        return group

    def _waits_for(self, request: Request, other: Request) -> bool:
        """Whether a request had better fork what is about to be computed for the other one."""
        if request.row is not None:
            return False
        common = reusable(other.prompt, len(other.prompt), request.prompt, self._rewind)
        return common >= LEAST_SHARED + self._find_prefix(request)[1]

    def _start(self, request: Request) -> None:
        """A row for a request, with the longest beginning of its prompt that is cached."""
        source, length = self._find_prefix(request)
        if source is None:
            request.row = cache.init_cache(self.spec, 1, choose_capacity(self.plan, self.spec, 1))
            return
        row = source.state if isinstance(source, Prefix) else self._copy(source)
        held = len(source.tokens) if isinstance(source, Prefix) else source.cached
        request.row = cache.trim(row, held - length) if held > length else row
        request.cached = length
        request.written = source.written
        request.completion.reused_tokens = length
        self.stats.reused_tokens += length

    def _find_prefix(self, request: Request) -> tuple[Prefix | Request | None, int]:
        """Whose row begins like the prompt, and for how many tokens."""
        best: Prefix | Request | None
        best, length = self._prefixes.find(request.prompt)
        for other in [*self._running.seated.values(), *self._prefilling]:
            held = other.sequence[: other.cached]
            common = reusable(held, other.written, request.prompt, self._rewind)
            if common > length:
                best, length = other, common
        return best, length

    def _copy(self, request: Request) -> cache.CacheState:
        """A copy of the row of a request that goes on."""
        if request.row is not None:
            return request.row
        return self._running.copy(self._running.requests.index(request))

    def _sample(self, logits: mx.array, group: Sequence[Request], batch: int) -> Sampled:
        """The first new tokens of prompts that are done; of the other rows nobody looks."""
        if is_greedy(group):
            return sampling.greedy(logits)._replace(logits=logits)
        requests = [*group, *[None] * (batch - len(group))]
        lengths = [request.cached if request else 0 for request in requests]
        positions = mx.array(lengths, dtype=mx.int32)
        sampled = self.compiled.sample(logits, positions, make(requests, logits.shape[-1]))
        return sampled._replace(logits=logits)

    def _settle(
        self,
        group: Sequence[Request],
        ready: Mapping[int, Request],
        choices: Mapping[int, list[Choice]],
        state: cache.CacheState,
    ) -> int:
        """Rows whose prompt is cached go to the running batch, the others wait for their turn."""
        new = 0
        seats: list[Request | None] = [None] * state["lengths"].shape[0]
        for row, request in enumerate(group):
            if row not in ready:
                request.row = copy_row(state, row)
                continue
            self._prefilling.remove(request)
            new += self._emit(request, choices[row])
            if request.finished:
                self._keep(request, state, row)
            else:
                seats[row] = request
        if any(seats) and not self._running.seated:
            self._running.adopt(state, seats)
            return new
        for row, seated in enumerate(seats):
            if seated is not None:
                others = [other.cached for other in self._running.seated.values()]
                self._running.seat(seated, state, row, max(seated.cached, *others))
        return new

    # --- the running batch -----------------------------------------------------------------------

    def _decode(self) -> None:
        begin = time.perf_counter()
        rows = self._running.seated
        guesses = self._guess(list(rows.values()))
        longest = max(r.cached + 1 + len(guesses.get(r, ())) for r in rows.values())
        self._running.fit(len(rows), longest)
        rows = self._running.seated
        sampled, width = self._step(rows, guesses)
        assert self._running.state is not None
        choices = self._read(sampled, rows, self._running.state)
        seconds = time.perf_counter() - begin
        bucket = Bucket(self._running.batch, width, self._running.capacity)
        requests, new = list(rows.values()), 0
        for row, request in rows.items():
            held = 1 + len(guesses.get(request, ()))
            request.written = max(request.written, request.cached + held)
            request.cached += len(choices[row])
            self._learn(request, held - 1, len(choices[row]) - 1)
            new += self._emit(request, choices[row])
            if request.finished:
                self._retire(row, request)
        places = sum(1 + len(guesses.get(request, ())) for request in requests)
        self.stats.decode_tokens += new
        self.stats.decode_seconds += seconds
        name = "decode" if width == 1 else "verify"
        self._report(name, bucket, requests, places, new, seconds)

    def _step(
        self, rows: Mapping[int, Request], guesses: Mapping[Request, list[int]]
    ) -> tuple[Sampled, int]:
        """One call of the running batch, and its T."""
        running, greedy = self._running, is_greedy(list(rows.values()))
        state, running.state = running.state, None
        assert state is not None
        settings: Any = None if greedy else self._controls.of(running.requests)
        if not guesses:
            last = [request.sequence[-1] if request else 0 for request in running.requests]
            token = mx.array(last, dtype=mx.int32)
            active = mx.array([request is not None for request in running.requests])
            if greedy:
                sampled, running.state = self.compiled.decode_greedy(token, active, state)
            else:
                sampled, running.state = self.compiled.decode(token, active, settings, state)
            width = 1
        else:
            width = min(t for t in self._verify_sizes if t > max(map(len, guesses.values())))
            ids = [[0] * width for _ in range(running.batch)]
            counts = [0] * running.batch
            for row, request in rows.items():
                told = [request.sequence[-1], *guesses.get(request, ())]
                ids[row][: len(told)] = told
                counts[row] = len(told)
            tokens = mx.array(ids, dtype=mx.int32)
            valid = mx.arange(width) < mx.array(counts)[:, None]
            if greedy:
                sampled, running.state = self.compiled.verify_greedy(tokens, valid, state)
            else:
                sampled, running.state = self.compiled.verify(tokens, valid, settings, state)
        self._controls.advance(sampled.history)
        return sampled, width

    def _read(
        self, sampled: Sampled, rows: Mapping[int, Request], state: cache.CacheState
    ) -> dict[int, list[Choice]]:
        """What each row got, after waiting for the device once."""
        most = max(request.top for request in rows.values())
        top = self._top(sampled.logits) if most else []
        arrays = [sampled.tokens, sampled.logprobs, sampled.finite]
        accepted = sampled.accepted
        mx.eval(arrays, accepted, top, sampled.history, state)
        if accepted is None:  # one token per row: [B] as [B, 1]
            arrays = [array[:, None] for array in arrays]
        tokens, logprobs, finite = (_values(array) for array in arrays)
        counts = _values(accepted) if accepted is not None else [0] * len(tokens)
        tops = [(_values(ids), _values(values)) for ids, values in top]
        found: dict[int, list[Choice]] = {}
        for row, request in rows.items():
            found[row] = []
            for i in range(counts[row] + 1):
                likely = [(ids[row], values[row]) for ids, values in tops[i : i + 1]]
                pairs = tuple(zip(*likely[0], strict=True)) if request.top else ()
                found[row].append(Choice(tokens[row][i], logprobs[row][i], finite[row][i], pairs))
        return found

    def _top(self, logits: mx.array | None) -> list[tuple[mx.array, mx.array]]:
        """Alternatives at every place of the call."""
        assert logits is not None
        if logits.ndim == 2:
            return [self.compiled.top(logits)]
        return [self.compiled.top(logits[:, place]) for place in range(logits.shape[1])]

    # --- guesses ---------------------------------------------------------------------------------

    def _guess(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        """Guesses of every drafter for its texts; texts that are hard to guess are left alone."""
        wanted: dict[Any, dict[Request, int]] = {}
        for request in requests:
            if request.drafter is None:
                continue
            if request.pause:
                request.pause -= 1
                continue
            most = min(request.guesses, self._verify_sizes[-1] - 1, request.remaining - 1)
            if most > 0:
                wanted.setdefault(request.drafter, {})[request] = most
        guesses: dict[Request, list[int]] = {}
        for drafter, texts in wanted.items():
            guesses |= drafter.guess(texts)
        return guesses

    def _learn(self, request: Request, guessed: int, accepted: int) -> None:
        """Guess more after success, less after failure, and pause after several."""
        if not guessed:
            return
        self.stats.guessed_tokens += guessed
        self.stats.accepted_tokens += accepted
        if accepted:
            request.misses = 0
            request.guesses = 2 * guessed + 1 if accepted == guessed else accepted + 1
        else:
            request.misses += 1
            request.guesses = max(1, guessed // 2)
            request.pause = min(2 ** (request.misses - 1) - 1, LARGEST_PAUSE)

    # --- ends ------------------------------------------------------------------------------------

    def _emit(self, request: Request, choices: Sequence[Choice]) -> int:
        """Hand out new tokens up to the end of the request; how many there were."""
        for number, choice in enumerate(choices):
            try:
                chunk = request.take(choice)
            except Exception as error:  # noqa: BLE001 (of this text only: the others go on)
                self._fail(request, error)
            else:
                self.stats.generated_tokens += choice.finite
                self._hand_out(request, chunk)
            if request.finished:
                return number + choice.finite
        return len(choices)

    def _hand_out(self, request: Request, chunk: Chunk) -> None:
        try:
            request.handle.push(chunk)
        except Exception as error:  # noqa: BLE001 (the caller's own callback)
            self._fail(request, error)
        else:
            if request.finished:
                self._forget(request)

    def _fail(self, request: Request, error: BaseException) -> None:
        request.completion.finish_reason = "error"
        self._forget(request)
        request.handle.fail(error)

    def _forget(self, request: Request) -> None:
        self.stats.requests += 1
        if request.drafter is not None:
            request.drafter.forget(request)

    def _leave(self, request: Request) -> None:
        """Take a request out of wherever it is."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._prefilling:
            self._prefilling.remove(request)
            request.row = None
        elif request in self._running.requests:
            self._retire(self._running.requests.index(request), request)

    def _retire(self, row: int, request: Request) -> None:
        """Free the row of a request, and keep what it holds for prompts that begin like it."""
        assert self._running.state is not None
        self._keep(request, self._running.state, row)
        self._running.release(row)

    def _keep(self, request: Request, state: cache.CacheState, row: int) -> None:
        """Keep a copy of a finished row, if it can be of use."""
        if request.completion.finish_reason == "error":
            return
        tokens = request.sequence[: request.cached]
        length = len(tokens)  # fewer than cached where a text ended among accepted guesses
        capacity = choose_capacity(self.plan, self.spec, request.cached)
        nbytes = cache.state_bytes(self.spec, 1, capacity)
        if not self._rewind.allows(request.written, length):
            return
        if not self._prefixes.takes(tokens, nbytes):
            return
        copied = resize(copy_row(state, row), capacity)
        if length < request.cached:
            copied = cache.trim(copied, request.cached - length)
        mx.eval(copied)
        self._prefixes.add(Prefix(tokens, copied, request.written))

    # --- reports ---------------------------------------------------------------------------------

    def _report(
        self, name: str, bucket: Bucket, requests: Sequence[Request], tokens: int, new: int,
        seconds: float,
    ) -> None:  # fmt: skip
        stats, slots = self.stats, sum(request.cached for request in requests)
        stats.steps += 1
        if name != "decode":
            stats.token_places += bucket.batch * bucket.tokens
            stats.token_real += tokens
        if name != "prefill":
            stats.row_places += bucket.batch
            stats.row_real += len(requests)
            stats.slot_places += bucket.batch * bucket.capacity
            stats.slot_real += slots
        if self._on_step is None:
            return
        report = StepReport(
            function=name, bucket=bucket, rows=len(requests), tokens=tokens, slots=slots,
            new_tokens=new, seconds=seconds, waiting=len(self._waiting),
            prefilling=len(self._prefilling), running=len(self._running.seated),
            traces=self.compiled.traces.total(), memory=mx.get_active_memory(),
            prefix_bytes=self._prefixes.nbytes,
        )  # fmt: skip
        try:
            self._on_step(report)
        except Exception:
            logging.getLogger("funcrt.engine").exception("on_step raised; it is not called again")
            self._on_step = None


def _take_row(request: Request) -> cache.CacheState:
    """The row of a request, which then belongs to the caller alone."""
    row, request.row = request.row, None
    assert row is not None
    return row


def _values(array: mx.array) -> list[Any]:
    values = array.tolist()
    assert isinstance(values, list)
    return values
