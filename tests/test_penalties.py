"""Bias, penalties, histories and alternatives against oracles written from their definitions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from funcrt.sampling import (
    SETTING_INPUTS,
    History,
    adjust,
    greedy,
    make_history,
    make_settings,
    record,
    sample,
    top,
)

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

INF = math.inf
Array = np.ndarray


def adjust_by_hand(logits: Array, history: History, **options: Any) -> Array:
    """One row of float32 logits, token by token as the definitions say.

    Repetition: Keskar et al. 2019 divide the logits of all that was said before; where a logit is
    negative Hugging Face multiplies instead, so that it falls, too. Presence and frequency, as
    OpenAI has it: `mu[j] - c[j] * frequency - float(c[j] > 0) * presence`, c counting samples.
    """
    adjusted = logits.astype(np.float32).copy()
    allowed = options.get("allowed_tokens")
    for token in range(len(logits)):
        adjusted[token] += np.float32(options.get("logit_bias", {}).get(token, 0.0))
        if allowed is not None and token not in allowed:
            adjusted[token] = -INF
        penalty = np.float32(options.get("repetition_penalty", 1.0))
        if token in [*history.prompt, *history.generated]:
            adjusted[token] = (
                adjusted[token] * penalty if adjusted[token] < 0 else adjusted[token] / penalty
            )
        count = np.float32(list(history.generated).count(token))
        adjusted[token] -= count * np.float32(options.get("frequency_penalty", 0.0)) + np.float32(
            count > 0
        ) * np.float32(options.get("presence_penalty", 0.0))
    return adjusted


@st.composite
def cases(draw: st.DrawFn) -> tuple[Array, list[History], list[dict[str, Any]]]:
    V = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows = draw(st.integers(1, 3))
    logits = rng.normal(0, 4, (rows, V)).astype(np.float32)
    if draw(st.booleans()):
        logits[:, ::4] = -INF
    ids = st.integers(0, V - 1)
    histories = [
        History(draw(st.lists(ids, max_size=6)), draw(st.lists(ids, max_size=8)))
        for _ in range(rows)
    ]
    options = st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7, 50.0, 1e-6, 1e6]),
            "presence_penalty": st.sampled_from([0.0, 0.4, -2.0, 1e6]),
            "frequency_penalty": st.sampled_from([0.0, 0.3, -1.5, 1e6]),
            "logit_bias": st.dictionaries(ids, st.sampled_from([2.5, -100.0, 1e30])),
            "allowed_tokens": st.none() | st.lists(ids, min_size=1),
        }
    )
    return logits, histories, [draw(options) for _ in range(rows)]


def stack(options: list[dict[str, Any]], vocab: int, histories: list[History]) -> dict[str, Any]:
    names = {name for row in options for name in row}
    values = {name: [row.get(name) for row in options] for name in names}
    return make_settings(len(options), vocab, history=histories, **values)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_adjusted_logits_equal_the_definitions(
    case: tuple[Array, list[History], list[dict[str, Any]]],
) -> None:
    logits, histories, options = case
    chosen = stack(options, logits.shape[1], histories)
    adjusted = np.array(adjust(mx.array(logits), chosen))
    expected = [adjust_by_hand(*row[:2], **row[2]) for row in zip(*case, strict=True)]
    np.testing.assert_allclose(adjusted, expected, rtol=1e-6)
    positions = mx.arange(3, 3 + len(options), dtype=mx.int32)
    result = sample(mx.array(logits), chosen, positions)
    for b, row in enumerate(expected):
        if np.isfinite(row).any():
            best = row.max()
            # Bias of 1e30 hides all else; so do rounding errors next to penalties of 1e6.
            assert row[result.tokens[b].item()] == pytest.approx(best, rel=1e-6)
            raw = logits[b].astype(np.float64)
            total = raw.max() + np.log(np.exp(raw - raw.max()).sum())
            expected_logprob = raw[result.tokens[b].item()] - total
            assert result.logprobs[b].item() == pytest.approx(expected_logprob, abs=1e-5)
            assert result.finite[b].item()
        else:
            assert (result.tokens[b].item(), result.finite[b].item()) == (0, False)
            assert math.isnan(result.logprobs[b].item())


def test_settings_that_are_off_change_no_bit() -> None:
    logits = mx.array(np.random.default_rng(0).normal(0, 4, (4, 999)).astype(np.float32))
    history = [History(range(500), [3, 3, 4])] * 4
    adjusted = adjust(logits, make_settings(4, 999, history=history))
    assert mx.array_equal(adjusted, logits).item()
    names = {"temperature": [1.0, 0.7, 0.0, 2.0], "top_p": 0.9, "top_k": 50, "seed": range(4)}
    positions = mx.arange(4, dtype=mx.int32)
    plain = sample(logits, make_settings(4, 999, **names), positions)
    used = sample(logits, make_settings(4, 999, history=history, **names), positions)
    assert mx.array_equal(plain.tokens, used.tokens).item()
    assert mx.array_equal(plain.logprobs, used.logprobs).item()


def test_greedy_rows_take_the_best_adjusted_token() -> None:
    logits = mx.array([[1.0, 3.0, 2.9, -1.0]] * 6)
    options: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.2},
        {"frequency_penalty": 0.06},
        {"allowed_tokens": [3, 0]},
        {"logit_bias": {3: 4.2}},
    ]
    histories = [History([1]), History([1]), History([1]), History([], [1, 1])] + [History()] * 2
    result = sample(logits, stack(options, 4, histories), mx.zeros(6, dtype=mx.int32))
    assert result.tokens.tolist() == [1, 2, 1, 2, 0, 3]  # presence does not look at the prompt
    raw = np.array([1.0, 3.0, 2.9, -1.0])
    logprobs = raw - np.log(np.exp(raw).sum())
    np.testing.assert_allclose(result.logprobs, logprobs[result.tokens.tolist()], atol=1e-6)
    # A negative logit falls as well, and a penalty below 1 favours what was said.
    low = mx.array([[-1.0, -1.1, -9.0]])
    for penalty, expected in [(1.2, 1), (0.9, 0)]:
        chosen = make_settings(1, 3, repetition_penalty=penalty, history=History([0]))
        assert sample(low, chosen, mx.array([0])).tokens.item() == expected


def test_a_row_that_may_choose_nothing_says_so() -> None:
    logits = mx.array([[-INF, 1.0, 2.0], [3.0, 1.0, 2.0], [-INF, 1.0, math.nan]])
    for temperature in (0.0, 1.0):
        chosen = make_settings(3, 3, temperature=temperature, allowed_tokens=[0])
        result = sample(logits, chosen, mx.zeros(3, dtype=mx.int32))
        assert result.finite.tolist() == [False, True, False]
        assert result.tokens.tolist() == [0, 0, 0]
        assert mx.isnan(result.logprobs).tolist() == [True, False, True]
        assert result.history.tolist() == [[0, 0, 0], [2, 0, 0], [0, 0, 0]]
        active = mx.array([True, True, True])
        again = sample(logits, chosen, mx.zeros(3, dtype=mx.int32), active)
        assert mx.array_equal(again.history, result.history).item()


def test_only_active_rows_count_and_the_prompt_bit_stays() -> None:
    logits = mx.array([[0.0, 5.0, 0.0]] * 3)
    history = [History([1]), History([1], [1]), History()]
    chosen = make_settings(3, 3, history=history)
    active = mx.array([True, True, False])
    result = sample(logits, chosen, mx.zeros(3, dtype=mx.int32), active)
    assert result.history.tolist() == [[0, 3, 0], [0, 5, 0], [0, 0, 0]]
    assert chosen["history"].tolist() == make_history(history, 3).tolist()  # not changed in place
    every = sample(logits, chosen, mx.zeros(3, dtype=mx.int32))
    assert every.history.tolist() == [[0, 3, 0], [0, 5, 0], [0, 2, 0]]
    assert greedy(logits).history is None
    several = record(make_history([History([2])], 3), mx.array([[2, 2, 0]]), mx.array([[1, 1, 0]]))
    assert several.tolist() == [[0, 0, 5]]


def test_a_long_run_counts_what_it_drew() -> None:
    rng = np.random.default_rng(1)
    logits = mx.array(rng.normal(0, 1, (2, 12)).astype(np.float32))
    chosen = make_settings(
        2, 12, temperature=[1.0, 0.0], frequency_penalty=0.3, seed=5, history=History([4])
    )
    said: list[list[int]] = [[], []]
    for n in range(60):
        for b in range(2):
            best = adjust_by_hand(
                np.array(logits)[b], History([4], said[b]), frequency_penalty=0.3
            ).argmax()
        result = sample(logits, chosen, mx.array([n, n]))
        chosen = {**chosen, "history": result.history}
        assert result.tokens[1].item() == best
        for b in range(2):
            said[b].append(result.tokens[b].item())
        assert result.history.tolist() == make_history([History([4], s) for s in said], 12).tolist()
    assert len(set(said[1])) > 6  # the penalty makes a greedy row move on


def test_draws_follow_the_adjusted_distribution() -> None:
    logits = np.array([0.3, -1.2, 2.0, 0.9, -0.4, 1.1, -2.5, 0.0], dtype=np.float32)
    history = History([2, 1, 7], [3, 3, 5])
    options: dict[str, Any] = {
        "repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": -0.4,
        "logit_bias": {6: 3.0, 0: -INF},
    }  # fmt: skip
    times = 20_000
    chosen = make_settings(1, 8, temperature=0.8, seed=11, history=history, **options)
    spread = {n: mx.broadcast_to(a, (times, *a.shape[1:])) for n, a in chosen.items()}
    rows = mx.broadcast_to(mx.array(logits), (times, 8))
    tokens = np.array(sample(rows, spread, mx.arange(times, dtype=mx.int32)).tokens)

    def chi_square(**changes: Any) -> float:
        adjusted = adjust_by_hand(logits, history, **{**options, **changes}).astype(np.float64)
        share = np.exp(adjusted / 0.8)
        share /= share.sum()
        counts = np.bincount(tokens, minlength=8)
        assert counts[share == 0].sum() == 0
        expected = (times * share)[share > 0]
        return float(((counts[share > 0] - expected) ** 2 / expected).sum())

    # 29.9 is the 0.9999 quantile with 7 degrees of freedom, more than there are.
    assert chi_square() < 29.9
    assert chi_square(repetition_penalty=1.3) > 29.9  # the bound sees a wrong penalty
    assert chi_square(presence_penalty=0.1) > 29.9


def flat(logits: mx.array, positions: mx.array, *values: mx.array) -> tuple[Any, ...]:
    result = sample(logits, dict(zip(SETTING_INPUTS, values, strict=True)), positions)
    return tuple(array for array in result if array is not None)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_compiled_and_imported_forms_equal_eager(tmp_path: Path, dtype: mx.Dtype) -> None:
    logits = mx.array(np.random.default_rng(8).normal(0, 4, (3, 1003))).astype(dtype)
    traces = []

    def counted(*inputs: mx.array) -> tuple[Any, ...]:
        traces.append(1)
        return flat(*inputs)

    compiled, imported = mx.compile(counted), None
    positions = mx.arange(3, dtype=mx.int32)
    for n in range(4):
        chosen = make_settings(
            3, 1003, temperature=[0.0, 0.9, 1.2], top_k=40, seed=n,
            repetition_penalty=[1.3, 1.0 + n / 10, 0.8], presence_penalty=[0.0, 0.5, n],
            frequency_penalty=0.2, logit_bias=[{n: 3.0}, None, {5: -INF}],
            allowed_tokens=[None, range(n, 1003, 2), None],
            history=[History(range(9), [1, 1, n]), None, History([], range(n))],
        )  # fmt: skip
        inputs = [logits, positions, *chosen.values()]
        if imported is None:
            mx.export_function(str(tmp_path / "f.mlxfn"), flat, *inputs)
            imported = mx.import_function(str(tmp_path / "f.mlxfn"))
        eager = flat(*inputs)
        assert all(
            mx.array_equal(a, b).item() for a, b in zip(eager, imported(*inputs), strict=True)
        )
        tokens, logprobs, finite, history = compiled(*inputs)
        assert mx.array_equal(tokens, eager[0]).item()
        assert mx.allclose(logprobs, eager[1], rtol=0, atol=2e-5).item()
        assert mx.array_equal(finite, eager[2]).item()
        assert mx.array_equal(history, eager[3]).item()
    assert len(traces) == 1, "values must never retrace"


# --- alternatives --------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(1, 3), st.integers(0, 2**31), st.sampled_from([0, 1, 3]))
def test_top_gives_the_most_likely_tokens_in_order(
    V: int, batch: int, seed: int, step: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (batch, V)).astype(np.float32)
    if step:
        logits = np.round(logits / step) * step  # ties, and both zeros
        logits[:, ::5] = -INF if V > 5 else 0
    ids, logprobs = top(mx.array(logits))
    N = min(20, V)
    assert (ids.shape, ids.dtype) == ((batch, N), mx.int32)
    assert (logprobs.shape, logprobs.dtype) == ((batch, N), mx.float32)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :N]
    np.testing.assert_array_equal(np.array(ids), order)
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        np.array(logprobs), np.take_along_axis(expected, order, -1), atol=1e-5
    )


def test_top_of_broken_rows_hurts_no_other() -> None:
    rows = [[1.0, 2.0, 0.0], [math.nan, 1.0, -math.nan], [INF, 0.0, 1.0], [-INF] * 3]
    ids, logprobs = top(mx.array(rows))
    assert ids[0].tolist() == [1, 0, 2]
    for row in ids.tolist():
        assert sorted(row) == [0, 1, 2]
    assert mx.any(mx.isnan(logprobs), axis=1).tolist() == [False, True, True, True]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_top_compiled_and_imported(tmp_path: Path, dtype: mx.Dtype) -> None:
    logits = mx.array(np.random.default_rng(3).normal(0, 3, (2, 3001))).astype(dtype)
    eager = top(logits)
    order = np.argsort(-np.array(logits.astype(mx.float32)), axis=-1, kind="stable")
    np.testing.assert_array_equal(np.array(eager[0]), order[:, :20])
    mx.export_function(str(tmp_path / "top.mlxfn"), top, logits)
    for form in (mx.compile(top), mx.import_function(str(tmp_path / "top.mlxfn"))):
        ids, logprobs = form(logits)
        assert mx.array_equal(ids, eager[0]).item()
        assert mx.allclose(logprobs, eager[1], rtol=0, atol=2e-5).item()
