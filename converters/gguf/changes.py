"""What converters to GGUF do to tensors, undone.

A change takes the parts of one tensor (see `tensors.Parts`) and the Hugging Face config. Orders of
rows work on packed matrices too; changes of values and shapes need the dense tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from converters.gguf.tensors import Parts
from funcrt.errors import ParamsError
from funcrt.packing import dequantize, quantization_of

import mlx.core as mx
import numpy as np

Config = dict[str, Any]
Change = Callable[[Parts, Config], Parts]
Join = Callable[[Sequence[Parts], Config], Parts]


def dense(parts: Parts, inputs: int | None = None) -> mx.array:
    """The tensor itself, expanded to float32 if it is packed in `inputs` columns."""
    if "" in parts:
        return parts[""]
    if inputs is None:  # GGUF's packed types all have groups of 32
        inputs = parts["scales"].shape[-1] * 32
    params = {f"x.{part}": array for part, array in parts.items()}
    packing = quantization_of(params, "x", inputs)
    assert packing is not None
    return dequantize(params, "x", packing)


def values(change: Callable[[mx.array, Config], mx.array]) -> Change:
    """A change of the dense tensor."""

    def apply(parts: Parts, config: Config) -> Parts:
        return {"": change(dense(parts), config)}

    return apply


def minus_one(x: mx.array, config: Config) -> mx.array:
    """Norms that multiply by 1 + w are stored as that sum."""
    return x.astype(mx.float32) - 1


def flat(x: mx.array, config: Config) -> mx.array:
    """`[..., 1]` or `[groups, width]` -> one dimension."""
    return x.reshape(-1)


def channels(x: mx.array, config: Config) -> mx.array:
    """Convolutions `[C, k]` -> `[C, 1, k]`."""
    return x.reshape(x.shape[0], 1, x.shape[-1])


def log_decay(x: mx.array, config: Config) -> mx.array:
    """`-exp(A_log)` -> `A_log`."""
    return mx.log(-x.astype(mx.float32)).reshape(-1)


def one_row(x: mx.array, config: Config) -> mx.array:
    """`[E]` -> `[1, E]`."""
    return x.reshape(1, -1)


def transposed(parts: Parts, config: Config) -> Parts:
    """`[O, I]` -> `[I, O]`, as families want dense matrices but not packed ones."""
    return {"": parts[""].swapaxes(-1, -2)} if "" in parts else parts


def unpermuted(key: str) -> Change:
    """Undo the order of rows where dimensions i and i + D/2 of a head are neighbours.

    Args:
        key: of the config, for the number of heads in the rows.

    Raises ParamsError when the rows do not divide.
    """

    def apply(parts: Parts, config: Config) -> Parts:
        heads, count = config[key], _rows(parts)
        if count % (2 * heads):
            raise ParamsError(f"{count} rows are not {heads} heads of an even size")
        order = np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(-1)
        return reordered(parts, order)

    return apply


def by_heads(parts: Parts, config: Config) -> Parts:
    """Rows of all queries, keys, values -> the query, key and value of each head in turn."""
    heads, count = config["num_attention_heads"], _rows(parts)
    if count % (3 * heads):
        raise ParamsError(f"{count} rows are not queries, keys and values of {heads} heads")
    order = np.arange(count).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)
    return reordered(parts, order)


def tiled(place: str, width: str | None = None) -> Change:
    """Value heads from the order in which ggml repeats key heads to the groups of each key head.

    Args:
        place: "rows", "columns", or "last" for those that follow queries and keys in the rows.
        width: key of the config for the rows of a head; None is one.
    """

    def apply(parts: Parts, config: Config) -> Parts:
        keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size = 1 if width is None else config[width]
        before = 2 * keys * config["linear_key_head_dim"] if place == "last" else 0
        columns = place == "columns"
        found = dense(parts).shape[-1] if columns else _rows(parts)
        if found != before + heads * size or heads % keys:
            raise ParamsError(
                f"{found} {'columns' if columns else 'rows'} are not {heads} heads of {size}"
                + f" after {before} others" * bool(before)
            )
        order = np.arange(heads * size).reshape(-1, keys, size).swapaxes(0, 1).reshape(-1)
        if columns:
            if size % 32:  # groups of packed columns would be torn
                parts = {"": dense(parts)}
            return {
                part: a.reshape(-1, heads // keys, keys, a.shape[-1] // heads)
                .swapaxes(1, 2)
                .reshape(a.shape)
                for part, a in parts.items()
            }
        return reordered(parts, np.concatenate([np.arange(before), before + order]))

    return apply


def chain(*changes: Change) -> Change:
    """Several changes, one after another."""

    def apply(parts: Parts, config: Config) -> Parts:
        for change in changes:
            parts = change(parts, config)
        return parts

    return apply


def reordered(parts: Parts, order: np.ndarray[Any, Any]) -> Parts:
    """The same rows (first axis) in another order."""
    index = mx.array(order.astype(np.int32))
    return {part: array[index] for part, array in parts.items()}


def _rows(parts: Parts) -> int:
    return next(iter(parts.values())).shape[0]


# --- several tensors -> one ----------------------------------------------------------------------


def same_form(tensors: Sequence[Parts]) -> list[Parts]:
    """The tensors as they are if they are packed alike, else dense."""
    forms = {tuple((part, a.shape, a.dtype) for part, a in parts.items()) for parts in tensors}
    return list(tensors) if len(forms) == 1 else [{"": dense(parts)} for parts in tensors]


def in_turns(tensors: Sequence[Parts], config: Config) -> Parts:
    """Stacks `[X, F, E]` of gates and of ups -> `[X, E, 2 F]` dense, `[X, 2 F, E]` packed."""
    gate, up = same_form(tensors)
    joined = {
        part: mx.stack([gate[part], up[part]], axis=2).reshape(
            gate[part].shape[0], -1, gate[part].shape[2]
        )
        for part in gate
    }
    return transposed(joined, config)


def biases_in_turns(tensors: Sequence[Parts], config: Config) -> Parts:
    """`[X, F]` of gates and of ups -> `[X, 2 F]`."""
    gate, up = (dense(parts) for parts in tensors)
    return {"": mx.stack([gate, up], axis=-1).reshape(gate.shape[0], -1)}


def latent_maps(tensors: Sequence[Parts], config: Config) -> Parts:
    """Per head, keys `[H, L, N]` (transposed) and values `[H, V, L]` -> `[H (N + V), L]`."""
    keys, values_ = (dense(parts) for parts in tensors)
    joined = mx.concatenate([keys.swapaxes(1, 2), values_], axis=1)
    return {"": joined.reshape(-1, joined.shape[-1])}


def after_each_other(tensors: Sequence[Parts], config: Config) -> Parts:
    """Stacks `[X, F, E]` of gates and of ups -> `[X, 2 F, E]`."""
    gate, up = same_form(tensors)
    return {part: mx.concatenate([gate[part], up[part]], axis=1) for part in gate}


def by_key_heads(tensors: Sequence[Parts], config: Config) -> Parts:
    """Rows of all queries, keys, values and rows of all gates -> those of each key head in turn."""
    heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values_ = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    found = [_rows(parts) for parts in tensors]
    if found != [2 * heads * size + values_, values_] or values_ % heads:
        raise ParamsError(
            f"{found} rows are not {heads} heads of {size} in queries and in keys, "
            f"with {values_} values and as many gates"
        )
    starts = np.cumsum([0, heads * size, heads * size, values_, values_])
    order = np.concatenate(
        [np.arange(start, end).reshape(heads, -1) for start, end in pairwise(starts)],
        axis=1,
    )
    mixed, gate = tensors if _alike(tensors) else [{"": dense(parts)} for parts in tensors]
    joined = {part: mx.concatenate([mixed[part], gate[part]]) for part in mixed}
    return reordered(joined, order.reshape(-1))


def _alike(tensors: Sequence[Parts]) -> bool:
    """Whether rows of the tensors can be put together as they are."""
    forms = {tuple((part, a.shape[1:], a.dtype) for part, a in parts.items()) for parts in tensors}
    return len(forms) == 1
