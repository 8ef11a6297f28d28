"""The call that people write first, the same on a model and on a bundle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from funcrt import cache, masks
from funcrt.buckets import BucketPlan
from funcrt.cache import CacheSpec, CacheState
from funcrt.compiled import Compiled
from funcrt.errors import InputError

import mlx.core as mx

if TYPE_CHECKING:
    from funcrt.text import Tokenizer

Tokens = mx.array | Sequence[int] | Sequence[Sequence[int]]


class CallForm(ABC):
    """`logits, cache = model(tokens, mask, cache)`, for anything that runs the contract."""

    vocab_size: int
    cache_spec: CacheSpec
    tokenizer: Tokenizer | None

    @property
    @abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: the tokenizer's, or those of the config where there is none."""

    @abstractmethod
    def init_cache(self, batch: int, capacity: int) -> CacheState:
        """An empty cache state for `batch` rows and `capacity` slots, one of them scratch."""

    @abstractmethod
    def compiled(self, plan: BucketPlan | None = None) -> Compiled:
        """The step functions over `plan`."""

    @abstractmethod
    def choose_size(self, rows: int, tokens: int) -> tuple[int, int]:
        """Batch and capacity of a cache that holds `tokens` in each of `rows`."""

    @abstractmethod
    def _run(
        self, tokens: mx.array, mask: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        """One call whose shapes are checked: T may be anything, rows are those of the state."""

    def __call__(
        self, tokens: Tokens, mask: mx.array | None = None, cache: CacheState | None = None
    ) -> tuple[mx.array, CacheState]:
        """Run the model on new tokens.

        Args:
            tokens: ids `[B, T]` of any integer dtype, or lists; one flat list is one row.
            mask: None (all tokens are real); a padding mask `[B, T]` of any dtype, nonzero = real,
                padding anywhere; or an attention mask `[B, 1, T, S]` (also without the 1), S the
                capacity of `cache`.
            cache: what an earlier call returned, or None for an empty one that just fits (256
                slots at least). It grows when it is full.

        Returns:
            logits `[B, T, V]` and the new cache state; pass it on and drop the old one, or every
            step copies it.

        Raises:
            InputError: ids out of range, shapes that do not fit.
            CacheError: a cache of another model.
            CapacityError: nothing declared is large enough.
        """
        ids = as_tokens(tokens, self.vocab_size)
        rows, count = ids.shape
        state = None if cache is None else _check_rows(self.cache_spec, cache, rows)
        if mask is not None and mask.ndim != 2:
            mask = _fit_mask(masks.as_mask(mask), rows, count, state)
            real = mx.any(mask, axis=(1, 3))
            least = mask.shape[3] - 1
        else:
            real = _fit_valid(mask, rows, count)
            least = 0
        state = self._make_room(state, real, least)
        batch, capacity = _size(state)
        ids = _pad(ids, batch, 0)
        if mask is None or mask.ndim == 2:
            mask = masks.causal(_pad(real, batch, 0), state["lengths"], capacity)
        else:
            mask = _pad(_pad(mask, batch, 0), capacity, 3)
        logits, state = self._run(ids, mask, state)
        return logits[:rows], state

    def _make_room(self, state: CacheState | None, real: mx.array, least: int) -> CacheState:
        new = mx.sum(real.astype(mx.int32), axis=1)
        if state is None:
            needed = max(_as_int(mx.max(new)), least)
            return self.init_cache(*self.choose_size(real.shape[0], needed))
        batch, capacity = _size(state)
        needed = _as_int(mx.max(state["lengths"] + _pad(new, batch, 0)))
        if needed <= capacity - 1:
            return state
        return cache.grow(state, self.choose_size(batch, needed)[1])


def as_tokens(tokens: Tokens, vocab_size: int) -> mx.array:
    """Ids as int32 `[B, T]`, checked against the vocabulary.

    Raises InputError: not integers, not rectangular, empty, or ids outside `0 .. V - 1`.
    """
    if isinstance(tokens, mx.array):
        ids = tokens
    else:
        try:
            ids = mx.array(list(tokens))
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(
                f"tokens: expected ids as [B, T] with rows of one length ({error}); "
                "pad shorter rows and pass the padding mask"
            ) from None
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.size == 0 or not mx.issubdtype(ids.dtype, mx.integer):
        raise InputError(
            f"tokens: expected integers [B, T] with T >= 1, got {ids.dtype} {list(ids.shape)}"
        )
    low, high = _as_int(mx.min(ids)), _as_int(mx.max(ids))
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"token id {low if low < 0 else high} is outside the vocabulary (0 to {vocab_size - 1})"
        )
    return ids.astype(mx.int32)


def _as_int(array: mx.array) -> int:
    value = array.item()
    assert isinstance(value, int)
    return value


def _size(state: CacheState) -> tuple[int, int]:
    return cache.state_size(state)


def _check_rows(spec: CacheSpec, state: CacheState, rows: int) -> CacheState:
    state = cache.check_state(spec, state)
    if _size(state)[0] < rows:
        raise InputError(f"tokens have {rows} rows, the cache has {_size(state)[0]}")
    return state


def _fit_valid(valid: mx.array | None, rows: int, count: int) -> mx.array:
    if valid is None:
        return mx.ones((rows, count), dtype=mx.bool_)
    if valid.shape != (rows, count):
        raise InputError(f"padding mask: expected [{rows}, {count}], got {list(valid.shape)}")
    return valid != 0


def _fit_mask(mask: mx.array, rows: int, count: int, state: CacheState | None) -> mx.array:
    if mask.shape[0] not in (1, rows) or mask.shape[2] != count:
        raise InputError(f"mask: expected [{rows}, 1, {count}, S], got {list(mask.shape)}")
    if state is not None and mask.shape[3] != _size(state)[1]:
        raise InputError(
            f"mask: its last axis is {mask.shape[3]}, the cache has {_size(state)[1]} slots"
        )
    return mx.broadcast_to(mask, (rows, *mask.shape[1:]))


def _pad(array: mx.array, size: int, axis: int) -> mx.array:
    missing = size - array.shape[axis]
    if missing <= 0:
        return array
    widths = [(0, missing if i == axis else 0) for i in range(array.ndim)]
    return mx.pad(array, widths)
