"""The thread that runs the model; everything else only leaves it messages."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from funcrt import streams
from funcrt.engine.handle import Handle
from funcrt.engine.request import Request
from funcrt.engine.scheduler import Scheduler
from funcrt.engine.stats import Stats
from funcrt.errors import EngineError

import mlx.core as mx

Message = Callable[[], None]

_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Wait for every thread: none may be inside MLX when the interpreter ends."""
    for owner in list(_owners):
        owner.close()


class Owner:
    """Runs a scheduler in a thread that begins with the first request.

    Args:
        scheduler: touched by the thread only.
        runs_imported: its graphs are imported ones, which take turns, see `funcrt.streams`.

    Attributes:
        runs_imported: may become true later, with a draft model.
    """

    def __init__(self, scheduler: Scheduler, runs_imported: bool) -> None:
        self._scheduler = scheduler
        self.runs_imported = runs_imported
        self._device = mx.default_device()
        self._mailbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._process = os.getpid()
        _owners.add(self)

    @property
    def stats(self) -> Stats:
        """Counters as they are now."""
        return self._scheduler.stats - Stats()

    @property
    def is_current(self) -> bool:
        """Whether this is the thread that runs the model."""
        return threading.current_thread() is self._thread

    def add(self, request: Request) -> None:
        """Put a request in the queue. Raises EngineError after `close`, and in a forked process."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed: make a new one")
            if os.getpid() != self._process:
                raise EngineError(
                    "an engine's thread does not live on after a fork: make a new one"
                )
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="funcrt-engine", daemon=True)
                thread.start()
                self._thread = thread
            self._mailbox.put(partial(self._scheduler.add, request))

    def cancel(self, handle: Handle) -> None:
        """End a request where it is, soon."""
        self._mailbox.put(partial(self._scheduler.cancel, handle))

    def close(self) -> None:
        """Cancel everything and end the thread; waits for the step that is under way."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None and os.getpid() == self._process:
            self._mailbox.put(None)
            if not self.is_current:
                thread.join()

    def _run(self) -> None:
        with streams.owner(self._device, self.runs_imported):
            while True:
                if self._scheduler.busy and self._mailbox.empty():
                    self._do(self._scheduler.feed)
                    self._do(self._scheduler.step)
                    continue
                message = self._mailbox.get()
                if message is None:
                    break
                self._do(message)
                del message  # it may hold a request
            for handle in self._scheduler.handles:
                self._do(partial(self._scheduler.cancel, handle))
            self._do(self._scheduler.end)

    def _do(self, work: Message) -> None:
        turn = streams.turn() if self.runs_imported else nullcontext()
        try:
            with turn:
                work()
        except BaseException as error:  # noqa: BLE001 (whoever waits has to know it)
            self._scheduler.fail(error)
        # Not in the turn: callers' functions may wait for somebody who needs it.
        self._scheduler.deliver()
