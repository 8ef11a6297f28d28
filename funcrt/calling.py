"""The call that people write first, the same on a model and on a bundle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from funcrt import cache, masks
from funcrt.buckets import BucketPlan
from funcrt.cache import CacheSpec, CacheState
from funcrt.compiled import Compiled
from funcrt.errors import InputError
from funcrt.tracing import read_all

import mlx.core as mx

if TYPE_CHECKING:
    from funcrt.text import Tokenizer

Tokens = mx.array | Sequence[int] | Sequence[Sequence[int]]
Mask = mx.array | list[Any]


class CallForm(ABC):
    """`logits, cache = model(tokens, mask, cache)`, for anything that runs the contract."""

    vocab_size: int
    tokenizer: Tokenizer | None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for equal config and weights; cache files are tied to it."""

    @abstractmethod
    def check_cache(self, state: CacheState) -> CacheState:
        """The same arrays in the fixed order. Raises CacheError for a cache of another model."""

    @property
    @abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: the tokenizer's, or those of the config where there is none."""

    @property
    @abstractmethod
    def config_values(self) -> Mapping[str, Any]:
        """The model's config as plain values: sizes, dtype."""

    @property
    @abstractmethod
    def whole_cache_spec(self) -> CacheSpec:
        """The arrays of a cache state: a bundle's, or a model's that keep every slot."""

    @property
    @abstractmethod
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the prepared weights, and of stored ones that live beside them."""

    @property
    def adapter_count(self) -> int:
        """How many adapters the rows of a batch can choose from, see `funcrt.adapters.stack`."""
        return 0

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
        self,
        tokens: mx.array,
        mask: mx.array,
        state: CacheState,
        looks_back: bool,
        positions: mx.array | None,
    ) -> tuple[mx.array, CacheState]:
        """One call whose shapes are checked: T may be anything, rows are those of the state.

        `looks_back` says that no token sees a later one, without looking at the mask.
        """

    def __call__(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        cache: CacheState | None = None,
        positions: mx.array | None = None,
    ) -> tuple[mx.array, CacheState]:
        """Run the model on new tokens.

        A mask of two axes is a padding mask if it is `[B, T]`, and an attention mask for all rows
        if it is `[T, S]`; one of `[B, T]` that holds -1e4 or less is refused, since it could be
        either. The device is waited for once, for what the checks need: ids, lengths and
        the mask, never the logits or the rest of the state.

        Args:
            tokens: ids `[B, T]` of any integer dtype, or lists; one flat list is one row.
            mask: None (all tokens are real); a padding mask `[B, T]` of any dtype, nonzero = real,
                padding anywhere; or an attention mask `[T, S]`, `[B, T, S]` or `[B, 1, T, S]`,
                boolean, integer or additive (see `masks.as_mask`), S the capacity of `cache`.
                Without a cache a square one, S = T, is about the tokens themselves.
            cache: what an earlier call returned, or None for an empty one: the least power of two
                from 256 up that holds the tokens and a scratch slot; the smallest exported one
                that does, on a bundle. It grows when it is full.
            positions: int32 `[B, T]`, the second result of `masks.from_tree`: the nodes of a tree
                stand where their slots do not. A model takes them, a bundle does not.

        Returns:
            logits `[B, T, V]` and the new cache state; pass it on and drop the old one, or every
            step copies it.

        Raises:
            InputError: ids out of range, shapes that do not fit, a mask that contradicts the
                lengths of the cache or is too narrow for the tokens.
            CacheError: a cache of another model.
            CapacityError: nothing declared is large enough.
        """
        ids = as_tokens(tokens)
        rows, count = ids.shape
        state = None if cache is None else _check_rows(self.check_cache(cache), rows)
        sorted_mask = _sort_mask(mask, rows, count, None if state is None else _size(state)[1])
        needed = _check_values(ids, self.vocab_size, sorted_mask, state)
        valid, sight = sorted_mask.valid, sorted_mask.sight
        state = self._make_room(state, rows, needed, None if sight is None else sight.shape[3])
        batch, capacity = _size(state)
        ids = _pad(ids.astype(mx.int32), batch, 0)
        if sight is None:
            full = masks.causal(_pad(valid, batch, 0), state["lengths"], capacity)
        else:
            full = _pad(_pad(sight, batch, 0), capacity, 3)
        if positions is not None:
            if positions.shape != (rows, count):
                raise InputError(
                    f"positions: expected int32 [{rows}, {count}], got {list(positions.shape)}"
                )
            positions = _pad(positions.astype(mx.int32), batch, 0)
        logits, state = self._run(ids, full, state, sight is None, positions)
        return logits[:rows], state

    def _make_room(
        self, state: CacheState | None, rows: int, needed: int, columns: int | None
    ) -> CacheState:
        """A state with room for `needed` tokens, and for all columns of an attention mask."""
        if state is None:
            state = self.init_cache(*self.choose_size(rows, max(needed, (columns or 1) - 1)))
        batch, capacity = _size(state)
        if capacity == 1:  # nothing has slots
            return state
        if columns is not None and needed > columns:
            raise InputError(
                f"mask: it has {columns} columns, and rows hold {needed} tokens after this call: "
                "grow the cache first (cache.grow), and make the mask for its capacity"
            )
        if needed <= capacity - 1:
            return state
        return cache.grow(state, self.choose_size(batch, needed)[1])


def as_tokens(tokens: Tokens) -> mx.array:
    """Ids as integers `[B, T]`.

    Raises InputError: not integers, not rectangular, or empty.
    """
    try:
        # A list of rows must be one of lists; anything else may be an array of another library.
        given: Any = list(tokens) if isinstance(tokens, (list, tuple, range)) else tokens
        ids = mx.array(given)
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
    return ids


class _Mask(NamedTuple):
    """A mask as it is meant.

    Attributes:
        valid: bool `[B, T]`, which tokens are real.
        padding: `[B, T]`, a padding mask as it came.
        sight: bool `[B, 1, T, S]`, an attention mask.
    """

    valid: mx.array
    padding: mx.array | None = None
    sight: mx.array | None = None


def _sort_mask(mask: Mask | None, rows: int, count: int, slots: int | None) -> _Mask:
    """Tell a padding mask from an attention mask; `slots` is None without a cache."""
    if mask is None:
        return _Mask(mx.ones((rows, count), dtype=mx.bool_))
    try:
        array = mask if isinstance(mask, mx.array) else mx.array(mask)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"mask: expected an array ({error})") from None
    columns = "S" if slots is None else str(slots)
    forms = f"an attention mask is [{count}, {columns}] or [{rows}, 1, {count}, {columns}]"
    if array.shape == (rows, count):
        return _Mask(array != 0, padding=array)
    # [T, B] may fit as [T, S], and more likely is a padding mask on its side.
    turned = array.shape == (count, rows)
    flat = array.ndim == 2 and array.shape[0] == count and slots in (None, array.shape[1])
    if array.ndim not in (3, 4) and (turned or not flat):
        raise InputError(
            f"padding mask: expected [{rows}, {count}], got {list(array.shape)}; {forms}"
        )
    sight = masks.as_mask(array)
    if sight.shape[0] not in (1, rows) or sight.shape[2] != count:
        raise InputError(f"mask: expected [{rows}, 1, {count}, S], got {list(array.shape)}")
    if slots is not None and sight.shape[3] != slots:
        raise InputError(
            f"mask: its last axis is {sight.shape[3]}, the cache has {slots} slots; "
            f"a padding mask is [{rows}, {count}], {forms}"
        )
    sight = mx.broadcast_to(sight, (rows, *sight.shape[1:]))
    if slots is None and sight.shape[3] == count:
        # No slots are known yet, so its columns mean the tokens, padding among them.
        sight = masks.from_block(sight[:, 0], mx.zeros((rows,), dtype=mx.int32), count + 1)
    return _Mask(mx.any(sight, axis=(1, 3)), sight=sight)


def _check_values(ids: mx.array, vocab_size: int, mask: _Mask, state: CacheState | None) -> int:
    """Slots that the longest row fills after this call.

    While traced nothing is checked: T for a new cache, and a cache that is given stays as it is.

    Raises InputError for ids outside the vocabulary, an additive mask in a padding mask's shape,
    or an attention mask that cannot be meant for these lengths.
    """
    rows, count = ids.shape
    new = mx.sum(mask.valid.astype(mx.int32), axis=1)
    after = new if state is None else state["lengths"] + _pad(new, _size(state)[0], 0)
    checks = [mx.min(ids), mx.max(ids), mx.max(after), *_oddities(mask, after[:rows])]
    values = read_all(*checks)
    if values is None:
        return count if state is None else 0
    low, high, needed, *odd = values
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"token id {low if low < 0 else high} is outside the vocabulary (0 to {vocab_size - 1})"
        )
    if mask.padding is not None and odd[0]:
        raise InputError(
            f"mask: {list(mask.padding.shape)} is a padding mask, nonzero = real, but this one "
            "holds -1e4 or less like an additive mask: pass 0 and 1, or it as [1, 1, T, S]"
        )
    if mask.sight is not None and odd[0]:
        raise InputError(
            "mask: it was made for other lengths than those of the cache: a token sees slots that "
            "no token has filled"
        )
    return int(needed)


def _oddities(mask: _Mask, after: mx.array) -> list[mx.array]:
    """A bool that says whether the mask cannot be meant; nothing where there is no mask."""
    if mask.padding is not None:
        return [mx.any(mask.padding <= masks.MASKED)]
    if mask.sight is not None:
        filled = mx.arange(mask.sight.shape[3], dtype=mx.int32) < after[:, None]  # [B,S]
        blind = mx.any(mask.sight & filled[:, None, None], axis=(1, 3)) != mask.valid
        # Columns beyond what is filled are not meant where all of them are shown, or none.
        shown = mx.any(mask.sight, axis=(1, 2))  # [B,S]
        some, every = mx.any(shown > filled, axis=1), mx.all(shown | filled, axis=1)
        return [mx.any(blind) | mx.any(some & mx.logical_not(every))]
    return []


def _size(state: CacheState) -> tuple[int, int]:
    return cache.state_size(state)


def _check_rows(state: CacheState, rows: int) -> CacheState:
    if _size(state)[0] < rows:
        raise InputError(f"tokens have {rows} rows, the cache has {_size(state)[0]}")
    return state


def _pad(array: mx.array, size: int, axis: int) -> mx.array:
    missing = size - array.shape[axis]
    if missing <= 0:
        return array
    widths = [(0, missing if i == axis else 0) for i in range(array.ndim)]
    return mx.pad(array, widths)
