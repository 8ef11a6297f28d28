"""One call of the model: which requests it served, what it cost, and what every one of them got."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from funcrt.buckets import Bucket
from funcrt.compiled import Compiled
from funcrt.engine.flight import Tops
from funcrt.engine.request import Choice, Request
from funcrt.sampling import Sampled

import mlx.core as mx


@dataclass
class Call:
    """What the host has to know of a call.

    Attributes:
        function: "prefill", "decode" or "verify".
        bucket: its shape.
        rows: the requests that it served, by row.
        tokens: real ones among B x T.
        seconds: wall time.
        choices: the new tokens of each request that got any.
        guessed: how many of its tokens were guesses.
        reused: prompt tokens that were forked instead of computed.
    """

    function: str
    bucket: Bucket
    rows: dict[int, Request]
    tokens: int
    seconds: float = 0.0
    choices: dict[Request, list[Choice]] = field(default_factory=dict)
    guessed: int = 0
    reused: int = 0

    @property
    def accepted(self) -> int:
        """How many guesses were right."""
        return sum(len(chosen) - 1 for chosen in self.choices.values())


def find_tops(compiled: Compiled, sampled: Sampled, rows: Iterable[Request]) -> Tops:
    """The likeliest tokens at each place of a call, if any of the rows wants them."""
    if not any(request.top for request in rows):
        return []
    assert sampled.logits is not None
    places = [sampled.logits] if sampled.accepted is None else _split(sampled.logits)
    return [compiled.top(logits) for logits in places]


def read_choices(
    sampled: Sampled, tops: Tops, rows: Mapping[int, Request]
) -> dict[Request, list[Choice]]:
    """What each of the rows got. Waits for the device unless all of it is known."""
    mx.eval(sampled, tops)
    # Not `finite`: the logprob says it, too, and each array that is read is a copy from a GPU.
    tokens, logprobs = _values(sampled.tokens), _values(sampled.logprobs)
    if sampled.accepted is None:  # one token per row: [B] as [B, 1]
        tokens, logprobs = [[x] for x in tokens], [[x] for x in logprobs]
    more = [0] * len(tokens) if sampled.accepted is None else _values(sampled.accepted)
    likely = [(_values(ids), _values(values)) for ids, values in tops]
    choices: dict[Request, list[Choice]] = {}
    for row, request in rows.items():
        choices[request] = []
        for place in range(more[row] + 1):
            pairs: tuple[tuple[int, float], ...] = ()
            if request.top:
                ids, values = likely[place]
                pairs = tuple(zip(ids[row], values[row], strict=True))[: request.top]
            choices[request].append(Choice(tokens[row][place], logprobs[row][place], pairs))
    return choices


def _split(logits: mx.array) -> list[mx.array]:
    """`[B, T, V]` by places."""
    return [logits[:, place] for place in range(logits.shape[1])]


def _values(array: mx.array) -> list[Any]:
    values = array.tolist()
    assert isinstance(values, list)
    return values
