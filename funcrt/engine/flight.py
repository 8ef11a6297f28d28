"""A decoding step that was begun and not read yet, so that the device never waits for the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from funcrt.buckets import Bucket
from funcrt.cache import CacheState
from funcrt.engine.request import Request
from funcrt.sampling import Sampled

import mlx.core as mx

Tops = Sequence[tuple[mx.array, mx.array]]


@dataclass
class Flight:
    """One step on its way.

    MLX decides when work is scheduled whether a buffer may be written in place: only if nothing
    that is still to run reads it. So a step is scheduled in two halves, each when the same half of
    the step before it is done; meanwhile the device is busy with the other half.

    Attributes:
        bucket: its shape.
        rows: the requests that it serves, by row.
        sampled: what it chooses.
        tops: likeliest tokens with their log-probabilities; empty if nobody wants them.
        middle: known when the first half is done.
        begun: how many arrays of the state are in the first half, once that is scheduled.
    """

    bucket: Bucket
    rows: Mapping[int, Request]
    sampled: Sampled
    tops: Tops
    middle: mx.array | None = None
    begun: int = 0

    def begin(self, state: CacheState, before: Flight | None) -> None:
        """Schedule the first half of the layers; `state` is what the step makes."""
        self.begun = len(state) // 2
        half = list(state.values())[: self.begun]
        if not half:
            return
        if before is not None and before.middle is not None:
            mx.eval(before.middle)
        # A value of its own: whoever held an array of the state would have it copied.
        self.middle = half[-1].reshape(-1)[:1] + 0
        mx.async_eval(half, self.middle)  # type: ignore[no-untyped-call]

    def finish(self, state: CacheState) -> None:
        """Schedule the rest.

        That alone: MLX holds what it is given until all of it is done, and the next step, whose
        first half comes before that, would copy what is held.
        """
        rest = list(state.values())[self.begun :]
        mx.async_eval(self.sampled, self.tops, rest)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until everything that is to be read of it is known."""
        mx.eval(self.sampled, self.tops)
