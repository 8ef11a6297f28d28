"""Calls that were begun and are not read yet, so that the device never waits for the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcrt.buckets import Bucket
from funcrt.cache import CacheState
from funcrt.engine.request import Request
from funcrt.sampling import Sampled

import mlx.core as mx

Tops = Sequence[tuple[mx.array, mx.array]]
_PIECES = 8  # of a call of prompts


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
        begun: how many arrays of the state are scheduled already.
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
        self.middle = _mark(half)
        _schedule(half, self.middle)

    def finish(self, state: CacheState) -> None:
        """Schedule the rest.

        That alone: MLX holds what it is given until all of it is done, and the next step, whose
        first half comes before that, would copy what is held.
        """
        _schedule(self.sampled, self.tops, list(state.values())[self.begun :])

    def wait(self) -> None:
        """Until everything that is to be read of it is known."""
        mx.eval(self.sampled, self.tops)


def begin_pieces(state: CacheState) -> int:
    """Schedule all layers of a call of prompts, each piece when the last piece but one is done.

    MLX takes memory for what is scheduled and has it back when that is done. Scheduled at once, all
    layers would hold what is between them, which for a long call is more than the cache.

    Args:
        state: what the call makes.

    Returns:
        How many of its arrays are scheduled: the `begun` of a flight.
    """
    arrays = list(state.values())
    size = -(-len(arrays) // _PIECES)
    marks: list[mx.array] = []
    for first in range(0, len(arrays), size):
        piece = arrays[first : first + size]
        mx.eval(marks[-2:-1])
        marks.append(_mark(piece))
        _schedule(piece, marks[-1])
    return len(arrays)


def _mark(arrays: Sequence[mx.array]) -> mx.array:
    """Something that is known when they are: it waits for the last, and devices work in order.

    A value of its own: whoever held an array of the state would have it copied.
    """
    return arrays[-1].reshape(-1)[:1] + 0


def _schedule(*arrays: Any) -> None:
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
