"""Exponentials by powers of two against float64, where they are made so, and as MLX has them."""

from __future__ import annotations

from funcrt.ops import exponentials

import mlx.core as mx
import numpy as np
import pytest


@pytest.fixture(params=[True, False], ids=["powers", "plain"], autouse=True)
def by_powers(request, monkeypatch):
    """Both forms everywhere, whatever the machine is fast at."""
    monkeypatch.setattr(
        exponentials, "_has_slow_exp", lambda x: request.param and x.dtype == mx.float32
    )
    return request.param


def doubles(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


HAS_SLOW_EXP = exponentials._has_slow_exp

X = mx.concatenate([mx.linspace(-85, 85, 4001), mx.linspace(-1, 1, 1001)])


def test_powers_are_for_float32_on_cpus():
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert HAS_SLOW_EXP(mx.zeros(2)) is on_cpu
    assert not HAS_SLOW_EXP(mx.zeros(2, mx.float16))


def test_exp_of_what_is_next_to_nothing():
    x = mx.array([-87.0, -88.0, -1000.0, -3e38, -mx.inf, mx.nan, 89.0, mx.inf])
    found = doubles(exponentials.exp(x))
    assert np.allclose(found[0], np.exp(-87.0), rtol=1e-5, atol=0)
    assert np.all(found[1:5] < 1e-38)
    assert np.isnan(found[5])
    assert np.all(np.isinf(found[6:]))


def test_exp():
    found = doubles(exponentials.exp(X)) / np.exp(doubles(X)) - 1
    assert np.abs(found).max() < 6e-6  # at 85
    near = np.abs(doubles(X)) < 10
    assert np.abs(found[near]).max() < 1e-6


def test_silu():
    x = doubles(X)
    expected = x / (1 + np.exp(-x))
    assert np.abs(doubles(exponentials.silu(X)) - expected).max() < 1e-5
    small = np.abs(x) < 10
    error = doubles(exponentials.silu(X))[small] - expected[small]
    assert np.abs(error).max() < 1e-6


def test_silu_of_what_is_far_away_has_a_gradient():
    x = mx.array([-1e30, -1000.0, -200.0, -90.0, 90.0, 1000.0, 1e30])
    found = doubles(exponentials.silu(x))
    assert np.allclose(found[:4], 0, atol=1e-7)
    assert np.array_equal(found[4:], doubles(x)[4:])
    slopes = mx.grad(lambda x: exponentials.silu(x).sum())(x)
    assert np.allclose(doubles(slopes), [0, 0, 0, 0, 1, 1, 1], atol=1e-6)
    x = mx.linspace(-100, 100, 801)
    bends = mx.grad(lambda x: mx.grad(lambda x: exponentials.silu(x).sum())(x).sum())(x)
    assert mx.all(mx.isfinite(bends))


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_softmax(scale):
    x = mx.random.normal((7, 5, 33), scale=30.0, key=mx.random.key(0))
    x[0, 0] = mx.finfo(mx.float32).min  # nothing shows: all of it alike
    x[1, :, 3:] = mx.finfo(mx.float32).min
    wide = doubles(x) * scale
    weights = np.exp(wide - wide.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True)
    assert np.abs(doubles(exponentials.softmax(x, scale)) - expected).max() < 1e-6


def test_the_gradient_of_softmax_is_that_of_mlx():
    x = mx.random.normal((4, 9), scale=3.0, key=mx.random.key(1))
    x[2, 4:] = mx.finfo(mx.float32).min
    weight = mx.random.normal((4, 9), key=mx.random.key(2))
    found = mx.grad(lambda x: (exponentials.softmax(x, 0.5) * weight).sum())(x)
    expected = mx.grad(lambda x: (mx.softmax(x * 0.5, axis=-1) * weight).sum())(x)
    assert mx.allclose(found, expected, atol=1e-6)


def test_logsumexp():
    x = mx.random.normal((3, 1000), scale=20.0, key=mx.random.key(3))
    x[0, 5:] = -mx.inf  # banned tokens
    expected = np.log(np.exp(doubles(x)).sum(-1, keepdims=True))
    assert np.abs(doubles(exponentials.logsumexp(x)) - expected).max() < 1e-5


@pytest.mark.parametrize("broken", [mx.inf, mx.nan])
def test_logsumexp_tells_rows_that_are_broken(broken):
    x = mx.zeros((3, 8))
    x[1, 2] = broken
    x[2] = -mx.inf
    assert mx.isfinite(exponentials.logsumexp(x))[:, 0].tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bits_stay_as_they_are(dtype):
    """Powers of two of what is rounded to 16 bits would be off by percents."""
    x = mx.linspace(-8, 8, 301).astype(dtype)
    assert mx.array_equal(exponentials.silu(x), x * mx.sigmoid(x))
    assert mx.array_equal(exponentials.exp(x), mx.exp(x))
    assert mx.array_equal(exponentials.softmax(x), mx.softmax(x, axis=-1, precise=True))
    assert exponentials.logsumexp(x).dtype == dtype
