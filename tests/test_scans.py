"""Recurrent layers against float64 oracles that walk token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from funcrt.cache import conv_window, place, zero_padding
from funcrt.ops import scans
from tests.helpers import TOLERANCE, Array, relative_error, to_numpy

import mlx.core as mx
import numpy as np
import pytest

HEADS, GROUPS, WIDTH, SIZE = 4, 2, 8, 6
Inputs = dict[str, Any]


def make_ssd(batch: int, tokens: int, seed: int = 0) -> Inputs:
    rng = np.random.default_rng([seed, batch, tokens])
    return {
        "x": rng.normal(size=(batch, tokens, HEADS, WIDTH)),
        "step": np.log1p(np.exp(rng.normal(-2, 2, (batch, tokens, HEADS)))),
        "decay": -np.exp(rng.uniform(-2, 2, HEADS)),
        "b": rng.normal(size=(batch, tokens, GROUPS, SIZE)),
        "c": rng.normal(size=(batch, tokens, GROUPS, SIZE)),
        "state": rng.normal(size=(batch, HEADS, WIDTH, SIZE)),
    }


def make_delta(batch: int, tokens: int, seed: int = 0) -> Inputs:
    rng = np.random.default_rng([seed, batch, tokens])
    k = rng.normal(size=(batch, tokens, GROUPS, SIZE))
    return {
        "q": rng.normal(size=k.shape),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.normal(size=(batch, tokens, HEADS, WIDTH)),
        "fade": -rng.exponential(0.2, (batch, tokens, HEADS)),
        "beta": rng.uniform(0, 1, (batch, tokens, HEADS)),
        "state": rng.normal(size=(batch, HEADS, SIZE, WIDTH)),
    }


def walk_ssd(x: Array, step: Array, decay: Array, b: Array, c: Array, state: Array) -> Any:
    b, c = (a.repeat(HEADS // GROUPS, axis=2)[:, :, :, None] for a in (b, c))
    rows = []
    for t in range(x.shape[1]):
        fade = np.exp(step[:, t] * decay)[..., None, None]
        state = fade * state + (step[:, t, :, None] * x[:, t])[..., None] * b[:, t]
        rows.append((state * c[:, t]).sum(-1))
    return np.stack(rows, 1), state


def walk_delta(q: Array, k: Array, v: Array, fade: Array, beta: Array, state: Array) -> Any:
    q, k = (a.repeat(HEADS // GROUPS, axis=2)[..., None] for a in (q, k))
    rows = []
    for t in range(v.shape[1]):
        state = np.exp(fade[:, t])[..., None, None] * state
        wrong = v[:, t] - (state * k[:, t]).sum(-2)
        state = state + k[:, t] * (beta[:, t, :, None] * wrong)[:, :, None]
        rows.append((state * q[:, t]).sum(-2))
    return np.stack(rows, 1), state


SCANS: list[tuple[Callable[..., Any], Callable[..., Inputs], Callable[..., Any]]] = [
    (scans.ssd, make_ssd, walk_ssd),
    (scans.gated_delta, make_delta, walk_delta),
]
NAMES = ["ssd", "gated_delta"]
INERT = ("step", "fade", "beta")  # what the caller zeroes at padding
ROWS = ("decay", "state")  # what has no token axis
both = pytest.mark.parametrize(("scan", "make", "walk"), SCANS, ids=NAMES)


def to_mlx(inputs: Inputs) -> dict[str, mx.array]:
    return {name: mx.array(array.astype(np.float32)) for name, array in inputs.items()}


def cut(inputs: Inputs, start: int, stop: int) -> Inputs:
    return {n: a if n in ROWS else a[:, start:stop] for n, a in inputs.items()}


def row(inputs: Inputs, index: int) -> Inputs:
    return {n: a if n == "decay" else a[index : index + 1] for n, a in inputs.items()}


def assert_close(ours: Any, theirs: Any, tolerance: float = 2e-6) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) < tolerance


def assert_equal(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


@both
@pytest.mark.parametrize("tokens", [1, 2, 5, 63, 64, 65, 200])
def test_equals_a_walk_over_the_tokens(scan: Any, make: Any, walk: Any, tokens: int) -> None:
    inputs = make(2, tokens)
    assert_close(scan(**to_mlx(inputs)), walk(**inputs))


@both
def test_a_head_may_have_a_group_of_its_own(
    scan: Any, make: Any, walk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GROUPS", HEADS)
    for tokens in (1, 70):
        inputs = make(1, tokens)
        assert_close(scan(**to_mlx(inputs)), walk(**inputs))


@both
def test_one_token_that_forgets_all_leaves_slow_decays_exact(
    scan: Any, make: Any, walk: Any
) -> None:
    inputs = make(1, 128)
    if scan is scans.ssd:
        inputs["step"] *= 0.01
        inputs["step"][:, [20, 90]] = 1e5
        inputs["x"][:, [20, 90]] *= 1e-5
    else:
        inputs["fade"] *= 0.01
        inputs["fade"][:, [20, 90]] = -1e5
    assert_close(scan(**to_mlx(inputs)), walk(**inputs))


@pytest.mark.parametrize("signs", [False, True])
def test_nearly_parallel_keys_keep_their_digits(signs: bool) -> None:
    """A learning rate near 1 on keys all alike: the triangular system is as hard as it gets."""
    inputs = make_delta(2, 256)
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(2, 1, GROUPS, SIZE)) + 1e-3 * inputs["k"]
    if signs:
        keys = keys * rng.choice([-1, 1], (2, 256, GROUPS, 1))
    inputs["k"] = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    inputs["beta"] = 1 - 1e-3 * inputs["beta"]
    inputs["fade"] *= 1e-4
    assert_close(scans.gated_delta(**to_mlx(inputs)), walk_delta(**inputs), tolerance=5e-6)


@both
@pytest.mark.parametrize("sizes", [(100, 28), (1, 64, 63), (30, 1, 1, 96)])
def test_in_pieces_equals_at_once(scan: Any, make: Any, walk: Any, sizes: tuple[int, ...]) -> None:
    inputs = to_mlx(make(1, 128))
    whole, last = scan(**inputs)
    state, rows, start = inputs["state"], [], 0
    for size in sizes:
        piece, state = scan(**{**cut(inputs, start, start + size), "state": state})
        rows.append(piece)
        start += size
    assert_close((mx.concatenate(rows, axis=1), state), (whole, last), TOLERANCE)


@both
@pytest.mark.parametrize("tokens", [1, 40, 150])
def test_rows_do_not_depend_on_neighbours_or_padding(
    scan: Any, make: Any, walk: Any, tokens: int
) -> None:
    counts = [tokens, 0, max(tokens - 7, 1), tokens // 2]
    real = np.arange(tokens) < np.array(counts)[:, None]
    batches = []
    for seed in (1, 2):  # different padding, in the same rows
        inputs, other = make(4, tokens, 0), make(4, tokens, seed)
        for name in set(inputs) - set(ROWS):
            shown = real.reshape(*real.shape, *[1] * (inputs[name].ndim - 2))
            inputs[name] = np.where(shown, inputs[name], 0 if name in INERT else other[name])
        batches.append(to_mlx(inputs))
    (y, state), (again, same) = (scan(**inputs) for inputs in batches)
    assert_equal([state], [same])
    assert_equal([state[1]], [batches[0]["state"][1]])  # idle, bit for bit
    for i, count in enumerate(counts):
        assert_equal([y[i, :count]], [again[i, :count]])
        alone, left = scan(**row(batches[1], i))
        assert_equal([y[i, :count], state[i]], [alone[0, :count], left[0]])
        if count:
            short, left = scan(**cut(row(batches[0], i), 0, count))
            assert_close([y[i, :count], state[i]], [short[0], left[0]], TOLERANCE)


@both
@pytest.mark.parametrize("tokens", [1, 9, 80])
def test_gradients_are_those_of_the_oracle(scan: Any, make: Any, walk: Any, tokens: int) -> None:
    inputs = make(1, tokens)
    rng = np.random.default_rng(0)
    weigh = [rng.normal(size=a.shape) for a in walk(**inputs)]

    def loss(arrays: dict[str, mx.array]) -> mx.array:
        y, state = scan(**arrays)
        return mx.sum(y * mx.array(weigh[0])) + mx.sum(state * mx.array(weigh[1]))

    def exact(name: str, moved: Array) -> float:
        y, state = walk(**{**inputs, name: moved})
        return float((y * weigh[0]).sum() + (state * weigh[1]).sum())

    gradients = mx.grad(loss)(to_mlx(inputs))
    for name, array in inputs.items():
        along = rng.normal(size=array.shape)
        slope = (exact(name, array + 1e-5 * along) - exact(name, array - 1e-5 * along)) / 2e-5
        ours = (to_numpy(gradients[name]) * along).sum()
        assert abs(ours - slope) < 1e-4 * np.abs(to_numpy(gradients[name]) * along).sum(), name


@both
@pytest.mark.parametrize("tokens", [1, 16, 130])
def test_compiles_and_exports(scan: Any, make: Any, walk: Any, tokens: int, tmp_path: Path) -> None:
    inputs = to_mlx(make(2, tokens))
    names = list(inputs)

    def flat(*arrays: mx.array) -> Any:
        return scan(**dict(zip(names, arrays, strict=True)))

    expected = flat(*inputs.values())
    assert_close(mx.compile(flat)(*inputs.values()), expected)
    path = str(tmp_path / "scan.mlxfn")
    mx.export_function(path, flat, *inputs.values())
    assert_close(mx.import_function(path)(*inputs.values()), expected)


@both
def test_graphs_hardly_grow_with_tokens(scan: Any, make: Any, walk: Any, tmp_path: Path) -> None:
    sizes = []
    for tokens in (1, 64, 512):
        inputs = to_mlx(make(1, tokens))
        path = tmp_path / f"{tokens}.mlxfn"
        mx.export_function(
            str(path),
            lambda *arrays, names=list(inputs): scan(**dict(zip(names, arrays, strict=True))),
            *inputs.values(),
        )
        sizes.append(path.stat().st_size)
    assert sizes[0] < 5_000  # the plain step
    assert sizes[2] < 3 * sizes[1] < 60_000


@both
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_computes_in_float32(scan: Any, make: Any, walk: Any, dtype: mx.Dtype) -> None:
    inputs = {name: array.astype(dtype) for name, array in to_mlx(make(1, 20)).items()}
    y, state = scan(**inputs)
    assert y.dtype == state.dtype == mx.float32
    assert_close((y, state), walk(**{name: to_numpy(array) for name, array in inputs.items()}))


# --- the convolution and the norm -----------------------------------------------------------------


def convolve(window: Array, taps: Array, bias: Array) -> Array:
    width = taps.shape[-1]
    tokens = window.shape[1] - width + 1
    return np.stack(
        [(window[:, t : t + width] * taps[:, 0].T).sum(1) + bias for t in range(tokens)], axis=1
    )


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("width", [3, 4])
def test_short_conv(tokens: int, width: int) -> None:
    rng = np.random.default_rng(0)
    window, taps = rng.normal(size=(2, width - 1 + tokens, 5)), rng.normal(size=(5, 1, width))
    bias = rng.normal(size=5)
    for b in (None, mx.array(bias)):
        ours = scans.short_conv(mx.array(window), mx.array(taps), b)
        expected = convolve(window, taps, 0 if b is None else bias)
        assert relative_error(ours, expected) < 1e-6


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_short_conv_rounds_once(dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(1)
    arrays = [
        mx.array(rng.normal(size=shape)).astype(dtype) for shape in ((1, 12, 7), (7, 1, 4), (7,))
    ]
    ours = scans.short_conv(*arrays)
    assert ours.dtype == dtype
    exact = mx.array(convolve(*(to_numpy(a) for a in arrays)).astype(np.float32))
    assert mx.mean(ours == exact.astype(dtype)).item() > 0.95  # but for ties within float32


def test_short_conv_over_padding_in_pieces() -> None:
    """With `cache.conv_window`: rows of 5 and 2 tokens, then of 1 and 3, as if each ran whole."""
    rng = np.random.default_rng(2)
    taps, inputs = mx.array(rng.normal(size=(3, 1, 4))), rng.normal(size=(2, 6, 3))
    buffer, lengths = mx.zeros((2, 3, 3)), mx.array([0, 0])
    found: list[list[Array]] = [[], []]
    for counts in ((5, 2), (1, 3)):
        tokens = max(counts)
        x = np.full((2, tokens, 3), 1e4)
        for i, count in enumerate(counts):
            start = lengths[i].item()
            x[i, :count] = inputs[i, start : start + count]
        real = mx.arange(tokens) < mx.array(counts)[:, None]
        call = place(mx.broadcast_to(real[:, None, :, None], (2, 1, tokens, 32)), lengths, None)
        window, buffer = conv_window(buffer, mx.array(x), call)
        y = to_numpy(zero_padding(scans.short_conv(window, taps), call))
        for i, count in enumerate(counts):
            found[i].append(y[i, :count])
        lengths = call.lengths
    whole = convolve(np.pad(inputs, ((0, 0), (3, 0), (0, 0))), to_numpy(taps), np.zeros(3))
    for i, count in enumerate((6, 5)):
        assert relative_error(np.concatenate(found[i]), whole[i, :count]) < 1e-6


def test_unit_norm() -> None:
    x = np.random.default_rng(0).normal(size=(3, 5, 16))
    x[0, 0] = 0
    expected = x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)
    assert relative_error(scans.unit_norm(mx.array(x)), expected) < 1e-6
    small = expected[1:] * 1e-3  # where eps counts
    exact = small / np.sqrt((small**2).sum(-1, keepdims=True) + 1e-6)
    assert relative_error(scans.unit_norm(mx.array(small)), exact) < 1e-6
