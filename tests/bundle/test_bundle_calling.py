"""`logits, cache = bundle(tokens, mask, cache)`: what works on a model works on its bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcrt import cache as caches
from funcrt import masks
from funcrt.bundle import Bundle, load_bundle
from funcrt.cache import state_size
from funcrt.errors import CapacityError, InputError
from funcrt.model import Model
from tests.bundle.conftest import Exports
from tests.helpers import (
    TINY,
    TOLERANCE,
    assert_same,
    expand,
    oracle,
    random_tokens,
    relative_error,
    run_plain,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

ROWS = [random_tokens(6, 1), random_tokens(3, 2)]
LEFT = mx.array([[1] * 6, [0] * 3 + [1] * 3], dtype=mx.int16)


def pad_left(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max(map(len, rows))
    return [[95] * (width - len(row)) + list(row) for row in rows]


@pytest.fixture(params=["model", "bundle"])
def runner(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_the_call_that_people_write_first(model: Model, runner: Any) -> None:
    """Left-padded prompts, an int16 mask, no cache yet; then token by token until it grows."""
    logits, state = runner(pad_left(ROWS), mask=LEFT, cache=None)
    assert logits.shape == (2, 6, TINY.vocab_size)
    smallest = 256 if isinstance(runner, Model) else 16
    assert state_size(state) == (2, smallest)
    texts = [list(row) for row in ROWS]
    for row, text in enumerate(texts):
        expected = run_plain(model, text)[0]
        assert relative_error(logits[row, -len(text) :], expected) <= TOLERANCE
    for step in range(14):
        active = [1, step % 3 != 0]  # one row pauses
        tokens = [random_tokens(2, 100 + step)[row : row + 1] for row in range(2)]
        logits, state = runner(tokens, mask=mx.array(active)[:, None], cache=state)
        for row, text in enumerate(texts):
            text.extend(tokens[row] if active[row] else [])
    assert state["lengths"].tolist() == [len(text) for text in texts] == [20, 12]
    assert state_size(state) == (2, 256 if isinstance(runner, Model) else 32)
    for row, text in enumerate(texts):
        assert relative_error(logits[row, 0], run_plain(model, text)[0][-1]) <= TOLERANCE


def test_tokens_alone(model: Model, runner: Any) -> None:
    logits, state = runner(ROWS[0])
    assert state["lengths"].tolist()[0] == 6
    assert relative_error(logits[0], run_plain(model, ROWS[0])[0]) <= TOLERANCE


def forms(visible: np.ndarray[Any, Any], capacity: int) -> list[mx.array]:
    """One visibility [T, T], in the shapes and dtypes that masks come in."""
    wide = np.zeros((len(visible), capacity), bool)
    wide[:, : len(visible)] = visible
    see = mx.array(wide)
    low = mx.where(see, 0.0, float("-inf"))
    return [
        see[None, None],
        see[None],
        see,
        see.astype(mx.int16),
        low,
        low[None].astype(mx.bfloat16),
        low[None, None],
        mx.where(see, 0.0, -1e4)[None, None].astype(mx.float16),
    ]


@pytest.mark.parametrize("fresh", [True, False])
def test_attention_masks_of_every_form(model: Model, runner: Any, fresh: bool) -> None:
    tokens = random_tokens(5)
    visible = np.tril(np.ones((5, 5), bool))
    visible[:2, :2] = True
    visible[4, 1] = False
    expected = oracle(TINY, expand(model), tokens, visible=visible)
    for mask in forms(visible, 16):
        state = None if fresh else runner.init_cache(2, 16)
        logits, state = runner(tokens, mask, state)
        assert state["lengths"].tolist()[0] == 5
        assert relative_error(logits[0], expected) <= TOLERANCE


def test_an_additive_mask_does_not_widen_a_bundle(exports: Exports) -> None:
    """float32 on bfloat16: the graphs see a bool mask, and return what it gives, bitwise."""
    bundle = load_bundle(exports("bfloat16")[1])
    see = masks.causal(LEFT, mx.zeros(2, mx.int32), 16)
    results = []
    for mask in (see, mx.where(see, 0.0, float("-inf"))):
        logits, state = bundle(pad_left(ROWS), mask)
        assert logits.dtype == mx.bfloat16
        results.append({"logits": logits, **state})
    assert_same(results[1], results[0])


def test_a_prompt_longer_than_the_largest_call(model: Model, bundle: Bundle) -> None:
    """In chunks of 8, padded anywhere, under a padding mask and under the same written out."""
    valid = np.ones((2, 21), int)
    valid[0, [0, 7, 8, 20]] = 0
    valid[1, :17] = 0
    lines = [random_tokens(21, 3), random_tokens(21, 4)]
    causal = masks.causal(mx.array(valid), mx.zeros(2, mx.int32), 32)
    for mask in (mx.array(valid), causal, mx.where(causal, 0.0, float("-inf"))):
        logits, state = bundle(lines, mask)
        assert state["lengths"].tolist() == [17, 4]
        for row in range(2):
            real = valid[row] == 1
            expected = run_plain(model, np.array(lines[row])[real].tolist())[0]
            assert relative_error(to_numpy(logits[row])[real], expected) <= TOLERANCE


def test_a_mask_that_looks_ahead_of_its_chunk(model: Model, bundle: Bundle) -> None:
    """Tokens of a later call are not written yet; within one chunk looking ahead is fine."""
    tokens, zeros = random_tokens(12), mx.zeros(1, mx.int32)
    near = masks.prefix_lm(mx.array([8], dtype=mx.int32), mx.ones((1, 12)), zeros, 32)
    visible = np.tril(np.ones((12, 12), bool))
    visible[:8, :8] = True
    logits, _ = bundle(tokens, near)
    expected = oracle(TINY, expand(model), tokens, visible=visible)
    assert relative_error(logits[0], expected) <= TOLERANCE
    far = masks.prefix_lm(mx.array([9], dtype=mx.int32), mx.ones((1, 12)), zeros, 32)
    with pytest.raises(CapacityError, match="export with --tokens 12, or pass a mask that looks"):
        bundle(tokens, far)


def test_a_mask_must_cover_what_a_grown_cache_holds(model: Model, runner: Any) -> None:
    """A full cache grows under a padding mask; an attention mask has to be made for the new one."""
    tokens = random_tokens(16)
    logits, state = runner([tokens[:14]], None, runner.init_cache(2, 16))
    mask = masks.causal(mx.ones((1, 3)), state["lengths"][:1], 16)
    with pytest.raises(InputError, match=r"16 columns, and rows hold 17 tokens .* grow the cache"):
        runner([[*tokens[14:], 1]], mask, state)
    grown = caches.grow(state, 32)
    mask = masks.causal(mx.ones((1, 2)), state["lengths"][:1], 32)
    logits, _ = runner([tokens[14:]], mask, grown)
    assert relative_error(logits[0], run_plain(model, tokens)[0][14:]) <= TOLERANCE


def test_nothing_declared_is_large_enough(bundle: Bundle) -> None:
    with pytest.raises(CapacityError, match="has 32 tokens, largest capacity is 31"):
        bundle([0] * 32)
    _, state = bundle([0] * 31)
    with pytest.raises(CapacityError, match="has 32 tokens, largest capacity is 31"):
        bundle([1], None, state)
    _, same = bundle([1], mx.zeros((1, 1)), state)  # padding needs no room
    assert same["lengths"].tolist() == [31, 0]


@pytest.mark.parametrize("shape", [(), (5,), (1, 1, 1, 5, 16), (2, 6), (5, 4), (6, 16)])
def test_masks_of_other_shapes(runner: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InputError, match=r"padding mask: expected \[1, 5\], got .* \[1, 1, 5, 16\]"
    ):
        runner(random_tokens(5), mx.ones(shape, mx.int32), runner.init_cache(2, 16))


@pytest.mark.parametrize("capacity", [8, 15, 32])
def test_masks_of_another_capacity(runner: Any, capacity: int) -> None:
    mask = masks.causal(mx.ones((1, 5)), mx.zeros(1, mx.int32), capacity)
    state = runner.init_cache(2, 16)
    with pytest.raises(InputError, match=f"its last axis is {capacity}, the cache has 16 slots"):
        runner(random_tokens(5), mask, state)
    ids = mx.array([random_tokens(5)] * 2, dtype=mx.int32)
    wide = mx.broadcast_to(mask, (2, *mask.shape[1:]))
    arguments = (runner.params,) if isinstance(runner, Model) else ()
    with pytest.raises(InputError, match=r"mask: expected bool \[2, 1, 5, 16\] \(capacity 16"):
        runner.forward(*arguments, ids, wide, state)
