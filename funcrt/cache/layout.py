"""Which arrays a cache state has, for every kind of cache.

Kinds, told apart by the last part of an array's name:

| kind | names | axes |
|---|---|---|
| row | `lengths`; where there are rings `written`, `slack`; `adapter` where rows choose | `[B]` |
| positions | `positions`, where there are windows | `[B, S]` |
| full | `keys`, `values` | `[B, K, S, D]` |
| quantized | the same, packed in uint32, with `keys.scales`, `keys.biases` ... | `[B, K, S, ..]` |
| latent | `latent`, `latent_rope` | `[B, 1, S, ..]` |
| ring | `ring_keys`, `ring_values` | `[B, K, R + 1, D]` |
| recurrent | anything else | `[B, ...]` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from funcrt.errors import CacheError
from funcrt.params import FLOATS

import mlx.core as mx

CacheState = dict[str, mx.array]

DTYPES = {**FLOATS, "int32": mx.int32, "uint32": mx.uint32}
PARTS = ("keys", "values")

_KINDS = {
    "lengths": "row",
    "written": "row",
    "slack": "row",
    "adapter": "row",
    "positions": "positions",
    "keys": "full",
    "values": "full",
    "latent": "latent",
    "latent_rope": "latent",
    "ring_keys": "ring",
    "ring_values": "ring",
    "scales": "quantized",
    "biases": "quantized",
}
_SLOT_AXIS = {"positions": 1, "full": 2, "quantized": 2, "latent": 2}


class CacheEntry(NamedTuple):
    """One array of a cache state. In `shape`, "B" and "S" stand for batch and capacity.

    An empty state holds `fill` everywhere.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    fill: int = 0

    @property
    def kind(self) -> str:
        """The kind of cache that it belongs to."""
        return "quantized" if self.dtype == "uint32" else kind_of(self.name)

    def sizes(self, batch: int, capacity: int) -> tuple[int, ...]:
        """The array's shape for B rows and S slots."""
        known = {"B": batch, "S": capacity}
        return tuple(known[axis] if isinstance(axis, str) else axis for axis in self.shape)


CacheSpec = tuple[CacheEntry, ...]


class CacheLayout(NamedTuple):
    """Choices that a model leaves open: how its layers keep what they keep.

    Attributes:
        kv_bits: pack keys and values in 8 or 4 bits (layers with full caches); None keeps them.
        max_tokens: layers with a window keep a ring for calls of at most this many tokens; None
            keeps full caches.
    """

    kv_bits: int | None = None
    max_tokens: int | None = None


FULL = CacheLayout()


def check_layout(layout: CacheLayout) -> None:
    """Raise CacheError unless a layout's numbers are possible."""
    if layout.kv_bits not in (None, 4, 8):
        raise CacheError(f"kv_bits: expected 8, 4 or None, got {layout.kv_bits!r}")
    if layout.max_tokens is not None and layout.max_tokens < 1:
        raise CacheError(f"max_tokens: expected at least 1, got {layout.max_tokens!r}")


def attention_entries(
    layer: int, heads: int, width: int, dtype: str, layout: CacheLayout, window: int | None = None
) -> CacheSpec:
    """Keys and values of one attention layer: full, quantized, or a ring for a `window`.

    Raises CacheError where `width` cannot be packed.
    """
    name = f"layers.{layer}"
    if window is not None and layout.max_tokens is not None:
        shape: tuple[int | str, ...] = ("B", heads, ring_size(window, layout.max_tokens) + 1, width)
        return tuple(CacheEntry(f"{name}.ring_{part}", shape, dtype) for part in PARTS)
    if layout.kv_bits is None:
        return tuple(
            CacheEntry(f"{name}.{part}", ("B", heads, "S", width), dtype) for part in PARTS
        )
    group = kv_group_size(width)
    sizes = [
        ("", width * layout.kv_bits // 32, "uint32"),
        (".scales", width // group, dtype),
        (".biases", width // group, dtype),
    ]
    return tuple(
        CacheEntry(f"{name}.{part}{suffix}", ("B", heads, "S", size), kind)
        for part in PARTS
        for suffix, size, kind in sizes
    )


def row_entries(layout: CacheLayout, windows: bool = False) -> CacheSpec:
    """What a state keeps per row, for a model with or without layers with a window."""
    entries = [CacheEntry("lengths", ("B",), "int32")]
    if windows:
        entries.append(CacheEntry("positions", ("B", "S"), "int32"))
        if layout.max_tokens is not None:
            entries.append(CacheEntry("written", ("B",), "int32"))
            entries.append(CacheEntry("slack", ("B",), "int32", fill=layout.max_tokens))
    return tuple(entries)


def ring_size(window: int, max_tokens: int) -> int:
    """R: slots of a ring, so that a call of `max_tokens` overwrites nothing that it still sees."""
    return window + max_tokens - 1


def kv_group_size(width: int) -> int:
    """Values that share a scale in a quantized cache. Raises CacheError if none divides `width`."""
    for group in (64, 32):
        if width % group == 0:
            return group
    raise CacheError(f"kv_bits needs a head size divisible by 32, this model has {width}")


def layout_of(
    state: Mapping[str, mx.array], spec_of: Callable[[CacheLayout], CacheSpec]
) -> CacheLayout:
    """The layout that a state was made with, for a model with the cache spec `spec_of` a layout.

    A state of another model gives some layout, which `check_state` then refuses.
    """
    bits = max_tokens = None
    for name, array in state.items():
        part = name.rsplit(".", maxsplit=1)[-1]
        if part == "keys" and bits is None and array.dtype == mx.uint32 and array.ndim == 4:
            width = _last_sizes(spec_of(FULL), name)[1]
            bits = array.shape[-1] * 32 // width if width else None
        elif part == "ring_keys" and max_tokens is None and array.ndim == 4:
            slots = _last_sizes(spec_of(CacheLayout(max_tokens=1)), name)[0]
            max_tokens = array.shape[2] - slots + 1 if slots else None
    return CacheLayout(bits, max_tokens)


def _last_sizes(spec: CacheSpec, name: str) -> tuple[int, int]:
    """The last two sizes of the array `name` of a layout; 0 for capacities, and without it."""
    shape = next((entry.shape for entry in spec if entry.name == name), (0, 0))
    slots, width = (size if isinstance(size, int) else 0 for size in shape[-2:])
    return slots, width


@lru_cache(maxsize=1 << 12)  # names are looked at in every call
def kind_of(name: str) -> str:
    """The kind of cache that the array `name` belongs to."""
    return _KINDS.get(name.rsplit(".", maxsplit=1)[-1], "recurrent")


@lru_cache(maxsize=1 << 12)
def slot_axis(name: str) -> int | None:
    """The axis of the array `name` that has S slots, or None."""
    return _SLOT_AXIS.get(kind_of(name))


def init_cache(spec: CacheSpec, batch: int, capacity: int) -> CacheState:
    """An empty state for `batch` rows and `capacity` slots, one of them scratch.

    Raises CacheError unless batch >= 1 and capacity >= 2 (1 where nothing has slots).
    """
    least = 2 if any("S" in entry.shape for entry in spec) else 1
    whole = all(isinstance(size, int) for size in (batch, capacity))
    if not whole or batch < 1 or capacity < least:
        raise CacheError(
            f"cache: expected batch >= 1 and capacity >= {least} (one slot is scratch), "
            f"got batch {batch}, capacity {capacity}"
        )
    return {
        entry.name: mx.full(entry.sizes(batch, capacity), entry.fill, dtype=DTYPES[entry.dtype])
        for entry in spec
    }


def check_state(spec: CacheSpec, state: Mapping[str, mx.array]) -> CacheState:
    """The same arrays in the fixed order (loading a file may reorder keys, and order retraces).

    Raises CacheError naming what is missing, unknown, misshapen or of another dtype.
    """
    names = [entry.name for entry in spec]
    if missing := [name for name in names if name not in state]:
        listed = ", ".join(missing[:4])
        raise CacheError(f"cache of another model or layout: it has no {listed}")
    if unknown := sorted(state.keys() - set(names)):
        listed = ", ".join(unknown[:4])
        raise CacheError(f"cache of another model or layout: unknown arrays {listed}")
    for name, (shape, dtype) in zip(names, _sizes(spec, *state_size(state)), strict=True):
        array = state[name]
        if array.shape != shape or array.dtype != DTYPES[dtype]:
            raise CacheError(
                f"cache {name}: expected {dtype} {list(shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )
    return {name: state[name] for name in names}


@lru_cache(maxsize=256)  # asked for in every call
def _sizes(spec: CacheSpec, batch: int, capacity: int) -> list[tuple[tuple[int, ...], str]]:
    return [(entry.sizes(batch, capacity), entry.dtype) for entry in spec]


def state_size(state: Mapping[str, mx.array]) -> tuple[int, int]:
    """Batch and capacity of a state; the capacity is 1 where nothing has slots.

    Raises CacheError when an array has too few axes.
    """
    batch = capacity = 0
    for name, array in state.items():
        axis = slot_axis(name) or 0
        if array.ndim <= axis:
            raise CacheError(f"cache {name}: has shape {list(array.shape)}, too few axes")
        if kind_of(name) != "row":
            batch = batch or array.shape[0]
        if axis:
            capacity = capacity or array.shape[axis]
    return batch, capacity or 1


def state_bytes(spec: CacheSpec, batch: int, capacity: int) -> int:
    """Bytes that `init_cache` allocates."""
    total = 0
    for entry in spec:
        count = DTYPES[entry.dtype].size
        for size in entry.sizes(batch, capacity):
            count *= size
        total += count
    return total
