"""The float32 reference of golden calls: unfused weights, eager, uncached, one row at a time.

It shares nothing with what is exported but the model's code. Rows of several buckets that hold the
same tokens share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from funcrt.bundle.golden.calls import LIKELIEST, Call, Case, Row, Step
from funcrt.low_rank import take_last
from funcrt.model import Model
from funcrt.steps import STEPS

import mlx.core as mx

_TOP, _PROBES = 5, 8  # of each token's probes, these are the most likely ids; the others are random

Stream = tuple[Step, ...]


@dataclass
class Reference:
    """Results of one row; lists have one entry per token.

    Attributes:
        tokens: the most likely next token.
        gaps: by how much its logit exceeds the second largest.
        peaks: largest |logit|, past ids that never come (-inf).
        probes: ids whose logits are recorded, the most likely first.
        values: the logits of `probes`.
        logits: whole rows `[V]`, for the tokens that need them.
    """

    tokens: list[int]
    gaps: list[float]
    peaks: list[float]
    probes: list[list[int]]
    values: list[list[float]]
    logits: dict[int, mx.array]


class References:
    """The references of every row that a layout compares."""

    def __init__(self, cases: Iterable[Case]) -> None:
        spots = [
            (call.function, spot) for case in cases for call in case.calls for spot in call.spots
        ]
        rows = {id(spot.row): tuple(spot.row.steps) for _, spot in spots}
        streams = sorted(set(rows.values()), key=len, reverse=True)
        # A row that begins like a longer one is part of it.
        self._streams = {
            row: next(s for s in streams if s[: len(steps)] == steps) for row, steps in rows.items()
        }
        self._needed: dict[Stream, set[int]] = {s: set() for s in self._streams.values()}
        for function, spot in spots:
            if "tokens" in STEPS[function].outputs:
                self._needed[self._streams[id(spot.row)]].add(spot.index)
        self._done: dict[Stream, Reference] = {}
        self._filled: dict[Stream, Stream] = {}

    @property
    def count(self) -> int:
        """Rows that `run` has to compute."""
        return len(self._needed)

    def run(self, model: Model, tick: Callable[[str], None]) -> None:
        """Compute them all; `tick` is called after each."""
        for number, (stream, needed) in enumerate(self._needed.items()):
            exact = model.in_float32()  # two copies of the weights are never held at once
            self._filled[stream] = filled = _fill(exact, stream)
            self._done[stream] = _run(exact, filled, needed, Random(number))
            tick("float32 reference")

    def of(self, row: Row) -> Reference:
        """The reference of a row, once `run` is done."""
        return self._done[self._streams[id(row)]]

    def fill(self, call: Call) -> list[list[int]]:
        """The ids of a call, `LIKELIEST` replaced by what the reference found."""
        ids = [list(row) for row in call.ids]
        for spot in call.spots:
            batch_row, place = divmod(spot.output, call.tokens)
            if ids[batch_row][place] == LIKELIEST:
                filled = self._filled[self._streams[id(spot.row)]]
                ids[batch_row][place] = filled[spot.index].token
        return ids


def _fill(model: Model, stream: Stream) -> Stream:
    """The stream with every `LIKELIEST` replaced, one after the other."""
    steps = list(stream)
    for index, step in enumerate(steps):
        if step.token == LIKELIEST:
            likeliest = mx.argmax(_compute_logits(model, steps[:index]), axis=-1)
            steps[index] = step._replace(token=_list(likeliest)[-1])
    return tuple(steps)


def _compute_logits(model: Model, steps: Sequence[Step]) -> mx.array:
    """Logits `[T, V]` of one row."""
    length = len(steps)
    ids = mx.array([[step.token for step in steps]])
    hidden = mx.array([[step.hidden] for step in steps])
    slots = mx.arange(length + 1)
    mask = (slots <= slots[:length, None]) & (slots != hidden)  # [T,S]
    cache_state = take_last(model.init_cache(1, length + 1))
    return model.forward(model.params, ids, mask[None, None], cache_state).logits[0]


def _run(model: Model, stream: Stream, needed: set[int], random: Random) -> Reference:
    length, vocab = len(stream), model.vocab_size
    logits = _compute_logits(model, stream)
    top = min(_TOP, vocab)
    best = mx.argpartition(-logits, min(top, vocab - 1), axis=-1)[:, :top]
    order = mx.argsort(-mx.take_along_axis(logits, best, axis=-1), axis=-1)
    best = mx.take_along_axis(best, order, axis=-1).astype(mx.int32)
    others = [[random.randrange(vocab) for _ in range(_PROBES - top)] for _ in range(length)]
    probes = mx.concatenate([best, mx.array(others, dtype=mx.int32)], axis=-1)
    values = mx.take_along_axis(logits, probes, axis=-1)
    rows = {index: logits[index] + 0 for index in needed}  # copies: views would keep all of it
    mx.eval(rows)
    return Reference(
        tokens=_list(mx.argmax(logits, axis=-1)),
        gaps=_list(values[:, 0] - values[:, min(1, top - 1)]),
        peaks=_list(mx.max(mx.where(logits == -mx.inf, 0, mx.abs(logits)), axis=-1)),
        probes=_list(probes),
        values=_list(values),
        logits=rows,
    )


def _list(array: mx.array) -> Any:
    return array.tolist()
