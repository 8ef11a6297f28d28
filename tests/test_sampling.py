"""Sampling against a plain numpy oracle, against chance, and against its own promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from funcrt.sampling import (
    SETTING_INPUTS,
    count_kept,
    greedy,
    make_noise,
    make_settings,
    mask_most_likely,
    sample,
    sort_ascending,
)

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Row = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def flat_sample(logits: mx.array, positions: mx.array, *values: mx.array) -> tuple[mx.array, ...]:
    return sample(logits, dict(zip(SETTING_INPUTS, values, strict=True)), positions)[:3]


def flat_inputs(logits: mx.array, rows: list[Row], seed: int = 0) -> list[mx.array]:
    B = logits.shape[0]
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*rows, strict=True))
    chosen = make_settings(
        B,
        logits.shape[1],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=range(seed, seed + B),
    )
    return [logits, mx.arange(5, 5 + B, dtype=mx.int32), *(chosen[name] for name in SETTING_INPUTS)]


def draw(logits: list[float] | np.ndarray, times: int, **values: float) -> np.ndarray:
    """Tokens [times] drawn from one distribution at positions 0, 1, 2, ..."""
    rows = mx.broadcast_to(mx.array(logits, dtype=mx.float32), (times, len(logits)))
    chosen = make_settings(times, len(logits), **{"temperature": 1.0, **values})
    return np.array(sample(rows, chosen, mx.arange(times, dtype=mx.int32))[0])


def keep_by_hand(logits: np.ndarray, row: Row) -> tuple[np.ndarray, bool]:
    """Which tokens one row may draw, filter after filter as they are defined, in float64.

    Also says whether a threshold was so close that float32 may fall on either side of it.
    """
    temperature, top_k, top_p, min_p = row
    order = np.argsort(-logits, kind="stable")  # the lowest id first among equals
    if temperature == 0:
        return np.isin(np.arange(len(logits)), order[:1]), False
    scaled = logits[order].astype(np.float64) / temperature
    kept = np.ones(len(logits), dtype=bool)
    close = False
    if top_k:
        kept[top_k:] = False
    if top_p < 1:
        shares = np.where(kept, np.exp(scaled - scaled[0]), 0)
        shares /= shares.sum()
        before = np.concatenate([[0], np.cumsum(shares)[:-1]])
        close |= bool((np.abs(before - top_p)[kept] < 1e-5).any())
        kept &= before < top_p
    ratio = np.exp(scaled - scaled[0])
    close |= min_p > 0 and bool((np.abs(ratio - min_p)[kept] < 1e-5 * min_p).any())
    kept &= ratio >= min_p
    result = np.zeros(len(logits), dtype=bool)
    result[order[kept]] = True
    return result, close


@st.composite
def batches(draw_one: st.DrawFn) -> tuple[np.ndarray, list[Row]]:
    """Logits with many ties and gaps, and settings in which each filter is often off."""
    B, V = draw_one(st.integers(1, 3)), draw_one(st.integers(1, 40))
    seed, step = draw_one(st.integers(0, 2**31)), draw_one(st.sampled_from([0.0, 0.5, 2.0]))
    logits = np.random.default_rng(seed).normal(0, 3, (B, V)).astype(np.float32)
    if step:
        logits = np.round(logits / step) * step  # ties, and both zeros
    if draw_one(st.booleans()):
        logits[:, 1::3] = -np.inf
    rows = st.tuples(
        st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        st.integers(0, V + 3),
        st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
        st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]),
    )
    return logits, draw_one(st.lists(rows, min_size=B, max_size=B))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(batches())
def test_filters_and_draw_equal_the_oracle(batch: tuple[np.ndarray, list[Row]]) -> None:
    logits, rows = batch
    _, positions, *values = flat_inputs(mx.array(logits), rows)
    chosen = dict(zip(SETTING_INPUTS, values, strict=True))
    ranked = sort_ascending(mx.array(logits))
    np.testing.assert_array_equal(np.array(ranked), np.sort(logits, axis=-1))
    divisor = mx.where(chosen["temperature"] == 0, 1.0, chosen["temperature"])[:, None]
    count = count_kept(ranked, divisor, chosen)
    masks = np.array(mask_most_likely(mx.array(logits), ranked, count))
    tokens, logprobs, finite = (
        np.array(x) for x in flat_sample(mx.array(logits), positions, *values)
    )
    noise = np.array(make_noise(chosen["seed"], positions, logits.shape[1]), dtype=np.float64)
    for b, row in enumerate(rows):
        kept, close = keep_by_hand(logits[b], row)
        if close:
            continue
        if row[0] > 0:
            np.testing.assert_array_equal(masks[b], kept)
        scores = np.where(kept, logits[b] / (row[0] or 1.0) + noise[b], -np.inf)
        assert tokens[b] == scores.argmax()
        x = logits[b].astype(np.float64)
        expected = x[tokens[b]] - x.max() - np.log(np.exp(x - x.max()).sum())
        assert logprobs[b] == pytest.approx(expected, abs=1e-5)
        assert finite[b]


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    possible = probabilities > 0
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[~possible].sum() == 0, "a token that the filters remove was drawn"
    expected = len(tokens) * probabilities[possible]
    return float(((counts[possible] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "row",
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (2.0, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0),
     (1.5, 0, 1.0, 0.2), (1.3, 6, 0.9, 0.05)],
)  # fmt: skip
def test_draws_follow_the_filtered_distribution(row: Row) -> None:
    logits = np.array([0.3, -1.2, 2.0, 0.9, -0.4, 1.1, -2.5, 0.0], dtype=np.float32)
    kept, _ = keep_by_hand(logits, row)
    probabilities = np.where(kept, np.exp(logits / row[0]), 0)
    probabilities /= probabilities.sum()
    names = ("temperature", "top_k", "top_p", "min_p")
    tokens = draw(logits, 20_000, seed=11, **dict(zip(names, row, strict=True)))
    # 29.9 is the 0.9999 quantile of chi-square with 7 degrees of freedom, the most there can be.
    assert chi_square(tokens, probabilities) < 29.9


def test_the_chi_square_bound_sees_a_wrong_temperature() -> None:
    logits = np.array([0.3, -1.2, 2.0, 0.9, -0.4, 1.1, -2.5, 0.0], dtype=np.float32)
    wrong = np.exp(logits / 1.1) / np.exp(logits / 1.1).sum()
    assert chi_square(draw(logits, 20_000, seed=11), wrong) > 29.9


def test_seeds_draw_as_independently_as_positions() -> None:
    logits = mx.zeros((20_000, 8))
    chosen = make_settings(20_000, 8, temperature=1.0, seed=range(20_000))
    tokens = np.array(sample(logits, chosen, mx.zeros(20_000, dtype=mx.int32))[0])
    assert chi_square(tokens, np.full(8, 1 / 8)) < 29.9


def test_noise_is_gumbel_and_rarely_equal_even_where_it_is_largest() -> None:
    vocab = 262_144
    noise = np.array(make_noise(mx.array([3], dtype=mx.uint32), mx.array([9]), vocab))[0]
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    largest = np.sort(noise)[-2000:]
    assert len(np.unique(largest)) > 1990


def test_same_seed_and_position_give_the_same_draw_and_others_do_not() -> None:
    flat = np.zeros(5000, dtype=np.float32)
    one, again, other = draw(flat, 50, seed=1), draw(flat, 50, seed=1), draw(flat, 50, seed=2)
    np.testing.assert_array_equal(one, again)
    assert (one != other).sum() > 45
    assert (one[1:] != other[:-1]).sum() > 45, "seed + 1 must not be the same draws, one step later"
    assert len(set(one.tolist())) > 45
    largest = draw(flat, 50, seed=2**32 - 1)
    assert (largest != draw(flat, 50, seed=2**31 - 1)).sum() > 45


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (6, 3001)).astype(np.float32)
    rows: list[Row] = [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 40, 0.9, 0.0),
                       (1.5, 0, 1.0, 0.02), (3.0, 0, 0.99, 0.0), (0.9, 7, 0.5, 0.1)]  # fmt: skip
    inputs = flat_inputs(mx.array(logits), rows)
    together = flat_sample(*inputs)
    hostile = mx.array(np.where(np.arange(6)[:, None] == 2, logits, np.nan))
    among_broken = flat_sample(hostile, *inputs[1:])
    for b in range(6):
        alone = flat_sample(*(value[b : b + 1] for value in inputs))
        for whole, single in zip(together, alone, strict=True):
            assert mx.array_equal(whole[b : b + 1], single).item()
    for whole, single in zip(together, among_broken, strict=True):
        assert mx.array_equal(whole[2], single[2]).item()
    order = mx.array([4, 2, 0, 5, 1, 3])
    for whole, moved in zip(together, flat_sample(*(v[order] for v in inputs)), strict=True):
        assert mx.array_equal(whole[order], moved).item()


def test_greedy_is_argmax_and_so_is_temperature_zero() -> None:
    logits = mx.array(np.random.default_rng(4).normal(0, 5, (8, 1000)).astype(np.float32))
    expected = np.array(logits).argmax(axis=-1)
    rows: list[Row] = [(0.0, 50, 0.3, 0.9)] * 4 + [(2.0, 1, 1.0, 0.0)] * 4
    for result in (greedy(logits), flat_sample(*flat_inputs(logits, rows))):
        tokens, logprobs, finite = result[:3]
        assert (tokens.dtype, logprobs.dtype, finite.dtype) == (mx.int32, mx.float32, mx.bool_)
        np.testing.assert_array_equal(np.array(tokens), expected)
        assert finite.all().item()
    assert mx.array_equal(greedy(logits)[1], flat_sample(*flat_inputs(logits, rows))[1]).item()


def export_and_import(function: Callable[..., object], inputs: list[mx.array], folder: Path):
    mx.export_function(str(folder / "sample.mlxfn"), function, *inputs)
    return mx.import_function(str(folder / "sample.mlxfn"))


def test_compiled_and_imported_forms_equal_eager(tmp_path: Path) -> None:
    logits = mx.array(np.random.default_rng(8).normal(0, 4, (4, 5003)).astype(np.float32))
    rows: list[Row] = [(0.8, 50, 0.95, 0.05), (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0),
                       (1.4, 0, 0.9, 0.0)]  # fmt: skip
    traces = []

    def counted(*inputs: mx.array) -> tuple[mx.array, ...]:
        traces.append(1)
        return flat_sample(*inputs)

    compiled = mx.compile(counted)
    imported = export_and_import(flat_sample, flat_inputs(logits, rows), tmp_path)
    for seed in range(20):
        inputs = flat_inputs(logits + seed, rows[seed % 4 :] + rows[: seed % 4], seed)
        eager = flat_sample(*inputs)
        for ours, theirs in zip(eager, imported(*inputs), strict=True):
            assert mx.array_equal(ours, theirs).item()
        tokens, logprobs, finite = compiled(*inputs)
        assert mx.array_equal(tokens, eager[0]).item()
        assert mx.allclose(logprobs, eager[1], rtol=0, atol=2e-5).item()
        assert mx.array_equal(finite, eager[2]).item()
    assert len(traces) == 1, "values must never retrace"


def test_top_k_keeps_exactly_k_when_logits_tie() -> None:
    assert set(draw([0.0] * 10, 400, top_k=3)) == {0, 1, 2}
    assert set(draw([1.0, 5.0, 1.0, 1.0, 5.0, 1.0], 600, temperature=9.0, top_k=4)) == {0, 1, 2, 4}
    assert set(draw([-0.0, 0.0, -0.0, 0.0], 200, top_k=2)) == {0, 1}


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    assert set(draw(logits, 400, top_p=0.49)) == {0}
    assert set(draw(logits, 400, top_p=0.51)) == {0, 1}
    assert set(draw(logits, 400, top_p=0.74)) == {0, 1}
    assert set(draw(logits, 400, top_p=0.76)) == {0, 1, 2}  # of two equal ones the lowest id
    assert set(draw(logits, 400, top_p=0.95)) == {0, 1, 2, 3}


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(draw(logits, 400, top_p=0.65)) == {0, 1}
    assert set(draw(logits, 400, top_p=0.65, top_k=2)) == {0, 1}
    assert set(draw(logits, 400, top_p=0.55, top_k=2)) == {0}  # 0.4 of 0.7 is 0.57


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    logits = np.log([0.1, 0.5, 0.3, 0.1])
    assert set(draw(logits, 400, min_p=0.59)) == {1, 2}
    assert set(draw(logits, 400, min_p=0.61)) == {1}
    assert set(draw(logits, 400, min_p=1.0)) == {1}
    assert set(draw([4.0, 3.0, 4.0], 200, min_p=1.0)) == {0, 2}


def test_extreme_temperatures() -> None:
    logits = [2.0, 2.00001, -30.0, 1.0]
    assert set(draw(logits, 200, temperature=1e-6)) == {1}
    assert set(draw(logits, 200, temperature=1e-45)) == {1}
    assert set(draw(logits, 400, temperature=1e6)) == {0, 1, 2, 3}
    # A difference of two temperatures next to large logits is still a difference of two.
    close = draw([30.0, 30.0 + 2**-19], 2000, temperature=2**-20)
    assert np.mean(close == 0) == pytest.approx(1 / (1 + math.e**2), abs=0.03)


def test_one_token_always_survives() -> None:
    assert set(draw([7.0], 20, top_k=1, top_p=1e-30, min_p=1.0)) == {0}
    alone = [-math.inf] * 9 + [-5.0]
    for values in ({}, {"top_k": 4}, {"top_p": 0.1}, {"min_p": 0.5}, {"temperature": 0.0}):
        assert set(draw(alone, 20, **values)) == {9}
    chosen = make_settings(1, 10, temperature=1.0)
    _, logprobs, finite = sample(mx.array([alone]), chosen, mx.array([0]))[:3]
    assert (logprobs.item(), finite.item()) == (0.0, True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_reported_and_hurts_no_other(bad: float) -> None:
    good = [0.0, 1.0, 9.0, 2.0]
    logits = mx.array([good, [0.0, bad, 1.0, 2.0], good, [-math.inf] * 4])
    chosen = make_settings(4, 4, temperature=[1e-6, 1.0, 0.0, 0.7], top_k=3, top_p=0.9)
    for result in (sample(logits, chosen, mx.arange(4)), greedy(logits)):
        tokens, logprobs, finite = result[:3]
        assert finite.tolist() == [True, False, True, False]
        assert tokens.tolist() == [2, 0, 2, 0]
        assert mx.isnan(logprobs).tolist() == [False, True, False, True]
    count = count_kept(sort_ascending(logits), mx.ones((4, 1)), chosen)
    assert (count >= 1).all().item(), "a count of 0 would index past the row"


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_are_computed_with_in_float32(dtype: mx.Dtype) -> None:
    logits = mx.array(np.random.default_rng(2).normal(0, 4, (3, 2000))).astype(dtype)
    rows: list[Row] = [(1.0, 0, 0.9, 0.0), (0.5, 30, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    narrow = flat_inputs(logits, rows)
    wide = [logits.astype(mx.float32), *narrow[1:]]
    for ours, theirs in zip(flat_sample(*narrow), flat_sample(*wide), strict=True):
        assert mx.array_equal(ours, theirs).item()
    assert greedy(logits)[1].dtype == mx.float32
