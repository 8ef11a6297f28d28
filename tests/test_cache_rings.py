"""Rings of sliding windows: the same as a full cache, as far back as they can see."""

from __future__ import annotations

from funcrt import BucketPlan, masks
from funcrt import cache as caches
from funcrt.attention import Attend
from funcrt.cache import FULL, CacheLayout, CacheState, state_size
from funcrt.errors import CacheError, InputError
from tests.cache_calls import MOST, WINDOW, feed, feed_pieces, model_of, tokens_of
from tests.cache_histories import poison
from tests.helpers import TOLERANCE, ids, relative_error, to_numpy

import mlx.core as mx
import numpy as np
import pytest


def ring_and_full(batch: int, capacity: int) -> list[CacheState]:
    model = model_of("mistral")
    states = [model.init_cache(batch, capacity, max_tokens=MOST), model.init_cache(batch, capacity)]
    assert "layers.0.ring_keys" in states[0]
    assert "layers.0.keys" in states[1]
    return states


def test_a_ring_holds_text_up_to_capacity():
    model, tokens = model_of("mistral"), tokens_of(59)
    (ring, _), (full, state) = (
        feed_pieces(model, state, tokens, [6, 1, 6, 5, 1, 1, 6, 6, 6, 6, 6, 6, 3])
        for state in ring_and_full(1, 60)
    )
    assert state["lengths"].tolist() == [59]
    assert relative_error(ring, full) <= TOLERANCE
    whole, _ = feed(model, model.init_cache(1, 60), [tokens])
    assert relative_error(ring, whole[0]) <= TOLERANCE


def test_a_ring_takes_no_more_tokens_than_it_was_made_for():
    model = model_of("mistral")
    state = model.init_cache(1, 60, max_tokens=MOST)
    for forward in (feed, mx.compile(partial_feed)):
        run = forward if forward is feed else (lambda m, s, r, f=forward: f(ids(*r), s))
        run(model, state, [tokens_of(6)])
        with pytest.raises(InputError, match=r"7 tokens.*at most 6.*larger max_tokens"):
            run(model, state, [tokens_of(7)])
    with pytest.raises(CacheError, match="max_tokens"):
        model.init_cache(1, 60, max_tokens=0)


def partial_feed(tokens: mx.array, state: CacheState) -> tuple[mx.array, CacheState]:
    model = model_of("mistral")
    mask = masks.causal(mx.ones(tokens.shape), state["lengths"], state_size(state)[1])
    return model.forward(model.params, tokens, mask, state)


@pytest.mark.parametrize("seed", range(8))
def test_a_ring_under_any_mask_is_a_full_cache_with_a_window(seed):
    """Ragged rows, holes, idle rows, hidden slots, tokens that see later ones; poisoned slots."""
    rng = np.random.default_rng(seed)
    model, states = model_of("mistral"), ring_and_full(3, 60)
    for _ in range(14):
        lengths = states[1]["lengths"]
        valid = mx.array(
            rng.random((3, MOST)) < rng.choice([0.0, 0.5, 1.0], (3, 1), p=[0.2, 0.5, 0.3])
        )
        mask = masks.causal(valid, lengths, 60)
        if rng.random() < 0.7:
            ahead = mx.array(rng.random((3, 1, MOST, 60)) < 0.3)
            hidden = mx.array(rng.random((3, 1, MOST, 60)) < 0.3)
            mask = ((mask & mx.logical_not(hidden)) | ahead) & valid[:, None, :, None]
        tokens = mx.array(rng.integers(0, 64, (3, MOST)).astype(np.int32))
        results = [model.forward(model.params, tokens, mask, poison(s)) for s in states]
        (ring, states[0]), (full, states[1]) = results
        real = np.array(mx.any(mask, axis=(1, 3)))
        assert relative_error(to_numpy(ring)[real], to_numpy(full)[real]) <= TOLERANCE
        assert mx.array_equal(states[0]["lengths"], states[1]["lengths"])
        counts = mx.array(rng.integers(0, 3, 3).astype(np.int32))
        counts = mx.minimum(counts, states[1]["lengths"])
        if caches.can_trim(states[0], counts).item():
            states = [caches.trim(state, counts) for state in states]
    assert max(states[0]["written"].tolist()) > 2 * (WINDOW + MOST - 1)


def test_a_ring_trims_by_its_slack_and_says_so_beyond():
    model, tokens = model_of("mistral"), tokens_of(40)
    results = []
    for state in ring_and_full(1, 60):
        _, state = feed_pieces(model, state, tokens, [6] * 6 + [4])
        state = caches.trim(state, MOST)
        results.append(feed_pieces(model, poison(state), tokens_of(11, 1), [1, 6, 4])[0])
    assert relative_error(*results) <= TOLERANCE
    _, state = feed_pieces(model, ring_and_full(1, 60)[0], tokens, [6] * 6 + [4])
    with pytest.raises(CacheError, match=r"wrapped.*larger max_tokens"):
        caches.trim(state, MOST + 1)
    state = caches.trim(state, 2)
    assert caches.can_trim(state, MOST - 2).item()
    assert not caches.can_trim(state, MOST - 1).item()


def test_a_ring_never_looks_past_its_mask():
    """Lengths that cannot be: MLX reads past the end of an array without a check."""
    model = model_of("mistral")
    states = []
    for claimed in (0, 2**30, 59, 400):
        _, state = feed(model, ring_and_full(2, 60)[0], [tokens_of(6), tokens_of(6, 1)])
        lengths = mx.array([6, claimed], dtype=mx.int32)
        logits, state = feed(model, {**state, "lengths": lengths}, [tokens_of(4), tokens_of(4)])
        assert np.isfinite(to_numpy(logits)).all()
        states.append((to_numpy(logits)[0], to_numpy(state["layers.0.ring_keys"])[0]))
    for ours in states[1:]:
        for array, expected in zip(ours, states[0], strict=True):
            np.testing.assert_array_equal(array[..., :-1, :], expected[..., :-1, :])


@pytest.mark.parametrize("max_tokens", [None, 4], ids=["full", "ring"])
@pytest.mark.parametrize("both_sides", [False, True])
@pytest.mark.parametrize("where", [None, [0, 2, 3, 4, 5, 7, 8, 11], [0, 1, 2, 3, 4, 4, 4, 5]])
def test_windows_of_one_and_both_sides(max_tokens, both_sides, where):
    """`Attend` alone, in two calls under a mask that hides nothing, against numpy."""
    window, width, layout = 3, 8, CacheLayout(max_tokens=max_tokens)
    spec = (
        *caches.row_entries(layout, window),
        *caches.attention_entries(0, 1, width, "float32", layout, window),
    )
    state = caches.init_cache(spec, 1, 12)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 8, width)).astype(np.float32)
    k, v = k[:, :1], v[:, :1]
    for step in (slice(0, 4), slice(4, 8)):
        positions = None if where is None else ids(where[step])
        call = caches.place(mx.ones((1, 1, 4, 12), mx.bool_), state["lengths"], positions)
        attend = Attend(call, state)
        out = attend(
            0, *(mx.array(a[:, :, step]) for a in (q, k, v)),
            scale=0.5, window=window, both_sides=both_sides,
        )  # fmt: skip
        state = attend.state
        position = np.array(where or range(8))
        distance = position[step, None] - position[: step.stop]
        near = distance < window
        near &= (distance > -window) | (not both_sides)
        scores = np.exp(np.where(near, q[0, :, step] @ k[0, 0, : step.stop].T * 0.5, -np.inf))
        expected = scores / scores.sum(-1, keepdims=True) @ v[0, 0, : step.stop]
        assert relative_error(out[0], expected) <= TOLERANCE


def test_windows_and_rings_need_each_other():
    layout = CacheLayout(max_tokens=4)
    ring = caches.init_cache(
        (*caches.row_entries(layout, 3), *caches.attention_entries(0, 1, 8, "float32", layout, 3)),
        1, 12,
    )  # fmt: skip
    plain = caches.init_cache(
        (*caches.row_entries(FULL), *caches.attention_entries(0, 1, 8, "float32", FULL)), 1, 12
    )
    x = mx.ones((1, 1, 1, 8))
    for state, window, message in [(ring, None, "ring"), (plain, 3, "positions")]:
        call = caches.place(mx.ones((1, 1, 1, 12), mx.bool_), state["lengths"])
        with pytest.raises(CacheError, match=message):
            Attend(call, state)(0, x, x, x, scale=1.0, window=window)


def test_layouts_choose_rings_where_they_are_smaller():
    model = model_of("mistral")
    plan = BucketPlan(batch=1, tokens=(1, 16), capacity=(32, 64))
    assert model.choose_layout(plan) == CacheLayout(max_tokens=16)
    assert model.choose_layout(plan, kv_bits=8) == CacheLayout(kv_bits=8, max_tokens=16)
    small = BucketPlan(batch=1, tokens=16, capacity=WINDOW + 16)
    assert model.choose_layout(small) == FULL
    assert model_of("llama").choose_layout(plan) == FULL
    spec = model.compiled(plan).cache_spec
    assert {e.name: e.shape for e in spec}["layers.1.ring_values"] == ("B", 2, WINDOW + 16, 32)
