"""The rules of the contract one by one: masks, capacity, positions, purity, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from funcrt import BucketPlan, masks
from funcrt.cache import CacheState
from funcrt.config import RopeConfig
from funcrt.errors import CacheError, InputError
from funcrt.model import Model
from tests.helpers import (
    POISON,
    TINY,
    TOLERANCE,
    expand,
    filled,
    ids,
    make_model,
    oracle,
    poison,
    random_tokens,
    relative_error,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

Forward = Callable[[mx.array, mx.array, CacheState], tuple[mx.array, CacheState]]

CAPACITY = 24
PLAN = BucketPlan(batch=(1, 3), tokens=8, capacity=CAPACITY)
model_of = cache(make_model)


def forward_of(form: str, kind: str) -> Forward:
    model = model_of(kind)
    if form == "eager":
        return partial(model.forward, model.params)
    return model.compiled(PLAN).forward


def start(model: Model, rows: Sequence[Sequence[int]], capacity: int) -> CacheState:
    """A state that holds these rows, fed padded on the right in one call."""
    width = max(map(len, rows))
    valid = mx.array([[i < len(row) for i in range(width)] for row in rows])
    state = model.init_cache(len(rows), capacity)
    mask = masks.causal(valid, state["lengths"], capacity)
    padded = ids(*([*row, *[0] * (width - len(row))] for row in rows))
    return model.forward(model.params, padded, mask, state)[1]


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("columns", ["all", "unwritten", "scratch", "written and unwritten"])
def test_no_mask_reveals_a_slot_that_was_not_written(kind, columns):
    model, tokens = model_of(kind), random_tokens(9)
    state = start(model, [tokens[:5]], 24)
    slots = mx.arange(24)
    shown = {
        "all": slots >= 0,
        "unwritten": (slots >= 9) & (slots < 23),
        "scratch": slots == 23,
        "written and unwritten": (slots < 3) | (slots >= 9),
    }[columns]
    mask = mx.broadcast_to(shown, (1, 1, 4, 24))
    results = [
        model.forward(model.params, ids(tokens[5:]), mask, poison(state, value))
        for value in (0.0, POISON)
    ]
    (logits, clean), (poisoned, dirty) = results
    np.testing.assert_array_equal(to_numpy(poisoned), to_numpy(logits))
    assert np.isfinite(to_numpy(logits)).all()
    for ours, theirs in zip(filled(dirty, 0), filled(clean, 0), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert clean["lengths"].tolist() == [9]


def test_a_mask_may_show_later_tokens_of_the_same_call():
    model, tokens = model_of("float32"), random_tokens(9)
    state = start(model, [tokens[:5]], 24)
    everything = mx.ones((1, 1, 4, 24), dtype=mx.bool_)
    logits, _ = model.forward(model.params, ids(tokens[5:]), everything, state)
    visible = np.tril(np.ones((9, 9)))
    visible[5:] = 1
    expected = oracle(TINY, expand(model), tokens, visible=visible)
    assert relative_error(logits[0], expected[5:]) <= TOLERANCE


def test_a_mask_may_hide_cached_tokens():
    model, tokens = model_of("float32"), random_tokens(9)
    state = start(model, [tokens[:5]], 24)
    mask = masks.causal(mx.ones((1, 4)), state["lengths"], 24) & (mx.arange(24) != 2)
    logits, _ = model.forward(model.params, ids(tokens[5:]), mask, state)
    visible = np.tril(np.ones((9, 9)))
    visible[5:, 2] = 0
    expected = oracle(TINY, expand(model), tokens, visible=visible)
    assert relative_error(logits[0], expected[5:]) <= TOLERANCE


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("first", [15, 14, 12, 200, 2**30])
def test_what_does_not_fit_lands_in_scratch(kind, first):
    """Capacity 16 holds 15 tokens; `first` are claimed to be there and 8 more come."""
    model = model_of(kind)
    held = [random_tokens(12, row) for row in range(3)]
    state = start(model, held, 16)
    lengths = mx.array([12, first, 3], dtype=mx.int32)
    state = poison({**state, "lengths": lengths})
    valid = mx.array([[True] * 3 + [False] * 5, [True] * 8, [False] * 4 + [True] * 4])
    tokens = ids(random_tokens(8, 1), random_tokens(8, 2), random_tokens(8, 3))
    mask = masks.causal(valid, lengths, 16)
    logits, after = model.forward(model.params, tokens, mask, state)
    assert after["lengths"].tolist() == [15, first + 8, 7]
    alone = masks.causal(valid & mx.array([[True], [False], [True]]), lengths, 16)
    expected, neighbours = model.forward(model.params, tokens, alone, state)
    for row in (0, 2):
        np.testing.assert_array_equal(to_numpy(logits[row]), to_numpy(expected[row]))
        for ours, theirs in zip(filled(after, row), filled(neighbours, row), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    kept = min(first, 15)
    for name in list(state)[1:]:
        ours, theirs = to_numpy(after[name])[1], to_numpy(state[name])[1]
        np.testing.assert_array_equal(ours[:, :kept], theirs[:, :kept])
    assert np.isfinite(to_numpy(logits)[[0, 2]]).all()


def test_a_call_may_be_wider_than_the_cache():
    """Capacity 4 holds three of eight tokens; a neighbour has two."""
    model = model_of("float32")
    tokens = ids(random_tokens(8, 1), random_tokens(8, 2))
    valid = mx.array([[1] * 8, [0, 0, 0, 1, 0, 0, 1, 0]])
    state = poison(model.init_cache(2, 4))
    logits, after = model.forward(
        model.params, tokens, masks.causal(valid, state["lengths"], 4), state
    )
    assert after["lengths"].tolist() == [8, 2]
    weights = expand(model)
    expected = oracle(TINY, weights, tokens[0].tolist())[:3]
    assert relative_error(logits[0, :3], expected) <= TOLERANCE
    pair = tokens[1, mx.array([3, 6])].tolist()
    assert relative_error(logits[1, mx.array([3, 6])], oracle(TINY, weights, pair)) <= TOLERANCE


@pytest.mark.parametrize("rope", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_positions_replace_those_of_the_slots(rope):
    model = make_model(rope=RopeConfig(kind=rope, factor=4.0, original_max_positions=6))
    rows = [random_tokens(5, 1), random_tokens(2, 2), random_tokens(3, 3)]
    state = start(model, rows, 24)
    valid = mx.array([[1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    tokens = ids(*(random_tokens(6, row) for row in range(3)))
    mask = masks.causal(valid, state["lengths"], 24)
    plain, plain_state = model.forward(model.params, tokens, mask, state)
    rank = mx.cumsum(valid, axis=1) - 1 + state["lengths"][:, None]
    for filler in (0, -(2**31), 12345, 2**31 - 1):  # where there is no token, anything goes
        positions = mx.where(valid != 0, rank, filler).astype(mx.int32)
        logits, moved = model.forward(model.params, tokens, mask, state, positions)
        for row, real in enumerate(valid.tolist()):
            if any(real):
                index = np.flatnonzero(real)
                assert (
                    relative_error(to_numpy(logits[row])[index], to_numpy(plain[row])[index])
                    <= TOLERANCE
                )
        assert moved["lengths"].tolist() == plain_state["lengths"].tolist()


def test_positions_with_gaps_and_repeats_act_as_such():
    model, tokens = model_of("float32"), random_tokens(9)
    where = [0, 1, 2, 7, 8, 20, 20, 5, 400]
    state, parts = model.init_cache(1, 24), []
    for chunk in (slice(0, 5), slice(5, 9)):
        valid = mx.ones((1, len(tokens[chunk])))
        mask = masks.causal(valid, state["lengths"], 24)
        logits, state = model.forward(
            model.params, ids(tokens[chunk]), mask, state, ids(where[chunk])
        )
        parts.append(to_numpy(logits[0]))
    expected = oracle(TINY, expand(model), tokens, positions=where)
    assert relative_error(np.concatenate(parts), expected) <= TOLERANCE


# --- purity and refusals --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_inputs_are_never_changed(form):
    model, forward = model_of("float32"), forward_of(form, "float32")
    state = start(model, [random_tokens(5, row) for row in range(3)], CAPACITY)
    tokens = ids(*(random_tokens(8, row) for row in range(3)))
    mask = masks.causal(mx.ones((3, 8)), state["lengths"], CAPACITY)
    inputs = {**model.params, **state, "tokens": tokens, "mask": mask}
    before = {name: np.array(array) for name, array in inputs.items()}
    first, _ = forward(tokens, mask, state)
    mx.eval(first)
    for name, array in inputs.items():
        np.testing.assert_array_equal(np.array(array), before[name], err_msg=name)
    again, _ = forward(tokens, mask, state)
    np.testing.assert_array_equal(to_numpy(again), to_numpy(first))


@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.parametrize("kind", ["float32", "affine"])
def test_ids_out_of_range_are_clipped(form, kind):
    model = model_of(kind)
    state = model.init_cache(1, 24)
    mask = masks.causal(mx.ones((1, 8)), state["lengths"], 24)
    last = TINY.vocab_size - 1
    wild = ids([-1, -(2**31), 5, last, last + 1, 10**6, 2**31 - 1, 0])
    tame = ids([0, 0, 5, last, last, last, last, 0])
    forward = forward_of(form, kind)
    ours, theirs = forward(wild, mask, state)[0], forward(tame, mask, state)[0]
    np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))


def test_wrong_inputs_are_refused_when_traced():
    model = model_of("float32")
    state = model.init_cache(2, 24)
    tokens, mask = mx.zeros((2, 3), mx.int32), mx.zeros((2, 1, 3, 24), mx.bool_)
    forward = partial(model.forward, model.params)
    forward(tokens, mask, state)
    for bad in (tokens[0], tokens.astype(mx.int64), tokens.astype(mx.float32), tokens[:1]):
        with pytest.raises(InputError, match="tokens"):
            forward(bad, mask, state)
    wide = mx.zeros((2, 1, 3, 25), mx.bool_)
    for bad in (mask[:, 0], mask[:1], mask[:, :, :2], wide, mask.astype(mx.int32)):
        with pytest.raises(InputError, match="mask"):
            forward(tokens, bad, state)
    for bad in (tokens[:, :2], tokens[0], tokens.astype(mx.int64)):
        with pytest.raises(InputError, match="positions"):
            forward(tokens, mask, state, bad)
    for bad in (
        {},
        {**state, "lengths": state["lengths"].astype(mx.int64)},
        {**state, "lengths": state["lengths"][:1]},
        {**state, "layers.0.keys": state["layers.0.keys"].astype(mx.float16)},
        {**state, "layers.1.values": state["layers.1.values"][:, :1]},
        {**state, "layers.0.keys": mx.zeros((2,))},
    ):
        with pytest.raises(CacheError):
            forward(tokens, mask, bad)
