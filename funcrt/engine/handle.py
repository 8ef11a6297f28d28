"""What a caller holds of a request: its chunks and its end, for threads and for asyncio."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from funcrt.errors import EngineError

if TYPE_CHECKING:
    from funcrt.engine.request import Chunk, Completion

Listener = Callable[[], None]


class Handle:
    """A request under way: wait for it, follow it, or cancel it, from any thread or event loop.

    Iterating, plainly or with `async for`, gives every chunk from the first one, however late it
    begins; `await handle` gives the completion. An `await` that is cancelled (a timeout, a client
    that hung up) cancels the request.

    Args:
        cancel: called to cancel the request.
        is_owner: whether this is the thread that runs the model.
        on_chunk: called with every chunk by the thread that runs the model, so it must be quick;
            if it raises, the request ends with that error.
    """

    completion: Completion

    def __init__(
        self,
        cancel: Callable[[Handle], None],
        is_owner: Callable[[], bool],
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> None:
        self._cancel = cancel
        self._is_owner = is_owner
        self._on_chunk = on_chunk
        self._chunks: list[Chunk] = []
        self._error: BaseException | None = None
        self._ended = False
        self._over = threading.Event()  # apart: whoever waits for the end is not woken by chunks
        self._changed = threading.Condition(threading.Lock())
        self._readers = 0  # threads that wait for chunks
        self._listeners: tuple[Listener, ...] = ()

    def __repr__(self) -> str:
        state = self.completion.finish_reason or "running" if not self._error else "failed"
        return f"Handle({state}, {len(self.completion.tokens)} tokens)"

    def done(self) -> bool:
        """Whether the request has ended, however it did."""
        return self._ended

    def cancel(self) -> None:
        """Ask for it to end where it is; its finish_reason is then "cancelled"."""
        self._cancel(self)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end.

        Args:
            timeout: seconds, None for as long as it takes.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
            EngineError: called by the engine's own thread (in `on_chunk`), which would wait for
                itself.
            Exception: whatever `on_chunk` raised, or what went wrong in the engine.
        """
        self._check_thread()
        if not self._over.wait(timeout):
            raise TimeoutError(f"the request has not ended within {timeout} s; it goes on")
        return self._outcome()

    def __iter__(self) -> Iterator[Chunk]:
        position = 0
        while not self._is_over(position):
            self._check_thread()
            with self._changed:
                self._readers += 1
                try:
                    self._changed.wait_for(partial(self._has_news, position))
                finally:
                    self._readers -= 1
            chunks = self.since(position)
            position += len(chunks)
            yield from chunks

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._wait().__await__()

    async def _wait(self) -> Completion:
        import asyncio  # slow to import, and whoever comes here has it

        try:
            await self._until(self.done)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._outcome()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        position = 0
        while not self._is_over(position):
            await self._until(partial(self._has_news, position))
            chunks = self.since(position)
            position += len(chunks)
            for chunk in chunks:
                yield chunk

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait in this event loop; the condition is looked at whenever something changed."""
        import asyncio

        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def listener() -> None:
            loop.call_soon_threadsafe(changed.set)

        self.follow(listener)
        try:
            while not condition():
                await changed.wait()
                changed.clear()
        finally:
            with self._changed:
                self._listeners = tuple(other for other in self._listeners if other != listener)

    def _check_thread(self) -> None:
        if self._is_owner() and not self._ended:
            raise EngineError(
                "the engine's thread would wait for itself: in on_chunk and on_step, take what "
                "comes and do not wait for requests"
            )

    def follow(self, listener: Listener) -> None:
        """Have a function called, by the engine's thread, whenever something changed."""
        with self._changed:
            self._listeners = (*self._listeners, listener)

    def since(self, position: int) -> list[Chunk]:
        """The chunks from `position` on that are there. Raises what `result` raises, after them."""
        with self._changed:
            chunks = self._chunks[position:]
        if not chunks and self._ended:
            self._outcome()
        return chunks

    def _has_news(self, position: int) -> bool:
        return self._ended or len(self._chunks) > position

    def _is_over(self, position: int) -> bool:
        """Whether everything was handed out; an error is still to be raised."""
        return self._ended and self._error is None and position == len(self._chunks)

    def _outcome(self) -> Completion:
        if self._error is not None:
            raise self._error
        return self.completion

    # --- for the thread that runs the model -------------------------------------------------------

    def push(self, chunk: Chunk) -> None:
        """Hand out a chunk; its finish_reason ends the request. Raises what `on_chunk` raises."""
        if self._on_chunk is not None:
            self._on_chunk(chunk)
        self._notify(chunk, ended=bool(chunk.finish_reason))

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        self._error = error
        self._notify(None, ended=True)

    def _notify(self, chunk: Chunk | None, ended: bool) -> None:
        with self._changed:
            if chunk is not None:
                self._chunks.append(chunk)
            self._ended = self._ended or ended
            if self._readers:
                self._changed.notify_all()
            listeners = self._listeners
        if ended:
            self._over.set()
        for listener in listeners:
            try:
                listener()
            except Exception:  # noqa: BLE001 (a closed event loop: nobody waits there)
                continue
