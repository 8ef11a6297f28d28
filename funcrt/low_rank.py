"""Low-rank changes (LoRA, arXiv:2106.09685) that stay beside the matrix that they change.

Beside a matrix `NAME` `[O, I]` are `NAME.lora_A` `[r, I]` and `NAME.lora_B` `[O, r]`, and what is
multiplied is the matrix + B A; any scale is in B. Where every row of a batch has a change of its
own choice there are N of them, `[N, r, I]` and `[N, O, r]`, and the cache state says in `adapter`,
int32 `[B]`, which one a row takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import mlx.core as mx

LORA_A, LORA_B = ".lora_A", ".lora_B"
ROWS = "adapter"  # in a cache state
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class Places(NamedTuple):
    """Matrices beside which there can be changes.

    Attributes:
        shared: one change for all rows of a batch.
        by_row: one for each row, too.
    """

    shared: frozenset[str] = frozenset()
    by_row: frozenset[str] = frozenset()


def is_low_rank(name: str) -> bool:
    """Whether a tensor is half of a change."""
    return name.endswith((LORA_A, LORA_B))


def changed(names: Iterable[str]) -> list[str]:
    """The matrices that tensors of these names change, in order."""
    halves = (name.removesuffix(LORA_A).removesuffix(LORA_B) for name in names if is_low_rank(name))
    return list(dict.fromkeys(halves))


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many changes besides none the rows of a batch choose from; 0 where all have the same."""
    stacks = (
        shape[0] - 1 for name, shape in shapes.items() if is_low_rank(name) and len(shape) == 3
    )
    return next(stacks, 0)


def check(
    shapes: Mapping[str, tuple[int, ...]],
    params: Mapping[str, mx.array],
    places: Places,
) -> tuple[dict[str, mx.array], list[str]]:
    """The changes among some params in the order of their matrices, and what is wrong with them.

    Args:
        shapes: `[O, I]` of each matrix.
        params: all tensors.
        places: matrices that can have changes.
    """
    wanted = set(changed(params))
    kept: dict[str, mx.array] = {}
    problems = []
    counts: dict[str, int] = {}
    for name in [name for name in shapes if name in wanted]:
        pair = [params.get(name + half) for half in (LORA_A, LORA_B)]
        a, b = pair
        if a is None or b is None:
            problems.append(f"{name}: needs both {LORA_A[1:]} and {LORA_B[1:]}")
            continue
        kept |= {name + LORA_A: a, name + LORA_B: b}
        outputs, inputs = shapes[name]
        lead = a.shape[:-2]
        if a.ndim not in (2, 3) or a.shape[-1] != inputs:
            problems.append(f"{name}{LORA_A}: expected [r, {inputs}], got {list(a.shape)}")
            continue
        if b.shape != (*lead, outputs, a.shape[-2]):
            expected = [*lead, outputs, a.shape[-2]]
            problems.append(f"{name}{LORA_B}: expected {expected}, got {list(b.shape)}")
        elif a.dtype not in _FLOATS or b.dtype not in _FLOATS:
            problems.append(f"{name}: expected {LORA_A[1:]} and {LORA_B[1:]} of a float dtype")
        elif name not in (places.by_row if lead else places.shared):
            many = " for each row of a batch" if lead and name in places.shared else ""
            problems.append(f"{name}: cannot keep a change beside it{many}; fuse the adapter")
        counts[name] = lead[0] if lead else 0
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count or 'one'}" for name, count in list(counts.items())[:8])
        problems.append(f"all matrices need equally many changes, but there are: {listed}")
    return kept, problems


def add(params: Mapping[str, mx.array], name: str, x: mx.array, y: mx.array) -> mx.array:
    """`y [..., O]`, the product of `x [..., I]` and the matrix `name`, and that with its change.

    Where rows have their own, see `choose`, x is `[B, T, I]`.
    """
    a = params.get(name + LORA_A)
    if a is None:
        return y
    return y + (x @ _turned(a, x.dtype)) @ _turned(params[name + LORA_B], x.dtype)


def _turned(array: mx.array, dtype: mx.Dtype) -> mx.array:
    return array.astype(dtype).swapaxes(-1, -2)


def add_rows(
    params: Mapping[str, mx.array], name: str, index: mx.array, rows: mx.array
) -> mx.array:
    """`rows [..., I]`, those at `index` of the matrix `name`, and those of its change."""
    a = params.get(name + LORA_A)
    if a is None:
        return rows
    return rows + params[name + LORA_B][index].astype(rows.dtype) @ a.astype(rows.dtype)


def choose(params: Mapping[str, mx.array], index: mx.array) -> dict[str, mx.array]:
    """The same params with `[B, r, I]` and `[B, O, r]` where there were N changes to choose from.

    An `index` (int32 `[B]`) out of range, which nothing can refuse here, takes the nearest.
    """

    def rows_of(array: mx.array) -> mx.array:
        return array[mx.clip(index, 0, array.shape[0] - 1)]

    return {
        name: rows_of(array) if is_low_rank(name) and array.ndim == 3 else array
        for name, array in params.items()
    }


def take_last(state: dict[str, mx.array]) -> dict[str, mx.array]:
    """A state whose rows all take the last change, if they choose: what golden calls run with."""
    if ROWS not in state:
        return state
    return {**state, ROWS: mx.full(state[ROWS].shape, 2**31 - 1, dtype=mx.int32)}


def fuse(params: dict[str, mx.array], fused: str, outputs: Mapping[str, int]) -> None:
    """Stack the changes of matrices that are being stacked into `fused`, in place.

    Their A go on top of each other, their B become the blocks of one: two products, however many
    matrices there are, and nothing to put side by side. The zeros cost less than that.

    Args:
        params: the changes of the members are taken out.
        fused: of the stack.
        outputs: the members in order, and how many rows each has.
    """
    pairs = {name: _pop(params, name) for name in outputs}
    found = [pair for pair in pairs.values() if pair is not None]
    if not found:
        return
    total = sum(a.shape[-2] for a, _ in found)
    blocks, before = [], 0
    for name, rows in outputs.items():
        pair = pairs[name]
        if pair is None:
            like = found[0][1]
            blocks.append(mx.zeros((*like.shape[:-2], rows, total), like.dtype))
            continue
        b = pair[1]
        sides = (before, total - before - b.shape[-1])
        blocks.append(mx.pad(b, [*[(0, 0)] * (b.ndim - 1), sides]))
        before += b.shape[-1]
    params[fused + LORA_A] = mx.concatenate([a for a, _ in found], axis=-2)
    params[fused + LORA_B] = mx.concatenate(blocks, axis=-2)


def _pop(params: dict[str, mx.array], name: str) -> tuple[mx.array, mx.array] | None:
    if name + LORA_A not in params:
        return None
    return params.pop(name + LORA_A), params.pop(name + LORA_B)
