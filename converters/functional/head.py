"""The last projection of a module, so that prompts need it for one token only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

_METHODS = (
    (Linear, "__call__"), (QuantizedLinear, "__call__"),
    (Embedding, "as_linear"), (QuantizedEmbedding, "as_linear"),
)  # fmt: skip
_LOCK = threading.RLock()


class Head(NamedTuple):
    """A layer whose output is the logits, as they are.

    Attributes:
        layer: part of the module.
        method: `__call__`, or `as_linear` of a tied embedding.
    """

    layer: Any
    method: str

    def __call__(self, x: mx.array) -> mx.array:
        """Logits `[..., V]` of `x [..., E]`."""
        logits: mx.array = getattr(self.layer, self.method)(x)
        return logits

    def is_same(self, other: Head | None) -> bool:
        """Whether it is the same layer, used in the same way."""
        return other is not None and self.layer is other.layer and self.method == other.method


class Watch:
    """The last projection of a call, as it was used last.

    Attributes:
        x: its input.
    """

    def __init__(self) -> None:
        self.x: mx.array | None = None
        self._last: tuple[Head, mx.array] | None = None

    def head_of(self, logits: mx.array) -> Head | None:
        """The layer that gave `logits`; None if anything was done to them after it."""
        if self._last is None or self._last[1] is not logits:
            return None
        return self._last[0]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, projections of this thread are noted."""

        def note(original: Any, method: str, layer: Any, x: mx.array) -> mx.array:
            logits: mx.array = original(layer, x)
            self.x, self._last = x, (Head(layer, method), logits)
            return logits

        with _intercepted(note):
            yield


@contextmanager
def _intercepted(function: Any) -> Iterator[None]:
    """Calls of projections in this thread go through `function(original, method, layer, x)`.

    Not those of classes that only build on a projection: more may be done in them.
    """
    thread = threading.get_ident()

    def make(original: Any, method: str) -> Any:
        def call(layer: Any, x: mx.array) -> Any:
            if threading.get_ident() != thread or getattr(type(layer), method) is not call:
                return original(layer, x)
            return function(original, method, layer, x)

        return call

    with _LOCK:
        originals = [(kind, method, kind.__dict__[method]) for kind, method in _METHODS]
        for kind, method, original in originals:
            setattr(kind, method, make(original, method))
        try:
            yield
        finally:
            for kind, method, original in originals:
                setattr(kind, method, original)
