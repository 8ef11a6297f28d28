"""Attention of one token of each row on CUDA, as one kernel that reads only the slots that show.

MLX's own attention with a mask goes through cuDNN there: 15 to 20 us of the host's time a call, and
every slot of the cache is read. This kernel takes 4 us, and its work grows with what is held.
A block has the query heads of one key head, up to eight, over one share of the slots; a second
kernel puts the shares of long caches together. (Clusters of blocks would do without it, but MLX's
CUDA graphs are updated wrongly where only some kernels have them.) Each warp looks at 16 slots at a
time, multiplies by tensor cores, and keeps a softmax of its own (arXiv:1805.02867) until all are
put together. Weights are multiplied in two parts of 16 bits, so that they lose next to nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from funcrt.ops import kernels
from funcrt.ops.one_token_source import (
    COUNTED,
    HEADER,
    JOIN,
    MASKED,
    POWER,
    SHARE,
    SOURCE,
    TYPES,
    UNPACK,
    WHOLE,
)

import mlx.core as mx

_WIDTHS = (64, 128, 256)
_MOST_HEADS = 8  # of a block, half the rows that a tensor core multiplies
_VALUES = 1024  # D times warps of a block: what a warp adds up is in registers
_SLOTS = 16  # that a warp looks at together
# Turns of a block's loop, 1 us each. Shares cost a second kernel, and of many rows more than they
# bring: 2304 slots of 128 take about 22 us whole and 14 in four shares, 39 and 49 where 16 rows are
# decoded together. A row must be split alike in both.
_FEWEST_TURNS, _TURNS_OF_SHARE = 12, 4
_BLOCKS = 132  # of a row: one for each multiprocessor of an H100 or H200


class Held(NamedTuple):
    """Slots that show, of one token of each row: all up to its own.

    Attributes:
        writes: int32 `[B]`, its own slot, which it sees if it sees nothing else.
        sees: int32 `[B]`, how many slots it sees.
    """

    writes: mx.array
    sees: mx.array


Shown: TypeAlias = mx.array | Held
"""A mask, bool `[B, 1, 1, S]`, each row of which shows something; or what is known without one."""


def supports(q: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel is for these shapes and dtypes."""
    return (
        q.shape[2] == 1
        and q.shape[3] in _WIDTHS
        and values.shape == keys.shape
        and q.dtype in (mx.bfloat16, mx.float16)
        and q.dtype == keys.dtype == values.dtype
    )


def attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    shown: Shown,
    scale: float,
) -> mx.array:
    """What one query of each row and head sees. CUDA only; it does not differentiate.

    Args:
        q: `[B, H, 1, D]`.
        keys: `[B, K, S, D]`, in row order.
        values: likewise.
        shown: of the slots.
        scale: of the scores.

    Returns:
        `[B, H, 1, D]`.
    """
    batch, heads, _, width = q.shape
    constants = _choose_shape(heads, keys)
    each, shares = constants["G"], constants["SHARES"]
    blocks, threads = heads // each, 32 * constants["WARPS"]
    inputs = [q, keys, values, *(shown if isinstance(shown, Held) else (shown,))]
    source = HEADER + SOURCE
    shown_by = COUNTED if isinstance(shown, Held) else MASKED
    by_type = {"UNPACK": UNPACK[q.dtype], "TYPE": TYPES[q.dtype]}
    for word, piece in {**shown_by, **(WHOLE if shares == 1 else SHARE), **by_type}.items():
        source = source.replace(word, piece)
    out = (q.shape, q.dtype)
    part = (batch, blocks, shares, each)
    found = kernels.run(
        "attend" if shares == 1 else "attend_share",
        POWER + source,
        {"T": q.dtype, **constants},
        inputs,
        [keys.shape[2], scale * math.log2(math.e)],
        [out] if shares == 1 else [((*part, width), mx.float32), ((*part, 2), mx.float32)],
        blocks=(blocks, batch, shares),
        threads=threads,
    )
    if shares == 1:
        return found[0]
    sizes = {key: constants[key] for key in ("D", "G", "SHARES")}
    return kernels.run(
        "attend_join", POWER + JOIN, {"T": q.dtype, **sizes},
        found, [], [out], blocks=(batch * blocks, 1, 1), threads=threads,
    )[0]  # fmt: skip


def _choose_shape(heads: int, keys: mx.array) -> dict[str, int]:
    """Constants of the kernel, whatever the batch is: a row is bit for bit what it is alone."""
    _, groups, capacity, width = keys.shape
    together = heads // groups
    each = max(n for n in range(1, _MOST_HEADS + 1) if together % n == 0)
    warps, blocks = _VALUES // width, heads // each
    turns = capacity // (warps * _SLOTS)
    most = _BLOCKS // blocks if turns >= _FEWEST_TURNS else 1
    return {
        "D": width, "G": each, "WARPS": warps, "SPLIT": together // each,
        "SHARES": max(1, min(most, turns // _TURNS_OF_SHARE)),
    }  # fmt: skip
