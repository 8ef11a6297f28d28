"""The contract under `mx.grad` and `mx.vmap`."""

from __future__ import annotations

from functools import cache

from funcrt import masks
from funcrt.params import Params
from tests.helpers import (
    TINY,
    TOLERANCE,
    Weights,
    expand,
    ids,
    make_model,
    make_params,
    oracle,
    poison,
    random_tokens,
    relative_error,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

model_of = cache(make_model)
PROMPT, TARGETS = random_tokens(10, 1), random_tokens(10, 2)
LINES = [  # the same ten tokens in two rows of two calls each, with padding anywhere
    ([1, 1, 0, 1, 1, 1, 0], [1, 0, 1, 1, 0, 1, 1]),
    ([0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]),
]


def cross_entropy_by_hand(weights: Weights) -> float:
    logits = oracle(TINY, weights, PROMPT)
    logits = logits - logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -float(logprobs[np.arange(10), TARGETS].mean())


def cross_entropy(params: Params) -> mx.array:
    """The same of both rows, through a cache with poisoned slots, padding and two calls."""
    model = model_of("float32")
    state, losses = poison(model.init_cache(2, 16)), []
    done = [0, 0]
    for call in range(2):
        rows, targets = [], []
        for row in range(2):
            real = LINES[row][call]
            ranks = [done[row] + sum(real[:i]) for i in range(7)]
            rows.append([PROMPT[r] if x else 33 for r, x in zip(ranks, real, strict=True)])
            targets.append([TARGETS[r] if x else 0 for r, x in zip(ranks, real, strict=True)])
            done[row] += sum(real)
        valid = mx.array([LINES[0][call], LINES[1][call]])
        mask = masks.causal(valid, state["lengths"], 16)
        logits, state = model.forward(params, ids(*rows), mask, state)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, ids(*targets)[..., None], axis=-1)[..., 0]
        losses.append(mx.sum(mx.where(valid != 0, chosen, 0)))
    assert done == [10, 10]
    return -(losses[0] + losses[1]) / 20


def test_gradients_equal_central_differences():
    params = model_of("float32").params
    loss, gradients = mx.value_and_grad(cross_entropy)(params)
    assert list(gradients) == list(params)
    weights = expand(model_of("float32"))
    assert abs(loss.item() - cross_entropy_by_hand(weights)) < 1e-4
    # An id that stands under padding only has no part in the loss.
    assert 33 not in PROMPT
    assert not to_numpy(gradients["model.embed_tokens.weight"])[33].any()
    for name, gradient in gradients.items():
        assert np.isfinite(to_numpy(gradient)).all(), name
        # Along the gradient the slope is its norm. The oracle is float64: a step may be tiny.
        direction = to_numpy(gradient)
        norm = float(np.linalg.norm(direction))
        assert norm > 1e-4, name
        step = 1e-5 * direction / norm
        ahead = cross_entropy_by_hand({**weights, name: weights[name] + step})
        behind = cross_entropy_by_hand({**weights, name: weights[name] - step})
        assert (ahead - behind) / 2e-5 == pytest.approx(norm, rel=1e-3), name


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_gradients_in_16_bits_are_finite_and_near(kind):
    params = model_of(kind).params
    exact = {name: array.astype(mx.float32) for name, array in params.items()}
    reference = mx.grad(cross_entropy)(exact)

    def loss(params: Params) -> mx.array:
        model = model_of(kind)
        state = poison(model.init_cache(1, 16))
        mask = masks.causal(mx.ones((1, 10)), state["lengths"], 16)
        logits = model.forward(params, ids(PROMPT), mask, state)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return -mx.mean(mx.take_along_axis(logprobs, ids(TARGETS)[..., None], axis=-1))

    for name, gradient in mx.grad(loss)(params).items():
        near = 0.02 if kind == "float16" else 0.15
        assert relative_error(gradient, reference[name]) < near, name


def test_vmap_over_models_equals_a_loop():
    model = model_of("float32")
    ensemble = [make_params(TINY, seed=seed) for seed in range(3)]
    stacked = {name: mx.stack([params[name] for params in ensemble]) for name in model.params}
    state = poison(model.init_cache(2, 16))
    valid = mx.array([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    mask = masks.causal(valid, state["lengths"], 16)
    tokens = ids(random_tokens(5, 1), random_tokens(5, 2))
    run = mx.vmap(
        lambda params, *rest: tuple(model.forward(params, *rest)), in_axes=(0, None, None, None)
    )
    logits, states = run(stacked, tokens, mask, state)
    for i, params in enumerate(ensemble):
        expected, after = model.forward(params, tokens, mask, state)
        real = np.array(valid, bool)
        assert relative_error(to_numpy(logits[i])[real], to_numpy(expected)[real]) <= TOLERANCE
        assert states["lengths"][i].tolist() == after["lengths"].tolist()
        for name in ("layers.0.keys", "layers.1.values"):
            kept = [to_numpy(a)[1, :, :5] for a in (states[name][i], after[name])]
            assert relative_error(*kept) <= TOLERANCE


def test_vmap_over_inputs_equals_a_loop():
    model = model_of("float32")
    tokens = [ids(random_tokens(5, n), random_tokens(5, n + 9)) for n in range(3)]
    valids = [mx.array([[1, 1, 1, 0, n], [0, 1, 1, 1, 1]]) for n in range(3)]
    empty = model.init_cache(2, 16)
    lengths = empty["lengths"]
    all_masks = [masks.causal(valid, lengths, 16) for valid in valids]
    states = {name: mx.stack([array] * 3) for name, array in empty.items()}
    run = mx.vmap(lambda *inputs: tuple(model.forward(model.params, *inputs)))
    logits, after = run(mx.stack(tokens), mx.stack(all_masks), states)
    for i in range(3):
        expected, state = model.forward(model.params, tokens[i], all_masks[i], empty)
        real = np.array(valids[i], bool)
        assert relative_error(to_numpy(logits[i])[real], to_numpy(expected)[real]) <= TOLERANCE
        assert after["lengths"][i].tolist() == state["lengths"].tolist()
