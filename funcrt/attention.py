"""Attention over a cache state: write what is new, then look at what the mask shows.

One `Attend` serves all layers of a call. It finds out from the arrays of the state which kind of
cache a layer has, and keeps the new arrays. In the first call of all rows layers look at what is
new instead of all slots, through a mask of T x T.
"""

from __future__ import annotations

from functools import cached_property

from funcrt import ops
from funcrt.cache import (
    CacheState,
    Placement,
    find_sight,
    give_sight,
    write,
    write_first,
    write_rows,
)
from funcrt.cache.layout import PARTS, kv_group_size
from funcrt.errors import CacheError, InputError
from funcrt.machine import is_on_gpu
from funcrt.ops import kernels, one_token
from funcrt.ops.attention import Dense, Packed, Scoring, attend, attend_by_products, hide
from funcrt.params import Quantization

import mlx.core as mx


class Attend:
    """What the layers of one call look at, and the state that they leave behind.

    Args:
        call: where the call's tokens go.
        state: before the call.

    Attributes:
        state: the new state; complete when every layer has run, in the order of the old one.
    """

    def __init__(self, call: Placement, state: CacheState) -> None:
        self._call = call
        self._old = state
        self._masks: dict[tuple[int | None, bool, int | None], mx.array] = {}
        self._hiding: dict[tuple[int | None, bool, int | None, mx.Dtype], mx.array] = {}
        self._ring_slots: dict[int, mx.array] = {}
        self.state: CacheState = dict(state)
        self.state["lengths"] = call.lengths
        if "written" in state:
            self.state["written"] = mx.maximum(state["written"], call.lengths)
        self._queries = call.positions  # [B,T]
        if self._queries is None:
            step = mx.arange(call.real.shape[1], dtype=mx.int32)
            self._queries = call.offset[:, None] + step
        if "positions" in state:
            old, new = state["positions"], mx.broadcast_to(self._queries, call.slots.shape)
            self.state["positions"] = (
                write_first(old, new, axis=1) if call.first else write_rows(old, new, call.slots)
            )

    def __call__(
        self,
        layer: int,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        window: int | None = None,
        both_sides: bool = False,
    ) -> mx.array:
        """Grouped-query attention of one layer.

        It differentiates, except where the layer's cache is quantized: MLX has no gradient for
        what goes through the packed arrays and raises RuntimeError.

        Args:
            layer: its number.
            q: `[B, H, T, D]`, packed and rotated.
            k: `[B, K, T, D]`, likewise.
            v: `[B, K, T, D]`.
            scale: see `Scoring`.
            softcap: see `Scoring`.
            sinks: see `Scoring`.
            window: a query sees keys less than this many positions before it.
            both_sides: the window also bounds keys after the query.

        Returns:
            `[B, H, T, D]`.

        Raises:
            InputError: more tokens than the ring of this layer was laid out for.
            CacheError: the layer has a window and the state has no positions, or a ring and no
                window.
        """
        name, scoring = f"layers.{layer}", Scoring(scale, softcap, sinks)
        if f"{name}.ring_keys" in self._old:
            return self._attend_ring(name, q, k, v, scoring, window, both_sides)
        if f"{name}.keys.scales" in self._old:
            packing = self._packing(name, q.shape[-1])
            packed = [
                self._write_packed(f"{name}.{part}", new, packing)
                for part, new in zip(PARTS, (k, v), strict=True)
            ]
            mask = self._mask(window, both_sides, None)
            return attend_by_products(q, packed[0], packed[1], mask, scoring)
        keys, values = (
            self._write(f"{name}.{part}", new, self._call.slots)
            for part, new in zip(PARTS, (k, v), strict=True)
        )
        return self._look(q, keys, values, scoring, window, both_sides, None)

    def latent(
        self,
        layer: int,
        q: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        latent_rope: mx.array,
        *,
        scale: float,
    ) -> mx.array:
        """Attention over compressed keys that are also the values (MLA, arXiv:2405.04434 §2.1).

        Args:
            layer: its number.
            q: `[B, H, T, C]`, queries taken into the latent space.
            q_rope: `[B, H, T, R]`, their rotated part.
            latent: `[B, 1, T, C]`, new latents.
            latent_rope: `[B, 1, T, R]`, new rotated keys, shared by all heads.
            scale: of the scores.

        Returns:
            `[B, H, T, C]`, in the latent space.
        """
        name = f"layers.{layer}"
        keys = self._write(f"{name}.latent", latent, self._call.slots)
        rope = self._write(f"{name}.latent_rope", latent_rope, self._call.slots)
        # Heads go into the token axis, since all see the same keys. Two products: one array with a
        # view for the values would be copied at every step.
        batch, heads, tokens, _ = q.shape
        q, q_rope = (a.reshape(batch, 1, heads * tokens, -1) for a in (q * scale, q_rope * scale))
        scores = q @ keys.swapaxes(-1, -2) + q_rope @ rope.swapaxes(-1, -2)
        scores = scores.reshape(batch, heads, tokens, -1)
        # In place: of all heads, scores are not much smaller than what is kept.
        weights = ops.masked_softmax(scores, self._mask(None, False, None))
        out = weights.reshape(batch, 1, heads * tokens, -1) @ keys
        return out.reshape(batch, heads, tokens, -1)

    def replace(self, name: str, array: mx.array) -> None:
        """Put a recurrent array `name` of the state in place."""
        self.state[name] = array

    def _write(self, name: str, new: mx.array, slots: mx.array) -> mx.array:
        """Put what is new in its slots. Returns what queries look at."""
        old = self._old[name]
        if self._call.first:
            self.state[name] = write_first(old, new, axis=2)
            return new.astype(old.dtype)
        self.state[name] = write(old, new, slots)
        return self.state[name]

    def _packing(self, name: str, width: int) -> Quantization:
        bits = self._old[f"{name}.keys"].shape[-1] * 32 // width
        return Quantization(bits, kv_group_size(width))

    def _write_packed(self, name: str, new: mx.array, packing: Quantization) -> Packed:
        pieces = mx.quantize(new, group_size=packing.group_size, bits=packing.bits)
        weight, scales, biases = (
            self._write(f"{name}{suffix}", piece, self._call.slots)
            for suffix, piece in zip(("", ".scales", ".biases"), pieces, strict=True)
        )
        return Packed(weight, scales, biases, packing)

    def _attend_ring(
        self,
        name: str,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        scoring: Scoring,
        window: int | None,
        both_sides: bool,
    ) -> mx.array:
        size = self._old[f"{name}.ring_keys"].shape[2] - 1
        if window is None:
            raise CacheError(f"{name}: has a ring, which only a layer with a window can use")
        if q.shape[2] > size - window + 1:
            raise InputError(
                f"a call of {q.shape[2]} tokens, the ring of this cache takes at most "
                f"{size - window + 1}: make the cache with a larger max_tokens, or feed the tokens "
                "in pieces"
            )
        slots = self._slots_in_ring(size)
        keys = self._write(f"{name}.ring_keys", k, slots)
        values = self._write(f"{name}.ring_values", v, slots)
        return self._look(q, keys, values, scoring, window, both_sides, size)

    def _look(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        scoring: Scoring,
        window: int | None,
        both_sides: bool,
        ring: int | None,
    ) -> mx.array:
        # Where MLX has no fused attention, it multiplies once for each query head.
        by_products = scoring.softcap is not None or not is_on_gpu()
        if self._call.first and not by_products and not _narrows(window, q.shape[2]):
            return attend(q, keys, values, "causal", scoring)
        if self._has_kernel(q, keys, values, scoring):
            sees_all = window is None and ring is None
            shown = self._held if sees_all else self._mask(window, both_sides, ring)
            return one_token.attend(q, keys, values, shown, scoring.scale)
        mask, key = self._mask(window, both_sides, ring), (window, both_sides, ring, q.dtype)
        if by_products:
            return attend_by_products(q, Dense(keys), Dense(values), mask, scoring)
        if key not in self._hiding:
            self._hiding[key] = hide(mask, q.dtype)
        return attend(q, keys, values, self._hiding[key], scoring)

    def _has_kernel(self, q: mx.array, keys: mx.array, values: mx.array, scoring: Scoring) -> bool:
        """Whether `ops.one_token` is for this, which does not differentiate: causal calls only.

        Nor is it for first calls: they look at what is new, and it at slots.
        """
        plain = scoring.sinks is None and scoring.softcap is None
        call = self._call.causal and not self._call.first
        return plain and call and kernels.are_there() and one_token.supports(q, keys, values)

    @cached_property
    def _held(self) -> one_token.Held:
        assert self._call.seen is not None
        return one_token.Held(self._call.slots[:, 0], self._call.seen[:, 0])

    def _slots_in_ring(self, ring: int) -> mx.array:
        """Int32 `[B, T]`: where each packed token is written; the ring's scratch for padding."""
        if ring not in self._ring_slots:
            slots = self._call.slots
            fits = slots < self._call.visible.shape[3] - 1  # scratch stays scratch
            self._ring_slots[ring] = mx.where(fits, slots % ring, ring)
        return self._ring_slots[ring]

    def _mask(self, window: int | None, both_sides: bool, ring: int | None) -> mx.array:
        """Bool `[B, 1, T, S or R + 1]`, or `[1, 1, T, T]`; layers alike share one."""
        key = (window, both_sides, ring)
        if key not in self._masks and self._call.first:
            self._masks[key] = _see_new(self._call.real.shape[1], window)
        if key not in self._masks and window is None and ring is None:
            self._masks[key] = find_sight(self._call)
        if key not in self._masks:
            mask, keys, slots = self._call.visible, self.state.get("positions"), self._call.slots
            if window is not None and keys is None:
                raise CacheError("a layer with a window needs `positions`; see row_entries")
            if ring is not None:
                mask, keys = self._look_into_ring(mask, ring)
                slots = self._slots_in_ring(ring)
            if window is not None and keys is not None:
                mask = mask & self._within(window, both_sides, keys)
            self._masks[key] = give_sight(mask, slots)
        return self._masks[key]

    def _within(self, window: int, both_sides: bool, keys: mx.array) -> mx.array:
        assert self._queries is not None
        # By position, not by slot: the nodes of a token tree share positions.
        distance = self._queries[:, None, :, None] - keys[:, None, None, :]
        near = distance < window
        return near & (distance > -window) if both_sides else near

    def _look_into_ring(self, mask: mx.array, ring: int) -> tuple[mx.array, mx.array]:
        """Columns of the mask, and positions, of what the slots of a ring hold.

        That is the last R slots, so where positions repeat outside of a token tree, fewer than a
        window of positions.
        """
        newest = self._call.lengths[:, None] - 1  # [B,1]
        column = mx.arange(ring + 1, dtype=mx.int32)
        slot = newest - (newest - column + ring) % ring  # the newest token that belongs there
        # Older than a full turn before the newest ever written: overwritten, later trimmed.
        held = (slot >= 0) & (slot >= self.state["written"][:, None] - ring) & (column < ring)
        # A row claimed to be longer than its capacity must not look past the end either.
        index = mx.clip(slot, 0, mask.shape[3] - 1)
        mask = mx.take_along_axis(mask, index[:, None, None, :], axis=3)
        keys = mx.take_along_axis(self.state["positions"], index, axis=1)
        return mask & held[:, None, None, :], keys


def _see_new(tokens: int, window: int | None) -> mx.array:
    """Bool `[1, 1, T, T]`: packed tokens see themselves and those before them.

    Padding comes last and sees itself, at least, so no row is blind.
    """
    step = mx.arange(tokens, dtype=mx.int32)
    distance = step[:, None] - step
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    return mask[None, None]


def _narrows(window: int | None, tokens: int) -> bool:
    """Whether a window hides any of T tokens from a later one."""
    return window is not None and window < tokens
