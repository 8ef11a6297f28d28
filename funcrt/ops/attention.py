"""Softmax attention of queries `[B, H, T, D]` over the keys and values of a cache. Traceable."""

from __future__ import annotations

from typing import Literal, NamedTuple

from funcrt.machine import is_on_cuda
from funcrt.ops import masked_softmax, soft_cap
from funcrt.packing import Quantization

import mlx.core as mx


class Scoring(NamedTuple):
    """How scores become weights: scaled, capped, then softmax beside the sinks.

    Attributes:
        scale: of the scores.
        softcap: see `ops.soft_cap`; None leaves them.
        sinks: `[H]`, see `ops.masked_softmax`; or None.
    """

    scale: float
    softcap: float | None = None
    sinks: mx.array | None = None


class Dense(NamedTuple):
    """Keys or values `[B, K, S, D]` as they are."""

    array: mx.array

    def multiply(self, x: mx.array, transpose: bool) -> mx.array:
        """`x @ self` or `x @ self.T`, with the heads of x as they are here."""
        return x @ (self.array.swapaxes(-1, -2) if transpose else self.array)


class Packed(NamedTuple):
    """Keys or values of a quantized cache."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    packing: Quantization

    def multiply(self, x: mx.array, transpose: bool) -> mx.array:
        """`x @ self` or `x @ self.T`, with the heads of x as they are here."""
        return mx.quantized_matmul(
            x, self.weight, self.scales, self.biases, transpose=transpose,
            group_size=self.packing.group_size, bits=self.packing.bits,
        )  # fmt: skip


def hide(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """A bool mask as `attend` does best with it, once for all layers.

    On CUDA MLX adds masks to scores, and would make an additive one in every layer, for all heads.
    """
    if not is_on_cuda():
        return mask
    return mx.where(mask, mx.array(0, dtype), mx.array(-mx.inf, dtype))


def attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | Literal["causal"],
    scoring: Scoring,
) -> mx.array:
    """What queries see of dense keys and values.

    Args:
        q: `[B, H, T, D]`.
        keys: `[B, K, S, D]`.
        values: likewise.
        mask: `[B or 1, 1, T, S]`, as `hide` gives it. Every row shows something. "causal", where
            keys are those of the T tokens: each sees itself and those before it, which MLX's fused
            kernels know without a mask.
        scoring: without a softcap, which MLX's fused attention does not know.

    Returns:
        `[B, H, T, D]`.
    """
    sinks = None if scoring.sinks is None else scoring.sinks.astype(q.dtype)
    shape, groups = q.shape, keys.shape[1]
    is_added = isinstance(mask, mx.array) and mask.dtype != mx.bool_
    if is_added and shape[2] == 1 and shape[1] > groups and sinks is None:
        # For one token MLX's fused kernels know no masks. The query heads that share a key head
        # stand in for several tokens that see the same.
        q = q.reshape(shape[0], groups, -1, shape[3])
    out = mx.fast.scaled_dot_product_attention(
        q, keys, values, scale=scoring.scale, mask=mask, sinks=sinks
    )
    return out.reshape(shape) if q.shape != shape else out


def attend_by_products(
    q: mx.array, keys: Dense | Packed, values: Dense | Packed, mask: mx.array, scoring: Scoring
) -> mx.array:
    """The same of any keys and values, with a bool mask and any scoring."""
    batch, heads, tokens, width = q.shape
    stored = keys.array if isinstance(keys, Dense) else keys.weight
    groups = stored.shape[1]
    # Query heads that share a key head go into the token axis: broadcasting the cache to all heads
    # would copy it.
    sinks, scale = scoring.sinks, scoring.scale
    # A packed cache rounds what comes of it: there one token must be as it is among several.
    in_place = tokens > 1 or isinstance(keys, Packed)
    plain = not in_place and scoring.softcap is None and sinks is None
    if not plain or q.dtype != mx.float32:  # products of 16 bits may be too large
        q, scale = q * scale, 1.0
    scores = keys.multiply(q.reshape(batch, groups, -1, width), transpose=True)
    if scoring.softcap is not None:
        scores = soft_cap(scores, scoring.softcap)
    if tokens > 1:
        scores = scores.reshape(batch, groups, heads // groups, tokens, -1)
        mask = mask[:, :, None]
    if sinks is not None:
        sinks = sinks.reshape(groups, -1, *(1,) * (scores.ndim - 3))
    weights = masked_softmax(scores, mask, sinks, scale, in_place=in_place)
    if tokens > 1:
        weights = weights.reshape(batch, groups, -1, weights.shape[-1])
    return values.multiply(weights, transpose=False).reshape(batch, heads, tokens, width)


def split_heads(x: mx.array, heads: int) -> mx.array:
    """`[B, T, N D]` -> `[B, N, T, D]`; `[B, N D]` is one token of each row."""
    batch = x.shape[0]
    if x.ndim == 2 or x.shape[1] == 1:  # the same values in the same order
        return x.reshape(batch, heads, 1, -1)
    return x.reshape(batch, x.shape[1], heads, -1).swapaxes(1, 2)


def join_heads(x: mx.array, flat: bool = False) -> mx.array:
    """`[B, N, T, D]` -> `[B, T, N D]`; `flat` ones of one token `[B, N D]`."""
    batch, _, tokens, _ = x.shape
    if flat:
        return x.reshape(batch, -1)
    if tokens == 1:
        return x.reshape(batch, 1, -1)
    return x.swapaxes(1, 2).reshape(batch, tokens, -1)
