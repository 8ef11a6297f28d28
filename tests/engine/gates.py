"""Engines that stand still until a test lets them go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from funcrt import Engine


class Gate:
    """A callback that stops the engine's thread, until the gate is opened.

    Args:
        after: calls that pass before that.
    """

    def __init__(self, after: int = 0) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._after = after

    def __call__(self, what: object) -> None:
        self._after -= 1
        if self._after < 0:
            self.reached.set()
            assert self._open.wait(60)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.set()


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def wait_for_mail(engine: Engine, count: int) -> None:
    """Until so many messages wait for an engine that stands still."""
    wait_until(lambda: engine._owner._mailbox.qsize() == count)
