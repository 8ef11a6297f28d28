"""Random histories of a batch, for every kind of cache: each row is what it would be alone.

A history is a list of steps on three rows: ragged calls with padding anywhere, idle rows, token
trees, trims, rollbacks, forks and grows, with every unused slot poisoned before each call. It is
run as drawn, and again once per row with that row alone in the same buckets, its padding on the
right: logits and what the cache holds must be bitwise the same. Logits are also compared, within
tolerance, with one uncached call over the row's text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

from funcrt import cache as caches
from funcrt import masks
from funcrt.cache import CacheState, state_size
from funcrt.cache.layout import kind_of
from funcrt.model import Model
from tests.helpers import POISON, TOLERANCE, Array, make_params, to_numpy
from tests.toy_families import CONFIG, make_toy, registered

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS, WIDTH, CAPACITIES = 3, 6, (14, 26)
WINDOW = 7
Forward = Callable[..., tuple[mx.array, CacheState]]


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


KINDS = {
    "full": Kind("llama"),
    "window": Kind("mistral"),
    "ring": Kind("mistral", max_tokens=WIDTH),
    "quantized8": Kind("llama", kv_bits=8, tolerance=2e-3),
    "quantized4": Kind("llama", kv_bits=4, tolerance=2e-2),
    "latent": Kind("toy_latent"),
    "hybrid": Kind("toy_hybrid"),
    "recurrent": Kind("toy_recurrent"),
}


@pytest.fixture(scope="module", autouse=True)
def _families() -> Iterator[None]:
    with registered():
        yield


@cache
def model_of(model_type: str) -> Model:
    if model_type.startswith("toy"):
        return make_toy(model_type)
    window = WINDOW if model_type == "mistral" else None
    config = replace(CONFIG, model_type=model_type, sliding_window=window)
    return Model(config, make_params(config))


@cache
def forward_of(model_type: str, form: str) -> Forward:
    model = model_of(model_type)
    forward = partial(model.forward, model.prepared)
    return forward if form == "eager" else mx.compile(forward)


@cache
def expected(kind: Kind, text: tuple[int, ...]) -> Array:
    """Logits `[T, V]` of one uncached call, without a ring."""
    model = model_of(kind.model_type)
    state = model.init_cache(1, len(text) + 1, kv_bits=kind.kv_bits)
    mask = masks.causal(mx.ones((1, len(text))), state["lengths"], state_size(state)[1])
    logits, _ = model.forward(model.params, mx.array([text], dtype=mx.int32), mask, state)
    return to_numpy(logits[0])


# --- histories ------------------------------------------------------------------------------------


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


# --- running them ---------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Logits `[n, V]` of a row's tokens in one call, and the text that each of them ends."""

    row: int
    logits: Array
    texts: list[list[int]]


class Batch:
    """Runs a history, `rows` of it (the others stay idle), and collects what it answers."""

    def __init__(self, kind: Kind, form: str, poisoned: bool) -> None:
        model = model_of(kind.model_type)
        self.forward = forward_of(kind.model_type, form)
        self.state = model.init_cache(ROWS, CAPACITIES[0], kind.kv_bits, kind.max_tokens)
        self.texts: list[list[int]] = [[] for _ in range(ROWS)]
        self.poisoned = poisoned

    def run(self, step: Step) -> list[Answer]:
        """One answer per row that had tokens."""
        if isinstance(step, Feed):
            return self._feed(step)
        if isinstance(step, Tree):
            return self._grow_tree(step)
        if isinstance(step, Retry):
            saved, texts = caches.snapshot(self.state), [list(text) for text in self.texts]
            wrong = self._feed(step.wrong)
            self.state, self.texts = caches.restore(self.state, saved), texts
            return [*wrong, *self._feed(step.right)]
        if isinstance(step, Trim):
            assert caches.can_trim(self.state, step.counts).item()
            self.state = caches.trim(self.state, step.counts)
            for text, count in zip(self.texts, step.counts, strict=True):
                del text[len(text) - count :]
        elif isinstance(step, Fork):
            self.state = caches.fork(self.state, step.source, step.target)
            self.texts[step.target] = list(self.texts[step.source])
        else:
            self.state = caches.grow(self.state, step.capacity)
        return []

    def _feed(self, step: Feed) -> list[Answer]:
        mask = masks.causal(mx.array(step.valid), self.state["lengths"], self._capacity())
        logits = self._call(step.tokens, mask)
        answers = []
        for row, valid in enumerate(step.valid):
            texts = []
            for token, real in zip(step.tokens[row], valid, strict=True):
                if real:
                    self.texts[row].append(token)
                    texts.append(list(self.texts[row]))
            if texts:
                answers.append(Answer(row, logits[row][np.array(valid)], texts))
        return answers

    def _grow_tree(self, step: Tree) -> list[Answer]:
        before = self.state["lengths"] + 0
        mask, positions = masks.from_tree(mx.array(step.parents), before, self._capacity())
        logits = self._call(step.tokens, mask, positions)
        answers, slots = [], []
        for row, (tokens, parents) in enumerate(zip(step.tokens, step.parents, strict=True)):
            texts: list[list[int]] = []
            for token, parent in zip(tokens, parents, strict=True):
                if parent >= -1:
                    texts.append([*(self.texts[row] if parent < 0 else texts[parent]), token])
            if texts:
                answers.append(Answer(row, logits[row][: len(texts)], texts))
            path = step.paths[row]
            self.texts[row] = list(texts[path[-1]] if path else self.texts[row])
            first = before[row].item()
            slots.append([*(first + node for node in path), *[-1] * (WIDTH - len(path))])
        self.state = caches.keep(self.state, mx.array(slots), before)
        return answers

    def _call(self, tokens: list[list[int]], *inputs: mx.array) -> Array:
        mask, *positions = inputs
        state = poison(self.state) if self.poisoned else self.state
        logits, self.state = self.forward(mx.array(tokens), mask, state, *positions)
        return to_numpy(logits)

    def _capacity(self) -> int:
        return state_size(self.state)[1]


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


def contents(state: CacheState, row: int) -> dict[str, Array]:
    """What a row's cache holds, zeros elsewhere."""
    found = {}
    for name, array in state.items():
        held = held_slots(name, state)
        kept = array if held is None else mx.where(held, array, mx.zeros_like(array))
        floating = mx.issubdtype(kept.dtype, mx.floating)
        found[name] = np.array(kept[row].astype(mx.float32) if floating else kept[row])
    return found


def only(step: Step, row: int) -> Step:
    """The same step with all other rows idle, and this one padded on the right."""
    if isinstance(step, Retry):
        wrong, right = only(step.wrong, row), only(step.right, row)
        assert isinstance(wrong, Feed)
        assert isinstance(right, Feed)
        return Retry(wrong, right)
    if isinstance(step, Feed):
        real = [t for t, valid in zip(step.tokens[row], step.valid[row], strict=True) if valid]
        tokens, valid = [[0] * WIDTH for _ in range(ROWS)], [[False] * WIDTH for _ in range(ROWS)]
        tokens[row][: len(real)] = real
        valid[row][: len(real)] = [True] * len(real)
        return Feed(tokens, valid)
    if isinstance(step, Tree):
        idle: Any = [[-2] * WIDTH, []]
        rows = [(step.parents[r], step.paths[r]) if r == row else tuple(idle) for r in range(ROWS)]
        return Tree(step.tokens, [list(p) for p, _ in rows], [list(p) for _, p in rows])
    if isinstance(step, Trim):
        return Trim([count if r == row else 0 for r, count in enumerate(step.counts)])
    return step


def lineage(steps: list[Step], row: int) -> list[int]:
    """In which row the text of the final `row` stands at every step."""
    places: list[int] = []
    for step in reversed(steps):
        if isinstance(step, Fork) and step.target == row:
            row = step.source
        places.insert(0, row)
    return places


def check_history(kind: Kind, form: str, steps: list[Step]) -> None:
    batch = Batch(kind, form, poisoned=True)
    answers = [batch.run(step) for step in steps]
    for row in range(ROWS):
        places = lineage(steps, row)
        alone = Batch(kind, form, poisoned=False)
        for step, place, together in zip(steps, places, answers, strict=True):
            if isinstance(step, Fork):
                if step.source == place:
                    alone.run(step)
                continue
            ours = [answer for answer in together if answer.row == place]
            theirs = alone.run(only(step, place))
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.texts == other.texts
                np.testing.assert_array_equal(mine.logits, other.logits)
        assert alone.texts[row] == batch.texts[row]
        held, expected_held = contents(batch.state, row), contents(alone.state, row)
        for name, array in held.items():
            np.testing.assert_array_equal(array, expected_held[name], err_msg=name)
    for answer in (answer for step in answers for answer in step):
        for logits, text in zip(answer.logits, answer.texts, strict=True):
            reference = expected(kind, tuple(text))[-1]
            error = np.abs(logits - reference).max() / np.abs(reference).max()
            assert error <= kind.tolerance, f"{error:.1e} at {text}"


@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.parametrize("name", KINDS)
def test_every_row_is_what_it_would_be_alone(name: str, form: str) -> None:
    kind = KINDS[name]

    @settings(max_examples=15 if form == "eager" else 8)
    @given(steps=histories(kind))
    def check(steps: list[Step]) -> None:
        check_history(kind, form, steps)

    check()
