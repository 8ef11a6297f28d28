"""Writing what a call computed into the arrays of a cache state."""

from __future__ import annotations

from funcrt.cache.placement import Placement
from funcrt.errors import InputError
from funcrt.tracing import read

import mlx.core as mx


def write(buffer: mx.array, values: mx.array, slots: mx.array) -> mx.array:
    """`buffer` `[B, K, S, D]` with packed `values` `[B, K, T, D]` in `slots` int32 `[B, T]`.

    Slots must never leave the buffer: MLX does not check indices, and past the end it would
    overwrite another head.
    """
    index = mx.broadcast_to(slots[:, None, :, None], values.shape)
    return mx.put_along_axis(buffer, index, values.astype(buffer.dtype), axis=2)


def write_rows(buffer: mx.array, values: mx.array, slots: mx.array) -> mx.array:
    """`buffer` `[B, S]` with packed `values` `[B, T]` in `slots` int32 `[B, T]`."""
    return mx.put_along_axis(buffer, slots, values.astype(buffer.dtype), axis=1)


def write_first(buffer: mx.array, values: mx.array, axis: int) -> mx.array:
    """`write` of the first call of all rows, packed token i into slot i: one copy, no index.

    Padding comes with it, behind the tokens of its row, where nothing sees it and the next ones
    overwrite it. Scratch stays as it is.

    Args:
        buffer: `[B, K, S, ..]` or `[B, S]`.
        values: the same with T in place of S; what does not fit is dropped.
        axis: that of S and T.
    """
    new = buffer[...]  # an array of its own: assignment replaces what a name stands for
    count = min(values.shape[axis], buffer.shape[axis] - 1)
    cut = (*[slice(None)] * axis, slice(count))
    new[cut] = values[cut].astype(buffer.dtype)
    return new


# --- recurrent layers: state that is replaced at every call -----------------------------------


def check_recurrent(call: Placement) -> None:
    """Raise InputError unless a recurrent layer can run this call: tokens one after the other.

    Positions are refused wherever the call is traced, other masks than causal with padding where
    the mask can be read.
    """
    if call.positions is not None:
        raise InputError(
            "positions: a model with a recurrent state takes tokens in the order of their slots; "
            "leave positions out, and run each branch of a token tree from a snapshot"
        )
    column = mx.arange(call.visible.shape[3], dtype=mx.int32)
    slot = call.offset[:, None] + mx.arange(call.real.shape[1], dtype=mx.int32)
    causal = (column <= slot[..., None]) & call.real[..., None]  # [B,T,S]
    causal = causal & (column < mx.minimum(call.lengths, column[-1])[:, None, None])
    if read(mx.all(call.visible[:, 0] == causal)) is False:
        raise InputError(
            "mask: a model with a recurrent state takes causal masks with padding only (each real "
            "token sees all before it); run each branch of a token tree from a snapshot"
        )


def zero_padding(x: mx.array, call: Placement) -> mx.array:
    """Packed `x [B, T, ...]` with zeros at padding, so that it adds nothing to a state."""
    return mx.where(call.real.reshape(*call.real.shape, *[1] * (x.ndim - 2)), x, 0)


def conv_window(buffer: mx.array, x: mx.array, call: Placement) -> tuple[mx.array, mx.array]:
    """What a causal convolution of width k reads, and the inputs that it keeps for the next call.

    Args:
        buffer: `[B, k - 1, C]`, the last inputs of earlier calls.
        x: packed inputs `[B, T, C]`.
        call: says how many of them are real.

    Returns:
        `[B, k - 1 + T, C]` with zeros at padding, and the new buffer: the last k - 1 real inputs.
    """
    joined = mx.concatenate([buffer, zero_padding(x, call).astype(buffer.dtype)], axis=1)
    kept = buffer.shape[1]
    if x.shape[1] == 1:
        return joined, mx.where(call.real[..., None], joined[:, 1:], buffer)
    count = call.lengths - call.offset  # [B]
    index = count[:, None] + mx.arange(kept, dtype=mx.int32)  # [B,k-1]
    return joined, mx.take_along_axis(joined, index[..., None], axis=1)
