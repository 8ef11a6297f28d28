"""Sampling settings of a batch as arrays, kept while the same requests sit in the same rows."""

from __future__ import annotations

from collections.abc import Sequence

from funcrt import settings
from funcrt.engine.request import Request

import mlx.core as mx


class Controls:
    """Settings arrays of the rows of one batch.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._requests: list[Request | None] = []
        self._settings: settings.Settings = {}

    def of(self, requests: Sequence[Request | None]) -> settings.Settings:
        """The arrays for these rows; made anew when the rows have changed."""
        if list(requests) != self._requests:
            self._requests = list(requests)
            self._settings = make(requests, self._vocab_size)
        return self._settings

    def lag(self, requests: Sequence[Request | None]) -> bool:
        """Whether the arrays for these rows have to be made, of tokens that all must be known."""
        return list(requests) != self._requests and any(map(_counts, requests))

    def forget(self) -> None:
        """Make the arrays anew next time."""
        self._requests = []

    def advance(self, history: mx.array | None) -> None:
        """Take over the history that a step returned."""
        if history is not None and any(map(_counts, self._requests)):
            self._settings = {**self._settings, "history": history}


def make(requests: Sequence[Request | None], vocab_size: int) -> settings.Settings:
    """Settings arrays for the rows; None stands for an idle one."""
    idle = settings.check_settings(vocab_size)
    rows = [idle if request is None else request.settings for request in requests]
    histories = [
        settings.History(request.prompt, request.completion.tokens)
        if request is not None and _counts(request)
        else None
        for request in requests
    ]
    return settings.stack_settings(rows, vocab_size, histories)


def is_greedy(requests: Sequence[Request]) -> bool:
    """Whether plain greedy decoding, which is cheaper, does for all of them."""
    return all(settings.is_plain_greedy(request.settings) for request in requests)


def _counts(request: Request | None) -> bool:
    return request is not None and settings.uses_history(request.settings)
