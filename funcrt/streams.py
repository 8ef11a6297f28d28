"""Which thread may run an imported graph, and when.

MLX's streams belong to threads. A traced function runs on the stream of the thread that calls it,
but an imported one always runs on the first stream that the process made for its device. So that
stream is reserved here as one that any thread may use, as soon as `funcrt` is imported; MLX then
leaves it to its users to take turns, which `turn` and `run` do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from funcrt.tracing import settle

import mlx.core as mx

_turn = threading.RLock()
_owners: set[int] = set()  # threads of engines that run imported graphs
_reserved: dict[mx.DeviceType, mx.Stream] = {}


def reserve() -> None:
    """Make the first stream of every device, unless this was done or MLX has been used before."""
    if _reserved:
        return
    kinds = [mx.DeviceType.cpu]
    if mx.is_available(mx.gpu):
        kinds.append(mx.DeviceType.gpu)
    for number, kind in enumerate(kinds):
        stream = mx.new_thread_unsafe_stream(kind)
        if repr(stream).endswith(f" {number})"):  # its number in the process; no property tells
            _reserved[kind] = stream


def is_reserved() -> bool:
    """Whether any thread may run imported graphs on the default device."""
    return mx.default_device().type in _reserved


@contextmanager
def turn() -> Iterator[None]:
    """Imported graphs are called and evaluated by this thread only, until the block ends."""
    with _turn:
        yield


def run(call: Callable[[], Sequence[mx.array]]) -> Sequence[mx.array]:
    """Call imported graphs.

    While engines run, what it returns is computed before it returns: later would be in somebody
    else's turn.
    """
    with _turn:
        results = call()
        if _owners - {threading.get_ident()}:
            settle(results)
    return results


def drop_errors(most: int) -> None:
    """Wait for what was begun, and forget at most so many errors of it on every stream.

    MLX would raise them when anything else is evaluated. It waits for ever if asked for an array
    that failed, so it is asked for the streams.
    """
    for stream in [*_reserved.values(), mx.default_stream(mx.default_device())]:
        for _ in range(most):
            with suppress(RuntimeError):
                mx.synchronize(stream)


@contextmanager
def importing() -> Iterator[None]:
    """Read graphs within the block: their constants are loaded later, by whoever runs them first.

    That happens on the CPU stream of the thread that read them, which must not be its own.
    """
    with _turn:
        before = mx.default_stream(mx.cpu)
        mx.set_default_stream(_reserved.get(mx.DeviceType.cpu, before))
        try:
            yield
        finally:
            mx.set_default_stream(before)


@contextmanager
def owner(device: mx.Device, runs_imported: bool) -> Iterator[None]:
    """Let this thread run models on `device`, for as long as the block lasts.

    With `runs_imported` its other work is on the same stream as imported graphs, which spares
    waiting of one stream for the other.
    """
    mx.set_default_device(device)
    if runs_imported and device.type in _reserved:
        mx.set_default_stream(_reserved[device.type])
    _owners.add(threading.get_ident())
    try:
        yield
    finally:
        _owners.discard(threading.get_ident())
        # What MLX keeps for this thread, compiled functions above all, it would let go of at the
        # thread's very end. That needs the interpreter, which may have ended by then.
        mx.clear_streams()
