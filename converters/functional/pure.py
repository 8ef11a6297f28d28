"""Replacing what does not trace or export by what does, for as long as a module is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from converters.functional.adapters import globals_of_modules, replacements
from converters.functional.caches import Call
from converters.functional.offsets import Offset

import mlx.core as mx

_LOCK = threading.RLock()
_ACTIVE = threading.local()  # other threads keep the originals


@contextmanager
def pure(call: Call) -> Iterator[None]:
    """Within it, this thread's calls of MLX functions that have a pure equivalent use that.

    | function | instead |
    |---|---|
    | `contiguous`, `depends` | the array itself: only its layout or its timing would differ |
    | `~x` of integers | `x ^ -1` |
    | `eval`, `async_eval`, `synchronize` | nothing |
    | `where` of scores by groups | with the mask for every group |
    | `arange` between offsets | the same for every row, `[B, N, 1]` |
    | attention | never sees more than the caller's mask shows |
    | Metal kernels | what mlx-lm computes where there is no Metal, unless the device is one |
    """
    with _LOCK:
        outer = getattr(_ACTIVE, "call", None)
        _ACTIVE.call = call
        patches = [*_PATCHES, *((o, n, _instead(new)) for o, n, new in replacements(call))]
        patches += [(o, n, _by_thread(new)) for o, n, new in globals_of_modules(call)]
        saved = []
        for owner, name, make in patches:
            original = getattr(owner, name)
            saved.append((owner, name, original))
            setattr(owner, name, make(original))
        try:
            yield
        finally:
            _ACTIVE.call = outer
            for owner, name, original in reversed(saved):
                setattr(owner, name, original)


def _active() -> Call | None:
    return getattr(_ACTIVE, "call", None)


_Make = Callable[[Any], Any]


def _instead(replacement: Callable[..., Any]) -> _Make:
    """A patch that takes effect in the thread that asked for it."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def patched(*args: Any, **options: Any) -> Any:
            chosen = original if _active() is None else replacement
            return chosen(*args, **options)

        return patched

    return make


class _ByThread:
    """Attributes of one thing in the threads that asked for it, of another in all others."""

    def __init__(self, original: Any, replacement: Any) -> None:
        self._original = original
        self._replacement = replacement

    def __getattr__(self, name: str) -> Any:
        chosen = self._original
        if _active() is not None and hasattr(self._replacement, name):
            chosen = self._replacement
        return getattr(chosen, name)


def _by_thread(replacement: Any) -> _Make:
    if isinstance(replacement, type) or not callable(replacement):
        return lambda original: _ByThread(original, replacement)
    return _instead(replacement)


def _same(array: mx.array, *_: Any, **__: Any) -> mx.array:
    return array


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _make_invert(original: Callable[..., Any]) -> Callable[..., Any]:
    def invert(x: mx.array, *args: Any, **options: Any) -> Any:
        if _active() is None or x.dtype == mx.bool_:
            return original(x, *args, **options)
        ones = mx.array(
            -1 if mx.issubdtype(x.dtype, mx.signedinteger) else _largest(x.dtype), x.dtype
        )
        return mx.bitwise_xor(x, ones)

    return invert


def _largest(dtype: mx.Dtype) -> int:
    return int((1 << 8 * dtype.size) - 1)


def _make_arange(original: Callable[..., Any]) -> Callable[..., Any]:
    def arange(*args: Any, **options: Any) -> Any:
        call = _active()
        if call is None or not args:
            return original(*args, **options)
        start, stop = (0, args[0]) if len(args) == 1 else args[:2]
        if isinstance(start, int) and isinstance(stop, Offset):
            return original(start, call.capacity, dtype=mx.int32)  # every slot
        if isinstance(start, Offset) and isinstance(stop, Offset):
            steps = original(stop.distance - start.distance, dtype=mx.int32)
            return (start[:, None] + steps)[..., None]
        return original(*args, **options)

    return arange


def _make_where(original: Callable[..., Any]) -> Callable[..., Any]:
    def where(condition: Any, x: Any, *args: Any, **options: Any) -> Any:
        call = _active()
        if (
            call is not None
            and getattr(x, "ndim", 0) == 5
            and any(condition is m for m in call.made)
        ):
            condition = condition[:, :, None]  # query heads by the key head that they share
        return original(condition, x, *args, **options)

    return where


def _make_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(q: mx.array, k: mx.array, v: mx.array, *args: Any, **options: Any) -> Any:
        call = _active()
        if call is not None and (q.shape[2], k.shape[2]) == (call.tokens, call.capacity):
            options["mask"] = call.widest(options.get("mask"))
        return original(q, k, v, *args, **options)

    return attention


def _make_is_available(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_available() -> bool:
        here = _active() is None or mx.default_device() == mx.gpu
        return here and bool(original())

    return is_available


_PATCHES: list[tuple[Any, str, _Make]] = [
    (mx, "contiguous", _instead(_same)),
    (mx, "depends", _instead(_same)),
    (mx, "eval", _instead(_nothing)),
    (mx, "async_eval", _instead(_nothing)),
    (mx, "synchronize", _instead(_nothing)),
    (mx, "bitwise_invert", _make_invert),
    (mx, "arange", _make_arange),
    (mx, "where", _make_where),
    (mx.fast, "scaled_dot_product_attention", _make_attention),
    (mx.metal, "is_available", _make_is_available),
    (mx.array, "__invert__", _make_invert),
]
