"""One model per kind of cache, registered toy families included, and causal calls on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from funcrt import masks
from funcrt.cache import CacheState, state_size
from funcrt.model import Model
from tests.helpers import Array, ids, make_params, random_tokens, to_numpy
from tests.toy_families import CONFIG, make_toy

import mlx.core as mx
import numpy as np

WINDOW, MOST = 7, 6  # of the mistral: its ring has R = 12 slots


@cache
def model_of(model_type: str, dtype: str = "float32", head_dim: int = 32) -> Model:
    if model_type.startswith("toy"):
        return make_toy(model_type, dtype=dtype)
    window = WINDOW if model_type == "mistral" else None
    config = replace(
        CONFIG, model_type=model_type, sliding_window=window, dtype=dtype, head_dim=head_dim
    )
    return Model(config, make_params(config, dtype))


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [token % CONFIG.vocab_size for token in random_tokens(count, seed)]


def feed(
    model: Model,
    state: CacheState,
    rows: Sequence[Sequence[int]],
    side: str = "right",
    width: int | None = None,
) -> tuple[mx.array, CacheState]:
    """One causal call; an empty row is idle. Logits `[B, T, V]` and the new state."""
    width = max(map(len, rows)) if width is None else width
    padded, valid = [], []
    for row in rows:
        gap, real = [0] * (width - len(row)), [1] * len(row)
        padded.append([*gap, *row] if side == "left" else [*row, *gap])
        valid.append([*gap, *real] if side == "left" else [*real, *gap])
    mask = masks.causal(mx.array(valid), state["lengths"], state_size(state)[1])
    return model.forward(model.params, ids(*padded), mask, state)


def feed_pieces(
    model: Model, state: CacheState, tokens: Sequence[int], sizes: Sequence[int]
) -> tuple[Array, CacheState]:
    """Logits [T, V] of one row fed in pieces."""
    pieces, start = [], 0
    for size in sizes:
        logits, state = feed(model, state, [tokens[start : start + size]])
        pieces.append(to_numpy(logits[0]))
        start += size
    assert start == len(tokens)
    return np.concatenate(pieces), state
