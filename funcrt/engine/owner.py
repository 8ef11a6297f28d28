"""The thread that runs the model; everything else only leaves it messages."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from funcrt import streams
from funcrt.engine.handle import Handle
from funcrt.engine.request import Request
from funcrt.engine.scheduler import Scheduler
from funcrt.engine.stats import Stats
from funcrt.errors import EngineError

import mlx.core as mx

Message = Callable[[], None]


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
        self._requests: dict[Handle, Request] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def stats(self) -> Stats:
        """Counters as they are now."""
        return self._scheduler.stats - Stats()

    def add(self, request: Request) -> None:
        """Put a request in the queue. Raises EngineError after `close`."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed: make a new one")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="funcrt-engine", daemon=True)
                self._thread.start()
            self._mailbox.put(lambda: self._begin(request))

    def cancel(self, handle: Handle) -> None:
        """End a request where it is, soon."""
        self._mailbox.put(lambda: self._cancel(handle))

    def close(self) -> None:
        """Cancel everything and end the thread; waits for the step that is under way."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._mailbox.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        with streams.owner(self._device, self.runs_imported):
            while True:
                if not self._scheduler.busy:
                    self._requests.clear()
                    message = self._mailbox.get()
                else:
                    message = self._next()
                    if message is _NOTHING:
                        self._round()
                        continue
                if message is None:
                    break
                message()
                del message  # it holds a request
            for handle in list(self._requests):
                self._cancel(handle)

    def _next(self) -> Message | None:
        try:
            return self._mailbox.get_nowait()
        except queue.Empty:
            return _NOTHING

    def _round(self) -> None:
        turn = streams.turn() if self.runs_imported else contextlib.nullcontext()
        try:
            with turn:
                self._scheduler.round()
        except Exception as error:  # noqa: BLE001 (whoever waits has to know, and others may go on)
            self._scheduler.fail(error)

    def _begin(self, request: Request) -> None:
        self._requests[request.handle] = request
        self._scheduler.add(request)

    def _cancel(self, handle: Handle) -> None:
        request = self._requests.pop(handle, None)
        if request is not None:
            self._scheduler.cancel(request)


def _NOTHING() -> None:  # noqa: N802 (a value)
    """Stands for an empty mailbox."""
