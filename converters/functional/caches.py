"""What stands in for mlx-lm's cache objects: the same interface over explicit arrays.

mlx-lm's caches are objects that change. A module of it is called here with stand-ins whose whole
state is the arrays of a cache state: a call reads the old ones, and what it leaves behind are the
new ones. Positions are int32 `[B]` arrays, buffers have the full capacity, and masks are those of
the caller, within the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from converters.functional.offsets import Offset
from funcrt.cache import CacheState, Placement, give_sight, write, write_rows

import mlx.core as mx


class Call:
    """One call of a module: where its tokens go, and the state before and after it.

    Args:
        placement: of the packed tokens.
        state: before the call.

    Attributes:
        made: every mask that a stand-in handed out; attention with another one is checked.
    """

    def __init__(self, placement: Placement, state: CacheState) -> None:
        self.placement = placement
        self.old = state
        self.new: CacheState = {}
        self.tokens = placement.real.shape[1]
        self.capacity = placement.visible.shape[3]
        self.made: list[mx.array] = []
        self._masks: dict[int | None, mx.array] = {}
        self.idle = mx.logical_not(mx.any(placement.real, axis=1))  # [B]

    def mask(self, window: int | None = None) -> mx.array:
        """Bool `[B, 1, T, S]`: what the packed tokens see, at most `window` slots back."""
        if window not in self._masks:
            mask = self.placement.visible
            if window is not None:
                step = mx.arange(self.tokens, dtype=mx.int32)
                slot = self.placement.offset[:, None] + step  # [B,T]
                column = mx.arange(self.capacity, dtype=mx.int32)
                mask = mask & (slot[:, None, :, None] - column < window)
            self._masks[window] = give_sight(mask, self.placement.slots)
            self.made.append(self._masks[window])
        return self._masks[window]

    def widest(self, mask: mx.array | str | None) -> mx.array:
        """A module's own mask, within what the caller's shows."""
        if mask is None or isinstance(mask, str):
            return self.mask()
        if any(mask is ours for ours in self.made):
            return mask
        if mask.dtype == mx.bool_:
            return give_sight(mask & self.placement.visible, self.placement.slots)
        return mask

    def read(self, name: str) -> mx.array | None:
        """An array as it is now; None if the state has none of that name."""
        return self.new.get(name, self.old.get(name))

    def fill(self, name: str, values: mx.array) -> mx.array:
        """The buffer `name` with `[B, K, T, D]` in the slots of this call."""
        if name not in self.old:  # nothing to keep: it has no width
            return mx.zeros((*values.shape[:2], self.capacity, values.shape[3]), values.dtype)
        self.new[name] = write(self.old[name], values, self.placement.slots)
        return self.new[name]

    def replace(self, name: str, value: mx.array) -> None:
        """A recurrent array, except in rows without any token."""
        old = self.old[name]
        idle = self.idle.reshape(-1, *[1] * (old.ndim - 1))
        self.new[name] = mx.where(idle, old, value.astype(old.dtype))

    def state(self) -> CacheState:
        """The state after the call, in the order of the old one."""
        new = {"lengths": self.placement.lengths, **self.new}
        if "positions" in self.old:
            step = mx.arange(self.tokens, dtype=mx.int32)
            slots = self.placement.offset[:, None] + step
            new["positions"] = write_rows(self.old["positions"], slots, self.placement.slots)
        return {name: new.get(name, array) for name, array in self.old.items()}


class _StandIn:
    """Is an instance of what it stands for, as far as `isinstance` can tell."""

    def __init__(self, stands_for: type) -> None:
        self._stands_for = stands_for

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._stands_for


class Slots(_StandIn):
    """Keys and values of one layer (KVCache, RotatingKVCache, ChunkedKVCache, ...).

    Every kind keeps all slots: what a rotating cache forgets is left out by the mask.

    Args:
        stands_for: the class that modules may ask for.
        call: the call under way.
        name: prefix of the arrays' names.
        window: how far back a rotating cache remembers.
    """

    start_position = 0

    def __init__(self, stands_for: type, call: Call, name: str, window: int | None = None) -> None:
        super().__init__(stands_for)
        self._call = call
        self._name = name
        self._window = window
        self.max_size = window
        self.offset: Any = Offset(call.placement.offset)
        self.keys: Any = call.read(f"{name}.keys")
        self.values: Any = call.read(f"{name}.values")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write `[B, K, T, D]` and return the buffers `[B, K, S, D]`."""
        self.keys = self._call.fill(f"{self._name}.keys", keys)
        self.values = self._call.fill(f"{self._name}.values", values)
        self.offset = self.offset + keys.shape[2]
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The buffers `[B, K, S, D]` as they are now."""
        return self.keys, self.values

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Bool `[B, 1, T, S]`, whatever form was asked for; the smaller of two windows."""
        windows = [window for window in (window_size, self._window) if window]
        return self._call.mask(min(windows, default=None))

    def maybe_trim_front(self) -> None:
        """Nothing to do: slots are kept, the module's mask leaves them out."""

    def size(self) -> Any:
        """Int32 `[B]`: slots filled so far."""
        return self.offset

    def empty(self) -> bool:
        """Whether there are no buffers yet: never."""
        return False

    def is_trimmable(self) -> bool:
        """Whether rows can be trimmed: they are, outside of the module."""
        return True


class Entries(_StandIn):
    """The arrays of a recurrent layer (ArraysCache).

    Args:
        stands_for: the class that modules may ask for.
        call: the call under way.
        name: prefix of the arrays' names.
        size: how many there are.
    """

    left_padding = None

    def __init__(self, stands_for: type, call: Call, name: str, size: int) -> None:
        super().__init__(stands_for)
        self._call = call
        self._name = name
        self._size = size
        real = call.placement.real
        self._real = real
        self.lengths: Any = mx.sum(real.astype(mx.int32), axis=1)  # [B]
        self.offset: Any = Offset(call.placement.offset)

    @property
    def cache(self) -> list[mx.array | None]:
        """All entries."""
        return list(self)

    @property
    def batch_size(self) -> int:
        """B."""
        return int(self._real.shape[0])

    def __getitem__(self, index: int) -> mx.array | None:
        return self._call.read(self._entry(index))

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._call.replace(self._entry(index), value)

    def __iter__(self) -> Iterator[mx.array | None]:
        return (self[i] for i in range(self._size))

    def _entry(self, index: int) -> str:
        return f"{self._name}.entry{range(self._size)[index]}"

    def make_mask(self, N: int) -> mx.array:
        """Bool `[B, T]`: which packed tokens are real."""
        return self._real

    def advance(self, N: int) -> None:
        """Count `N` tokens as seen."""
        self.lengths = self.lengths - N

    def empty(self) -> bool:
        """Whether there are no arrays yet: never."""
        return False

    def is_trimmable(self) -> bool:
        """Whether rows can be trimmed: what a recurrence forgot does not come back."""
        return False


class Several(_StandIn):
    """What one layer keeps in several caches (CacheList)."""

    def __init__(self, stands_for: type, *caches: Any) -> None:
        super().__init__(stands_for)
        self.caches = caches

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.caches)

    def __len__(self) -> int:
        return len(self.caches)

    def size(self) -> Any:
        """Int32 `[B]`: slots filled so far."""
        return self.caches[0].size()

    def empty(self) -> bool:
        """Whether there are no buffers yet: never."""
        return False

    def is_trimmable(self) -> bool:
        """Whether rows of all of them can be trimmed."""
        return all(cache.is_trimmable() for cache in self.caches)
