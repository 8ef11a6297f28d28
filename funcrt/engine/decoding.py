"""One step of the running batch: a token for every row, or as many as guesses are right."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from funcrt.buckets import Bucket
from funcrt.compiled import Compiled
from funcrt.engine.calls import Call, read_choices
from funcrt.engine.controls import Controls, is_greedy
from funcrt.engine.request import Request
from funcrt.engine.rows import Rows, pad
from funcrt.sampling import Sampled
from funcrt.steps import STEPS

import mlx.core as mx

_LONGEST_PAUSE = 32

Guesses = dict[Request, list[int]]


class Decoding:
    """Decodes the running batch.

    Args:
        compiled: the step functions.
        running: the batch.
    """

    def __init__(self, compiled: Compiled, running: Rows) -> None:
        self._compiled = compiled
        self._running = running
        self._controls = Controls(compiled.vocab_size)
        self._sizes = STEPS["verify"].choose_sizes(compiled.plan.tokens)

    def decode(self) -> Call:
        """One call, in the smallest bucket that there is for the rows."""
        begin = time.perf_counter()
        running = self._running
        guesses = self._guess(list(running.seated.values()))
        held = {r: 1 + len(guesses.get(r, ())) for r in running.seated.values()}
        running.fit(len(held), max(request.cached + count for request, count in held.items()))
        rows = running.seated
        sampled, width = self._verify(rows, guesses) if guesses else self._decode(rows)
        self._controls.advance(sampled.history)
        name = "verify" if guesses else "decode"
        bucket = Bucket(running.batch, width, running.capacity)
        call = Call(name, bucket, rows, sum(held.values()), guessed=sum(map(len, guesses.values())))
        assert running.state is not None
        call.choices = read_choices(self._compiled, sampled, rows, running.state)
        for request, choices in call.choices.items():
            request.written = max(request.written, request.cached + held[request])
            request.cached += len(choices)
            _learn(request, held[request] - 1, len(choices) - 1)
        call.seconds = time.perf_counter() - begin
        return call

    def forget(self) -> None:
        """Let go of the requests of the last call."""
        self._controls.forget()

    def _decode(self, rows: Mapping[int, Request]) -> tuple[Sampled, int]:
        running = self._running
        last = [request.sequence[-1] if request else 0 for request in running.requests]
        token = mx.array(last, dtype=mx.int32)
        active = mx.array([request is not None for request in running.requests])
        settings, state = self._settings(rows), running.take()
        if settings is None:
            sampled, running.state = self._compiled.decode_greedy(token, active, state)
        else:
            sampled, running.state = self._compiled.decode(token, active, settings, state)
        return sampled, 1

    def _verify(self, rows: Mapping[int, Request], guesses: Guesses) -> tuple[Sampled, int]:
        running, longest = self._running, max(map(len, guesses.values()))
        width = min(size for size in self._sizes if size > longest)
        told = {row: [r.sequence[-1], *guesses.get(r, ())] for row, r in rows.items()}
        tokens, valid = pad(told, running.batch, width)
        settings, state = self._settings(rows), running.take()
        if settings is None:
            sampled, running.state = self._compiled.verify_greedy(tokens, valid, state)
        else:
            sampled, running.state = self._compiled.verify(tokens, valid, settings, state)
        return sampled, width

    def _settings(self, rows: Mapping[int, Request]) -> Any:
        """Settings arrays, or None where plain greedy decoding does."""
        if is_greedy(list(rows.values())):
            self._controls.forget()
            return None
        return self._controls.of(self._running.requests)

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
                logging.getLogger(__name__).exception("guessing failed; these texts go on without")
                drafter.reset()
                for request in texts:
                    request.leave_drafter()
        return guesses


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
