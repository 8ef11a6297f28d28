"""Random histories of a batch of three rows, as steps with all their numbers; poisoned slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from funcrt.cache import CacheState, kind_of, state_size
from tests.helpers import POISON, TOLERANCE
from tests.toy_families import CONFIG

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

ROWS, WIDTH, CAPACITIES = 3, 6, (14, 26)


class Kind(NamedTuple):
    """A model and the layout of its cache; how closely chunks must give what one call gives."""

    model_type: str
    kv_bits: int | None = None
    max_tokens: int | None = None
    # Rounding differs by shape; where it tips a packed value, the logits move by a step of that.
    tolerance: float = TOLERANCE

    @property
    def is_recurrent(self) -> bool:
        return self.model_type in ("toy_hybrid", "toy_recurrent")


@dataclass(frozen=True)
class Feed:
    """A call: `valid[row][i]` says which of its tokens are real."""

    tokens: list[list[int]]
    valid: list[list[bool]]


@dataclass(frozen=True)
class Tree:
    """A call with a token tree per row, and the path of each that is kept."""

    tokens: list[list[int]]
    parents: list[list[int]]  # below -1 = padding
    paths: list[list[int]]


@dataclass(frozen=True)
class Trim:
    counts: list[int]


@dataclass(frozen=True)
class Fork:
    source: int
    target: int


@dataclass(frozen=True)
class Grow:
    capacity: int


@dataclass(frozen=True)
class Retry:
    """A snapshot, a call that is taken back, and the call that counts."""

    wrong: Feed
    right: Feed


Step = Feed | Tree | Trim | Fork | Grow | Retry


@dataclass
class Texts:
    """Host mirror while a history is drawn: what each row holds, and had at most."""

    capacity: int = CAPACITIES[0]
    lengths: list[int] = field(default_factory=lambda: [0] * ROWS)
    written: list[int] = field(default_factory=lambda: [0] * ROWS)

    def room(self, row: int) -> int:
        return self.capacity - 1 - self.lengths[row]

    def add(self, row: int, count: int, kept: int) -> None:
        self.written[row] = max(self.written[row], self.lengths[row] + count)
        self.lengths[row] += kept


@st.composite
def histories(draw: st.DrawFn, kind: Kind) -> list[Step]:
    texts = Texts()
    steps: list[Step] = [_draw_feed(draw, texts)]
    names = ["feed", "feed", "feed", "fork", "grow", "retry"]
    names += [] if kind.is_recurrent else ["trim", "tree"]
    for name in draw(st.lists(st.sampled_from(names), min_size=2, max_size=6)):
        if name == "feed":
            steps.append(_draw_feed(draw, texts))
        elif name == "fork":
            source, target = draw(st.permutations(range(ROWS)))[:2]
            for values in (texts.lengths, texts.written):
                values[target] = values[source]
            steps.append(Fork(source, target))
        elif name == "grow":
            texts.capacity = CAPACITIES[1]
            steps.append(Grow(texts.capacity))
        elif name == "retry":
            before = list(texts.lengths)
            wrong = _draw_feed(draw, texts)
            if any(  # what a ring has lost no snapshot brings back
                kind.max_tokens and written - length > kind.max_tokens
                for written, length in zip(texts.written, before, strict=True)
            ):
                steps.append(wrong)
                continue
            texts.lengths = before
            steps.append(Retry(wrong, _draw_feed(draw, texts)))
        elif name == "trim":
            most = [
                length if kind.max_tokens is None
                else min(length, kind.max_tokens - (written - length))
                for length, written in zip(texts.lengths, texts.written, strict=True)
            ]  # fmt: skip
            counts = [draw(st.integers(0, count)) for count in most]
            texts.lengths = [a - b for a, b in zip(texts.lengths, counts, strict=True)]
            steps.append(Trim(counts))
        else:
            steps.append(_draw_tree(draw, texts))
    return [*steps, _draw_feed(draw, texts)]


def _draw_tokens(draw: st.DrawFn, width: int) -> list[list[int]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return rng.integers(0, CONFIG.vocab_size, (ROWS, width)).tolist()


def _draw_feed(draw: st.DrawFn, texts: Texts) -> Feed:
    valid = []
    for row in range(ROWS):
        count = draw(st.integers(0, WIDTH))
        real = draw(st.sampled_from([
            [i < count for i in range(WIDTH)],  # padded on the right
            [i >= WIDTH - count for i in range(WIDTH)],  # on the left
            [bool(0b101101 >> i & count) for i in range(WIDTH)],  # in holes, or idle
        ]))  # fmt: skip
        room = texts.room(row)
        real = [is_real and sum(real[:i]) < room for i, is_real in enumerate(real)]
        texts.add(row, sum(real), sum(real))
        valid.append(real)
    return Feed(_draw_tokens(draw, WIDTH), valid)


def _draw_tree(draw: st.DrawFn, texts: Texts) -> Tree:
    parents, paths = [], []
    for row in range(ROWS):
        size = min(draw(st.integers(0, WIDTH)), texts.room(row))
        tree = [draw(st.integers(-1, node - 1)) for node in range(size)]
        path, node = [], draw(st.integers(-1, size - 1))
        while node >= 0:
            path.insert(0, node)
            node = tree[node]
        texts.add(row, size, len(path))
        parents.append(tree + [-2] * (WIDTH - size))
        paths.append(path)
    return Tree(_draw_tokens(draw, WIDTH), parents, paths)


# --- poison ---------------------------------------------------------------------------------------


def poison(state: CacheState) -> CacheState:
    """`state` with large values in every slot that holds nothing, scratch included."""
    return {
        name: array
        if (held := held_slots(name, state)) is None
        else mx.where(held, array, _large(name, array))
        for name, array in state.items()
    }


def _large(name: str, array: mx.array) -> mx.array:
    large = mx.full((32,), POISON, dtype=mx.float32)
    if array.dtype == mx.uint32 or name.endswith((".scales", ".biases")):
        parts = mx.quantize(large[None], group_size=32, bits=8)
        large = parts[("scales", "biases").index(name.rpartition(".")[2]) + 1
                      if array.dtype != mx.uint32 else 0]  # fmt: skip
    return large.reshape(-1)[0].astype(array.dtype)


def held_slots(name: str, state: CacheState) -> mx.array | None:
    """Which slots of an array hold a token that may still be seen, in a shape that fits it."""
    kind, lengths = kind_of(name), state["lengths"][:, None]
    if kind in ("row", "recurrent"):
        return None
    if kind == "ring":
        size = state[name].shape[2] - 1
        column = mx.arange(size + 1)
        slot = lengths - 1 - (lengths - 1 - column) % size
        held = (slot >= 0) & (slot >= state["written"][:, None] - size) & (column < size)
    else:
        held = mx.arange(state_size(state)[1]) < lengths
    return held if kind == "positions" else held[:, None, :, None]
