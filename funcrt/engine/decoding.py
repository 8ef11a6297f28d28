"""One step of the running batch: a token for every row, or as many as guesses are right."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from funcrt.buckets import Bucket
from funcrt.cache import CacheState
from funcrt.compiled import Compiled
from funcrt.engine.calls import Call, find_tops, read_choices
from funcrt.engine.controls import Controls, is_greedy
from funcrt.engine.flight import Flight
from funcrt.engine.request import Request
from funcrt.engine.rows import Rows, pad
from funcrt.steps import STEPS

import mlx.core as mx

_LONGEST_PAUSE = 32
_LONGEST_SILENCE = 8

Guesses = dict[Request, list[int]]


class Decoding:
    """Decodes the running batch.

    Args:
        compiled: the step functions.
        running: the batch.
        ahead: begin each step before the one before it is read. Where the device is the host, that
            would only keep tokens from their readers: there the graph of each step is built
            meanwhile, and dropped if another one is needed.
    """

    def __init__(self, compiled: Compiled, running: Rows, ahead: bool) -> None:
        self._compiled = compiled
        self._running = running
        self._ahead = ahead
        self._controls = Controls(compiled.vocab_size)
        self._sizes = STEPS["verify"].choose_sizes(compiled.plan.tokens)
        self._flight: Flight | None = None
        self._built: tuple[Flight, CacheState] | None = None  # with the state that it will make
        self._marks: tuple[bool, ...] = ()
        self._active = mx.array(False)
        self._asked: WeakSet[Request] = WeakSet()  # for guesses, at the last question
        # While there are none: steps from one question to the next, and those that are left.
        self._silence = self._unasked = 0

    def decode(self) -> Call:
        """Read one step, in the smallest bucket that there is for the rows, and begin the next."""
        begin = time.perf_counter()
        flight, self._flight = self._flight, None
        if flight is None:
            guesses = self._ask()
            if guesses:
                self.drop_built()
                call = self._verify(guesses)
                call.seconds = time.perf_counter() - begin
                return call
            flight = self._launch_built() or self._launch(None)
            assert flight is not None
            self._schedule(flight, None)
        ahead = self._launch(flight) if self._ahead else None
        if not self._ahead:
            self._build_next(flight)
        if ahead is not None and self._unasked:
            self._let_pass(self._texts())
        self._schedule(ahead, flight)
        self._flight = ahead
        rows = {row: r for row, r in flight.rows.items() if not r.finished}
        call = Call("decode", flight.bucket, rows, len(rows))
        call.choices = read_choices(flight.sampled, flight.tops, rows)
        call.seconds = time.perf_counter() - begin
        return call

    def drop_built(self) -> None:
        """Let go of the step that was built, and so of the state that it would have replaced."""
        self._built = None

    def forget(self) -> None:
        """Let go of the requests of the last call, and of the step that was begun for them."""
        self.drop_built()
        self._controls.forget()
        if self._flight is not None:
            with contextlib.suppress(Exception):  # nobody needs it
                self._flight.wait()
            self._flight = None

    def _launch(self, before: Flight | None) -> Flight | None:
        """The next step; None if it cannot be known before the one `before` it is read."""
        running, rows = self._running, self._find_rows(before)
        if not rows:
            return None
        takers = set(rows.values())
        running.fit(*_needs(takers))  # only those: whoever is about to end leaves its row
        rows = {row: request for row, request in running.seated.items() if request in takers}
        return self._depart(*self._build(rows, before, running.take()))

    def _build_next(self, before: Flight) -> None:
        """Build the step after the one `before` it, if everybody stays in place for it."""
        running, rows = self._running, self._find_rows(before)
        if rows and rows == running.seated and not self._texts():
            assert running.state is not None
            self._built = self._build(rows, before, running.state)

    def _launch_built(self) -> Flight | None:
        """That step, unless the batch is another one by now."""
        running, built = self._running, self._built
        self._built = None
        if built is None or built[0].rows != running.seated:
            return None
        needs = _needs(running.seated.values())
        if not running.holds(*needs):
            return None
        running.fit(*needs)
        running.take()  # so that nothing but the step holds it
        return self._depart(*built)

    def _find_rows(self, before: Flight | None) -> dict[int, Request]:
        """Who gets a token in the next step; nobody if that needs more than is known."""
        flying = set() if before is None else set(before.rows.values())
        rows = {
            row: request
            for row, request in self._running.seated.items()
            if request.remaining > (request in flying)
        }
        return rows if before is None or (rows and self._can_follow(before, rows)) else {}

    def _build(
        self, rows: dict[int, Request], before: Flight | None, state: CacheState
    ) -> tuple[Flight, CacheState]:
        """A step, and the state that it makes of `state`."""
        running, settings = self._running, self._settings(rows)
        token, active = self._make_tokens(rows, before), self._mark(rows)
        if settings is None:
            sampled, state = self._compiled.decode_greedy(token, active, state)
        else:
            sampled, state = self._compiled.decode(token, active, settings, state)
        tops = find_tops(self._compiled, sampled, rows.values())
        bucket = Bucket(running.batch, 1, running.capacity)
        return Flight(bucket, rows, sampled, tops), state

    def _depart(self, flight: Flight, state: CacheState) -> Flight:
        """A step is on its way: its rows hold one token more."""
        self._running.state = state
        self._controls.advance(flight.sampled.history)
        for request in flight.rows.values():
            request.cached += 1
            request.written = max(request.written, request.cached)
        return flight

    def _schedule(self, flight: Flight | None, before: Flight | None) -> None:
        """Schedule a step behind the one before it, and wait for that one."""
        state = self._running.state
        if flight is not None:
            assert state is not None
            flight.begin(state, before)
        if before is not None:
            before.wait()
        if flight is not None:
            assert state is not None
            flight.finish(state)

    def _can_follow(self, before: Flight, rows: Mapping[int, Request]) -> bool:
        """Whether a step needs nothing of the one before it but its tokens, row by row."""
        running = self._running
        seats = before.rows.items()
        return (
            running.batch == before.bucket.batch
            and all(request.finished or running.requests[row] is request for row, request in seats)
            and running.holds(*_needs(rows.values()))
            and self._is_silent(self._texts())
            and not (self._samples(rows) and self._controls.lag(running.requests))
        )

    def _make_tokens(self, rows: Mapping[int, Request], before: Flight | None) -> mx.array:
        """Int32 `[B]`, the last token of each row."""
        known = {
            row: request.sequence[-1]
            for row, request in rows.items()
            if before is None or before.rows.get(row) is not request
        }
        if before is not None and not known:
            return before.sampled.tokens
        batch = self._running.batch
        told = mx.array([known.get(row, 0) for row in range(batch)], dtype=mx.int32)
        if before is None:
            return told
        return mx.where(
            mx.array([row in known for row in range(batch)]), told, before.sampled.tokens
        )

    def _mark(self, rows: Mapping[int, Request]) -> mx.array:
        """Bool `[B]`, which rows take part; the same array as long as they do."""
        marks = tuple(row in rows for row in range(self._running.batch))
        if marks != self._marks:
            self._marks, self._active = marks, mx.array(marks)
        return self._active

    def _verify(self, guesses: Guesses) -> Call:
        running, longest = self._running, max(map(len, guesses.values()))
        held = {r: 1 + len(guesses.get(r, ())) for r in running.seated.values()}
        running.fit(len(held), max(request.cached + count for request, count in held.items()))
        rows = running.seated
        width = min(size for size in self._sizes if size > longest)
        told = {row: [r.sequence[-1], *guesses.get(r, ())] for row, r in rows.items()}
        tokens, valid = pad(told, running.batch, width)
        settings, state = self._settings(rows), running.take()
        if settings is None:
            sampled, running.state = self._compiled.verify_greedy(tokens, valid, state)
        else:
            sampled, running.state = self._compiled.verify(tokens, valid, settings, state)
        del state
        self._controls.advance(sampled.history)
        tops = find_tops(self._compiled, sampled, rows.values())
        mx.eval(sampled, tops, running.state)
        bucket = Bucket(running.batch, width, running.capacity)
        call = Call(
            "verify", bucket, rows, sum(held.values()), guessed=sum(map(len, guesses.values()))
        )
        call.choices = read_choices(sampled, tops, rows)
        for request, choices in call.choices.items():
            request.written = max(request.written, request.cached + held[request])
            request.cached += len(choices)
            _learn(request, held[request] - 1, len(choices) - 1)
        return call

    def _samples(self, rows: Mapping[int, Request]) -> bool:
        return not is_greedy(list(rows.values()))

    def _settings(self, rows: Mapping[int, Request]) -> Any:
        """Settings arrays, or None where plain greedy decoding does."""
        if not self._samples(rows):
            self._controls.forget()
            return None
        return self._controls.of(self._running.requests)

    def _ask(self) -> Guesses:
        """Guesses. Where steps can begin ahead, nobody is asked for a while if nobody had any.

        To ask for guesses is to wait for the tokens that they follow.
        """
        texts = self._texts()
        if not texts:
            return {}
        if self._is_silent(texts):
            self._let_pass(texts)
            return {}
        if not self._knows(texts):
            self._silence = 0
        guesses = self._guess(texts)
        catch_up = any(text.drafter.catches_up for text in texts if text.drafter)
        longer = min(2 * self._silence + 1, _LONGEST_SILENCE)
        self._silence = 0 if guesses or catch_up or not self._ahead else longer
        self._unasked, self._asked = self._silence, WeakSet(texts)
        return guesses

    def _texts(self) -> list[Request]:
        """Those of the batch that guesses may be asked for."""
        return [request for request in self._running.seated.values() if request.drafter]

    def _is_silent(self, texts: Sequence[Request]) -> bool:
        """Whether nothing is asked before the next step: nobody is new."""
        return not texts or (self._unasked > 0 and self._knows(texts))

    def _knows(self, texts: Sequence[Request]) -> bool:
        return all(text in self._asked for text in texts)

    def _let_pass(self, texts: Iterable[Request]) -> None:
        """A step begins without a question."""
        self._unasked -= 1
        for text in texts:
            text.pause = max(0, text.pause - 1)

    def _guess(self, requests: Sequence[Request]) -> Guesses:
        """Guesses of every drafter for its texts; texts that are hard to guess are left alone."""
        wanted: dict[Any, dict[Request, int]] = {}
        for request in requests:
            if request.drafter is None:
                continue
            if request.pause:
                request.pause -= 1
                continue
            most = min(request.guesses, self._sizes[-1] - 1, request.remaining - 1)
            if most > 0:
                wanted.setdefault(request.drafter, {})[request] = most
        guesses: Guesses = {}
        for drafter, texts in wanted.items():
            try:
                guesses |= drafter.guess(texts)
            except Exception:
                # Texts do without guesses as well, only slower.
                import logging  # slow to import, and seldom needed

                logging.getLogger(__name__).exception("guessing failed; these texts go on without")
                drafter.reset()
                for request in texts:
                    request.leave_drafter()
        return guesses


def _needs(requests: Collection[Request]) -> tuple[int, int]:
    """Rows, and tokens in the longest of them with one more."""
    return len(requests), 1 + max(request.cached for request in requests)


def _learn(request: Request, guessed: int, accepted: int) -> None:
    """Guess more after success, less after failure, and pause after several."""
    if not guessed:
        return
    if accepted:
        request.misses = 0
        request.guesses = 2 * guessed + 1 if accepted == guessed else accepted + 1
    else:
        request.misses += 1
        request.guesses = max(1, guessed // 2)
        request.pause = min(2 ** (request.misses - 1) - 1, _LONGEST_PAUSE)
