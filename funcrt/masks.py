"""Masks: who may look at what, bool `[B, 1, T, S]`, True = may attend.

Columns are cache slots. A row's real tokens land in slots `lengths, lengths + 1, ...` in their own
order, so a helper needs the lengths *before* the call. A query row without any True is padding.
Everything here is pure and traceable.
"""

from __future__ import annotations

from funcrt.errors import InputError
from funcrt.tracing import read

import mlx.core as mx

MASKED = -9984.0  # -1e4, as bfloat16 rounds it: no score that is not masked comes near


def causal(valid: mx.array, lengths: mx.array, capacity: int) -> mx.array:
    """Each real token sees what is cached, itself and the real tokens before it.

    With two cached slots and one left-padded call of four tokens, capacity 7::

        valid            slot 0 1 2 3 4 5 6
        0  (padding)          . . . . . . .
        1                     x x x . . . .
        1                     x x x x . . .
        1                     x x x x x . .

    Args:
        valid: `[B, T]` of any dtype, nonzero = real token; padding may stand anywhere.
        lengths: int32 `[B]`, slots filled before this call.
        capacity: S of the cache.

    Returns:
        bool `[B, 1, T, S]`.

    Raises:
        InputError: wrong ranks or batch sizes.
    """
    if valid.ndim != 2:
        raise InputError(f"valid: expected shape [B, T], got {list(valid.shape)}")
    check_lengths(lengths, valid.shape[0])
    check_capacity(capacity)
    real = valid != 0
    rank = mx.cumsum(real.astype(mx.int32), axis=1) - 1  # [B,T]
    last = lengths[:, None] + rank  # the slot that a real token takes
    slots = mx.arange(capacity, dtype=mx.int32)
    mask = (slots <= last[..., None]) & real[..., None]  # [B,T,S]
    return mask[:, None]


def from_lengths(new_lengths: mx.array, tokens: int, lengths: mx.array, capacity: int) -> mx.array:
    """`causal` for rows padded on the right: the first `new_lengths` tokens are real.

    With one cached slot, two real tokens of three, capacity 5::

        token  slot 0 1 2 3 4
        0           x x . . .
        1           x x x . .
        2           . . . . .

    Args:
        new_lengths: int32 `[B]`, real tokens of each row in this call.
        tokens: T.
        lengths: int32 `[B]`, slots filled before this call.
        capacity: S of the cache.

    Returns:
        bool `[B, 1, T, S]`.

    Raises:
        InputError: wrong shapes or dtypes; counts outside 0 to T, where they can be read.
    """
    check_lengths(new_lengths, _rows(lengths), "new_lengths")
    counts = read(new_lengths)
    if counts is not None and any(not 0 <= count <= tokens for count in counts):
        raise InputError(f"new_lengths: expected 0 to {tokens} (T), got {counts}")
    return causal(mx.arange(tokens, dtype=mx.int32) < new_lengths[:, None], lengths, capacity)


def from_block(block: mx.array, lengths: mx.array, capacity: int) -> mx.array:
    """Everything cached is visible; a small T x T block says what the new tokens see of each other.

    The block is the lower-right corner of the mask, and the same one serves every chunk of a long
    prompt. A row of the block without any True is padding; its column is left out. Two cached
    slots, a guess and its check (`[[1, 0], [1, 1]]`), capacity 6::

        token  slot 0 1 2 3 4 5
        0           x x x . . .
        1           x x x x . .

    Args:
        block: `[T, T]` or `[B, T, T]` of any dtype, nonzero = may attend: row = query, column =
            key, both in the caller's token order.
        lengths: int32 `[B]`, slots filled before this call.
        capacity: S of the cache.

    Returns:
        bool `[B, 1, T, S]`.

    Raises:
        InputError: a block that is not square, or another batch size.
    """
    if block.ndim == 2:
        block = mx.broadcast_to(block[None], (_rows(lengths), *block.shape))
    if block.ndim != 3 or block.shape[1] != block.shape[2]:
        raise InputError(f"block: expected [T, T] or [B, T, T], got {list(block.shape)}")
    check_lengths(lengths, block.shape[0])
    check_capacity(capacity)
    block = block != 0
    tokens = block.shape[1]
    real = mx.any(block, axis=2)  # [B,T]
    step = mx.arange(tokens, dtype=mx.int32)
    # Real columns in their own order, as the tokens are packed into slots; padding last.
    order = mx.argsort(mx.where(real, step, step + tokens), axis=1)
    columns = mx.take_along_axis(block, order[:, None, :], axis=2)
    columns = columns & (step < mx.sum(real.astype(mx.int32), axis=1)[:, None])[:, None]
    new = mx.arange(capacity, dtype=mx.int32) - lengths[:, None]  # slot -> new token, [B,S]
    index = mx.clip(new, 0, tokens - 1)[:, None]
    pasted = mx.take_along_axis(columns, mx.broadcast_to(index, (*real.shape, capacity)), axis=2)
    inside = (new >= 0) & (new < tokens)
    seen = (new < 0)[:, None] | (pasted & inside[:, None])
    return (seen & real[..., None])[:, None]


def from_tree(parents: mx.array, lengths: mx.array, capacity: int) -> tuple[mx.array, mx.array]:
    """A token tree: each node sees what is cached, its ancestors and itself.

    Two cached slots, the tree `a -> (b -> d, c)`, parents `[-1, 0, 0, 1]`, capacity 7::

        node  position  slot 0 1 2 3 4 5 6
        a            2       x x x . . . .
        b            3       x x x x . . .
        c            3       x x x . x . .
        d            4       x x x x . x .

    Args:
        parents: int32 `[B, T]`: index of the parent within this call, -1 = continues the cached
            text, below -1 = padding.
        lengths: int32 `[B]`, slots filled before this call.
        capacity: S of the cache.

    Returns:
        The mask, bool `[B, 1, T, S]`, and the nodes' positions, int32 `[B, T]`.

    Raises:
        InputError: wrong shapes; where they can be read, parents out of range, padding as a
            parent, or a cycle.
    """
    if parents.ndim != 2 or not mx.issubdtype(parents.dtype, mx.integer):
        raise InputError(
            f"parents: expected int32 [B, T], got {parents.dtype} {list(parents.shape)}"
        )
    check_lengths(lengths, parents.shape[0])
    _check_tree(parents)
    tokens = parents.shape[1]
    node = mx.arange(tokens, dtype=mx.int32)
    real = parents >= -1
    inside = (parents >= 0) & (parents < tokens)  # indices must not leave arrays while traced
    above = mx.where(inside, parents, node).astype(mx.int32)  # [B,T]; a root stays where it is
    sees = (node == node[:, None]) & real[..., None]  # [B,T,T], itself
    for _ in range((tokens - 1).bit_length()):  # ancestors twice as far at every turn
        sees = sees | mx.take_along_axis(sees, above[..., None], axis=1)
        above = mx.take_along_axis(above, above, axis=1)
    depth = mx.sum(sees.astype(mx.int32), axis=2) - 1
    return from_block(sees, lengths, capacity), mx.where(real, lengths[:, None] + depth, 0)


def prefix_lm(
    prefix_lengths: mx.array, valid: mx.array, lengths: mx.array, capacity: int
) -> mx.array:
    """A prefix that sees itself both ways, causal after it (arXiv:1910.10683 §3.2.1).

    An empty cache, four tokens of which three are the prefix, capacity 6::

        token  slot 0 1 2 3 4 5
        0           x x x . . .
        1           x x x . . .
        2           x x x . . .
        3           x x x x . .

    The prefix must fit one call: a token cannot see what a later call will write.

    Args:
        prefix_lengths: int32 `[B]`, counted from the beginning of the row's text.
        valid: `[B, T]` of any dtype, nonzero = real token.
        lengths: int32 `[B]`, slots filled before this call.
        capacity: S of the cache.

    Returns:
        bool `[B, 1, T, S]`.

    Raises:
        InputError: wrong shapes; where it can be read, a prefix that reaches past this call or
            begins in an earlier one.
    """
    mask = causal(valid, lengths, capacity)
    check_lengths(prefix_lengths, valid.shape[0], "prefix_lengths")
    real = valid != 0
    after = lengths + mx.sum(real.astype(mx.int32), axis=1)
    values = read(mx.stack([prefix_lengths, lengths, after]))
    for prefix, before, end in zip(*values, strict=True) if values is not None else ():
        if before < end and before < prefix and (before > 0 or prefix > end):
            raise InputError(
                f"prefix_lm: a prefix of {prefix} tokens must fit one call, this one has "
                f"tokens {before} to {end - 1} of the row: use a larger T"
            )
    inside = mx.arange(capacity, dtype=mx.int32) < prefix_lengths[:, None]  # [B,S]
    return mask | (inside[:, None, None, :] & real[:, None, :, None])


def as_mask(array: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
    """Any attention mask as bool `[B or 1, 1, T, S]`, or as an additive one of `dtype`.

    Three tokens over an empty cache, capacity 4, as floats and as what comes out::

        additive                slot 0 1 2 3
        0  -inf  -inf  -inf          x . . .
        0     0  -1e9  -1e9          x x . .
        0     0     0  -1e4          x x x .

    Args:
        array: `[T, S]`, `[B, T, S]` or `[B, 1, T, S]`. Booleans and integers: nonzero = may
            attend. Floats are additive: 0 = may attend, -1e4 or less (-inf too) = may not.
            Floats and signed integers are looked at once, unless traced.
        dtype: None for bool; a float dtype for the additive form: 0, and half of its least value,
            so that adding a score overflows nowhere. It never widens a compute dtype.

    Raises:
        InputError: wrong rank; a head axis other than 1; a dtype that is not a float; where they
            can be read, biases (ALiBi, for one): they belong to the model; additive integers.
    """
    if dtype is not None and not mx.issubdtype(dtype, mx.floating):
        raise InputError(f"as_mask: dtype: expected a float dtype, or None for bool, got {dtype}")
    if array.ndim == 2:
        array = array[None]
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim != 4 or array.shape[1] != 1:
        raise InputError(
            f"mask: expected [T, S], [B, T, S] or [B, 1, T, S], got {list(array.shape)}"
        )
    _check_kind(array)
    if mx.issubdtype(array.dtype, mx.floating):
        mask = array == 0
    else:
        mask = array if array.dtype == mx.bool_ else array != 0
    if dtype is None:
        return mask
    return mx.where(mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min / 2, dtype))


def _check_kind(array: mx.array) -> None:
    if mx.issubdtype(array.dtype, mx.floating):
        strange = (array != 0) & mx.logical_not(array <= MASKED)
    elif mx.issubdtype(array.dtype, mx.signedinteger):
        strange = array <= MASKED  # `(1 - mask) * -10000` of integers
    else:
        return
    if read(mx.any(strange)):
        value = array.reshape(-1)[mx.argmax(strange.reshape(-1))].item()
        raise InputError(
            f"mask: {array.dtype} with a {value:g}: floats are additive (0 = may attend, -1e4 or "
            "less = may not), other masks hold 0 and 1; biases (ALiBi) belong to the model"
        )


def check_lengths(lengths: mx.array, batch: int, name: str = "lengths") -> None:
    """Raise InputError unless `lengths` is int32 `[B]`."""
    if lengths.shape != (batch,) or lengths.dtype != mx.int32:
        raise InputError(
            f"{name}: expected int32 [{batch}], got {lengths.dtype} {list(lengths.shape)}"
        )


def check_capacity(capacity: int) -> None:
    """Raise InputError unless `capacity` can be that of a cache."""
    if capacity < 1:
        raise InputError(f"capacity: expected the S of the cache, 1 at least, got {capacity}")


def _rows(lengths: mx.array) -> int:
    if lengths.ndim != 1:
        raise InputError(f"lengths: expected int32 [B], got {lengths.dtype} {list(lengths.shape)}")
    return lengths.shape[0]


def _check_tree(parents: mx.array) -> None:
    for row in read(parents) or ():
        sound = {-1}  # leads to the cached text
        for node, parent in enumerate(row):
            path = {node}
            while parent >= -1 and parent not in sound:
                if parent >= len(row) or row[parent] < -1 or parent in path:
                    raise InputError(
                        f"parents: node {node} of {row} does not lead to the cached text: each "
                        f"parent is another node (0 to {len(row) - 1}) or -1, and no padding"
                    )
                path.add(parent)
                parent = row[parent]
            if parent >= -1:
                sound |= path
