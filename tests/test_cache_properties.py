"""Random histories of a batch, for every kind of cache: each row is what it would be alone.

A history is a list of steps on three rows: ragged calls with padding anywhere, idle rows, token
trees, trims, rollbacks, forks and grows, with every unused slot poisoned before each call. It is
run as drawn, and again once per row with that row alone in the same buckets, its padding on the
right: logits and what the cache holds must be bitwise the same. Logits are also compared, within
tolerance, with one uncached call over the row's text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from funcrt import cache as caches
from funcrt import masks
from funcrt.cache import CacheState, state_size
from tests.cache_calls import model_of
from tests.cache_histories import (
    CAPACITIES,
    ROWS,
    WIDTH,
    Feed,
    Fork,
    Kind,
    Retry,
    Step,
    Tree,
    Trim,
    held_slots,
    histories,
    poison,
)
from tests.helpers import Array, to_numpy
from tests.toy_families import registered

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

Forward = Callable[..., tuple[mx.array, CacheState]]

# How often each form is drawn, and the dtype that it runs in.
FORMS = {"eager": (15, "float32"), "compiled": (8, "float32"), "half": (4, "float16")}
HALF_TOLERANCE = 2e-2  # between two ways to round in float16; rows alone are still bitwise the same
KINDS = {
    "full": Kind("llama"),
    "window": Kind("mistral"),
    "ring": Kind("mistral", max_tokens=WIDTH),
    "quantized8": Kind("llama", kv_bits=8, tolerance=1e-2),
    "quantized4": Kind("llama", kv_bits=4, tolerance=1e-1),
    "window8": Kind("mistral", kv_bits=8, tolerance=1e-2),
    "latent": Kind("toy_latent"),
    "hybrid": Kind("toy_hybrid"),
    "recurrent": Kind("toy_recurrent"),
}


@pytest.fixture(scope="module", autouse=True)
def _families() -> Iterator[None]:
    with registered():
        yield


@cache
def forward_of(model_type: str, form: str) -> Forward:
    model = model_of(model_type, FORMS[form][1])
    forward = partial(model.forward, model.prepared)
    return mx.compile(forward) if form == "compiled" else forward


@cache
def expected(kind: Kind, dtype: str, text: tuple[int, ...]) -> Array:
    """Logits `[T, V]` of one uncached call, without a ring."""
    model = model_of(kind.model_type, dtype)
    state = model.init_cache(1, len(text) + 1, kv_bits=kind.kv_bits)
    mask = masks.causal(mx.ones((1, len(text))), state["lengths"], state_size(state)[1])
    logits, _ = model.forward(model.params, mx.array([text], dtype=mx.int32), mask, state)
    return to_numpy(logits[0])


# --- running them ---------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Logits `[n, V]` of a row's tokens in one call, and the text that each of them ends."""

    row: int
    logits: Array
    texts: list[list[int]]


class Batch:
    """Runs a history, `rows` of it (the others stay idle), and collects what it answers."""

    def __init__(self, kind: Kind, form: str, poisoned: bool) -> None:
        model = model_of(kind.model_type, FORMS[form][1])
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
    dtype = FORMS[form][1]
    tolerance = kind.tolerance if dtype == "float32" else HALF_TOLERANCE
    for answer in (answer for step in answers for answer in step):
        for logits, text in zip(answer.logits, answer.texts, strict=True):
            reference = expected(kind, dtype, tuple(text))[-1]
            error = np.abs(logits - reference).max() / np.abs(reference).max()
            assert error <= tolerance, f"{error:.1e} at {text}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KINDS)
def test_every_row_is_what_it_would_be_alone(name: str, form: str) -> None:
    kind = KINDS[name]

    @settings(max_examples=FORMS[form][0])
    @given(steps=histories(kind))
    def check(steps: list[Step]) -> None:
        check_history(kind, form, steps)

    check()
