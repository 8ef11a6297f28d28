"""Which arrays a module's caches need, found by one call that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from converters.functional.caches import Call, Entries, Several, Slots
from converters.functional.head import Head, Watch
from converters.functional.pure import pure
from funcrt.cache import CacheEntry, CacheSpec, place
from funcrt.errors import ModuleError

import mlx.core as mx
from mlx.nn.layers.base import Module

_BATCH, _TOKENS, _CAPACITY = 3, 11, 29  # sizes that no model has by chance
_DTYPES = {
    mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16", mx.int32: "int32",
    mx.uint32: "uint32", mx.int64: "int32",  # token ids
}  # fmt: skip

_KINDS = (
    "KVCache", "RotatingKVCache", "ChunkedKVCache", "ConcatenateKVCache", "ArraysCache",
    "CacheList",
)  # fmt: skip
# What every class has of its own, and what makes a cache: stand-ins are made in another way.
_HARMLESS = {"__init__", "__annotations__", *vars(type("Empty", (), {}))}

MakeCaches = Callable[[Call], list[Any]]


class Layout(NamedTuple):
    """What a module keeps, and what it returns.

    Attributes:
        entries: the arrays, `lengths` first.
        vocab_size: V of the logits.
        dtype: of the logits.
        recurrent: whether anything is kept that is replaced at every call.
        head: the last projection, where it gives the logits as they are.
    """

    entries: CacheSpec
    vocab_size: int
    dtype: str
    recurrent: bool
    head: Head | None


def make_stand_ins(caches: Sequence[Any]) -> MakeCaches:
    """What makes stand-ins for `caches` (mlx-lm's own objects) at every call.

    Raises ModuleError for a class of cache that is not known.
    """
    makers = [_maker(cache, f"layers.{i}") for i, cache in enumerate(caches)]
    return lambda call: [maker(call) for maker in makers]


def _maker(cache: Any, name: str) -> Callable[[Call], Any]:
    kind = type(cache)
    known = _known_kind(kind)
    if known == "RotatingKVCache":
        if cache.keep:
            raise ModuleError(
                f"{name}: a rotating cache that keeps its first {cache.keep} tokens is not "
                "supported; make it without `keep`"
            )
        return lambda call: Slots(kind, call, name, cache.max_size)
    if known in ("KVCache", "ConcatenateKVCache", "ChunkedKVCache"):
        return lambda call: Slots(kind, call, name)
    if known == "ArraysCache":
        return lambda call: Entries(kind, call, name, len(cache.cache))
    if known == "CacheList":
        parts = [_maker(part, f"{name}.{i}") for i, part in enumerate(cache.caches)]
        return lambda call: Several(kind, *(part(call) for part in parts))
    raise ModuleError(
        f"{name}: its cache is a {kind.__module__}.{kind.__name__}, which is not one of mlx-lm's "
        "cache classes, or replaces methods of one: give it a KVCache, RotatingKVCache, "
        "ChunkedKVCache, ArraysCache or a CacheList of them in make_cache()"
    )


def _known_kind(kind: type) -> str | None:
    """mlx-lm's name for what a cache does; None if a class of its own does it differently."""
    own: set[str] = set()
    for base in kind.__mro__:
        if base.__module__ == "mlx_lm.models.cache" and base.__name__ in _KINDS:
            replaced = {name for name in own if hasattr(base, name)} - _HARMLESS
            return None if replaced else base.__name__
        own |= vars(base).keys()
    return None


class _Recording(Call):
    """Notes what a module keeps."""

    def __init__(self, tokens: int, known: dict[str, CacheEntry]) -> None:
        mask = mx.zeros((_BATCH, 1, tokens, _CAPACITY), mx.bool_)
        super().__init__(place(mask, mx.zeros((_BATCH,), mx.int32)), {})
        self.entries: dict[str, CacheEntry] = {}
        self._known = known

    def read(self, name: str) -> mx.array | None:
        if name in self.new or name not in self._known:
            return self.new.get(name)
        entry = self._known[name]
        return mx.zeros(entry.sizes(_BATCH, _CAPACITY), getattr(mx, entry.dtype))

    def fill(self, name: str, values: mx.array) -> mx.array:
        batch, heads, tokens, width = values.shape
        if (batch, tokens) != (_BATCH, self.tokens):
            raise ModuleError(
                f"{name}: a call of {self.tokens} tokens writes {tokens} slots in {batch} of "
                f"{_BATCH} rows; only one slot per token is supported"
            )
        if width:
            self._note(name, ("B", heads, "S", width), values)
        self.new[name] = mx.zeros((batch, heads, _CAPACITY, width), values.dtype)
        return self.new[name]

    def replace(self, name: str, value: mx.array) -> None:
        if value.shape[:1] != (_BATCH,):
            raise ModuleError(
                f"{name}: expected an array [B, ...], got {list(value.shape)} for B={_BATCH}"
            )
        self._note(name, ("B", *value.shape[1:]), value)
        self.new[name] = value

    def _note(self, name: str, shape: tuple[int | str, ...], array: mx.array) -> None:
        if array.dtype not in _DTYPES:
            raise ModuleError(f"{name}: a cache of {array.dtype} is not supported")
        self.entries[name] = CacheEntry(name, shape, _DTYPES[array.dtype])


def record(module: Module, make_caches: MakeCaches) -> Layout:
    """Find the layout by calling `module`; nothing is computed.

    Raises ModuleError for a module that keeps what has no fixed shape, or returns no logits.
    """
    known: dict[str, CacheEntry] = {}
    heads: list[Head | None] = []
    for tokens in (_TOKENS, _TOKENS, 1):  # from nothing, from something, one token
        call = _Recording(tokens, known)
        watch = Watch()
        with pure(call), watch.watching():
            logits = module(mx.zeros((_BATCH, tokens), mx.int32), cache=make_caches(call))
        if not isinstance(logits, mx.array) or logits.shape[:2] != (_BATCH, tokens):
            what = getattr(logits, "shape", type(logits).__name__)
            raise ModuleError(f"expected logits [B, T, V] of a module, got {what}")
        heads.append(watch.head_of(logits))
        for name, entry in call.entries.items():
            if known.setdefault(name, entry) != entry:
                raise ModuleError(
                    f"{name}: {list(known[name].shape)} {known[name].dtype} in one call and "
                    f"{list(entry.shape)} {entry.dtype} in another; it needs one fixed shape"
                )
    head, *others = heads
    entries = [CacheEntry("lengths", ("B",), "int32"), *known.values()]
    if not any("S" in entry.shape for entry in entries):
        # Nothing has slots. With one small array that does, capacities mean the same everywhere.
        entries.insert(1, CacheEntry("positions", ("B", "S"), "int32"))
    return Layout(
        tuple(entries),
        logits.shape[2],
        _DTYPES[logits.dtype],
        any(entry.kind == "recurrent" for entry in known.values()),
        head if head is not None and all(map(head.is_same, others)) else None,
    )
