"""Tiny models with every kind of cache, and texts fed to them in one fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as memo
from typing import Any, NamedTuple

from funcrt import cache, masks
from funcrt.cache import CacheState
from funcrt.model import Model
from tests.helpers import Array, make_model, to_numpy

import mlx.core as mx
import numpy as np

BATCH, TOKENS, CAPACITY = 3, 5, 48
WINDOW = 6  # with calls of five tokens a ring has ten slots
MISTRAL = {"model_type": "mistral", "sliding_window": WINDOW}
PACKED = {"head_dim": 32, "num_heads": 2, "num_kv_heads": 1}


class Kind(NamedTuple):
    """A model and the layout of its cache."""

    changes: dict[str, Any]
    layout: dict[str, int]


CACHES = {
    "full": Kind({}, {}),
    "window": Kind(MISTRAL, {}),
    "ring": Kind(MISTRAL, {"max_tokens": TOKENS}),
    "kv8": Kind(PACKED, {"kv_bits": 8}),
    "kv4": Kind(PACKED, {"kv_bits": 4}),
}


@memo
def model_of(kind: str) -> Model:
    return make_model("float32", **CACHES[kind].changes)


def empty(kind: str, batch: int = BATCH, capacity: int = CAPACITY) -> CacheState:
    return model_of(kind).init_cache(batch, capacity, **CACHES[kind].layout)


def feed(model: Model, state: CacheState, *texts: Sequence[int]) -> tuple[list[Array], CacheState]:
    """Run a text per row in calls of `TOKENS`; logits [n, V] by row, and the state."""
    calls = max(1, -(-max(map(len, texts)) // TOKENS))
    parts: list[list[Array]] = [[] for _ in texts]
    for start in range(0, calls * TOKENS, TOKENS):
        chunks = [list(text[start : start + TOKENS]) for text in texts]
        ids = mx.array([chunk + [0] * (TOKENS - len(chunk)) for chunk in chunks], dtype=mx.int32)
        new = mx.array([len(chunk) for chunk in chunks], dtype=mx.int32)
        capacity = cache.state_size(state)[1]
        mask = masks.from_lengths(new, TOKENS, state["lengths"], capacity)
        logits, state = model.forward(model.params, ids, mask, state)
        mx.eval(logits, state)
        for part, chunk, row in zip(parts, chunks, to_numpy(logits), strict=True):
            part.append(row[: len(chunk)])
    return [np.concatenate(part) for part in parts], state


def fresh(kind: str, *texts: Sequence[int], capacity: int = CAPACITY) -> list[Array]:
    """Logits of texts from an empty cache."""
    return feed(model_of(kind), empty(kind, len(texts), capacity), *texts)[0]


def spoil(state: CacheState, row: int) -> CacheState:
    """NaN wherever a row can hold it."""
    spoiled = {}
    for name, array in state.items():
        if mx.issubdtype(array.dtype, mx.floating):
            chosen = (mx.arange(array.shape[0]) == row).reshape(-1, *[1] * (array.ndim - 1))
            array = mx.where(chosen, mx.nan, array).astype(array.dtype)
        spoiled[name] = array
    return spoiled


def row_of(state: CacheState, row: int) -> dict[str, Array]:
    return {name: np.array(array.astype(mx.float32))[row] for name, array in state.items()}
