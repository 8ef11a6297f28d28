"""Sampling options: what is refused, by name, and the arrays that are made of the rest."""

from __future__ import annotations

import math
from typing import Any

from funcrt.errors import InputError
from funcrt.sampling import (
    OPTION_NAMES,
    SETTING_INPUTS,
    SETTING_NAMES,
    History,
    check_settings,
    is_plain_greedy,
    make_history,
    make_settings,
    split_settings,
    stack_settings,
    uses_history,
)

import mlx.core as mx
import numpy as np
import pytest

V = 7
INF = math.inf


def test_settings_are_one_typed_array_per_name() -> None:
    chosen = make_settings(
        3, V, temperature=np.float32(0.5), top_k=[1, 2, 3], seed=(0, 7, 2**32 - 1), top_p=1e-42
    )
    assert tuple(chosen) == SETTING_INPUTS
    assert [str(chosen[name].dtype).split(".")[-1] for name in SETTING_INPUTS] == [
        "float32", "int32", "float32", "float32", "uint32", "float32", "float32", "float32",
        "float32", "int32",
    ]  # fmt: skip
    assert all(chosen[name].shape == (3,) for name in SETTING_NAMES)
    assert chosen["bias"].shape == chosen["history"].shape == (3, V)
    assert chosen["temperature"].tolist() == [0.5] * 3
    assert chosen["seed"].tolist() == [0, 7, 2**32 - 1]
    assert 0 < chosen["top_p"][0].item() < 1e-37


def test_defaults_change_nothing() -> None:
    chosen = make_settings(2, V)
    assert {name: chosen[name].tolist() for name in SETTING_NAMES} == {
        "temperature": [0, 0], "top_k": [0, 0], "top_p": [1, 1], "min_p": [0, 0], "seed": [0, 0],
        "repetition_penalty": [1, 1], "presence_penalty": [0, 0], "frequency_penalty": [0, 0],
    }  # fmt: skip
    assert not mx.any(chosen["bias"]).item()
    assert not mx.any(chosen["history"]).item()
    assert check_settings(V, **dict.fromkeys(OPTION_NAMES)) == check_settings(V)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", math.nan), ("temperature", INF),
     ("temperature", 1e39), ("temperature", "1"), ("temperature", [None, "x"]),
     ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", [0.5, -1.0]),
     ("min_p", -0.01), ("min_p", 1.5), ("top_k", -1), ("top_k", 2.5), ("top_k", 2**31),
     ("seed", -1), ("seed", 2**32), ("seed", 0.5),
     ("repetition_penalty", 0.0), ("repetition_penalty", -1.2), ("repetition_penalty", math.nan),
     ("repetition_penalty", INF), ("repetition_penalty", 1e-7), ("repetition_penalty", "1.1"),
     ("presence_penalty", math.nan), ("presence_penalty", -INF), ("presence_penalty", "0"),
     ("frequency_penalty", INF), ("frequency_penalty", 1e7),
     ("logit_bias", {1: math.nan}), ("logit_bias", {1: INF}), ("logit_bias", {1: "2"}),
     ("logit_bias", {1: True}), ("logit_bias", {1: 1e31}), ("logit_bias", {1: None})],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name} must be .*, got"):
        make_settings(2, V, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"logit_bias": {V: 1.0}}, "logit_bias: token id 7 is outside the vocabulary .0 to 6."),
     ({"logit_bias": {-1: 1.0}}, "logit_bias: token id -1 is outside"),
     ({"logit_bias": {"1": 1.0}}, "logit_bias: expected token ids, whole numbers, got '1'"),
     ({"logit_bias": {True: 1.0}}, "logit_bias: expected token ids"),
     ({"logit_bias": "ab"}, "logit_bias: expected a mapping of ids to numbers, got 'ab'"),
     ({"logit_bias": 3}, "logit_bias: expected a mapping"),
     ({"logit_bias": dict.fromkeys(range(V), -INF)}, "leave one to choose"),
     ({"logit_bias": {2: -INF, 3: -INF}, "allowed_tokens": [3, 2, 3]}, "leave one to choose"),
     ({"allowed_tokens": []}, "allowed_tokens is empty: list at least one id"),
     ({"allowed_tokens": [1, V]}, "allowed_tokens: token id 7 is outside"),
     ({"allowed_tokens": [1.0]}, "allowed_tokens: expected token ids"),
     ({"allowed_tokens": "12"}, "allowed_tokens: expected a list of token ids, got '12'"),
     ({"allowed_tokens": 5}, "allowed_tokens: expected a list"),
     ({"allowed_tokens": {1: 2}}, "allowed_tokens: expected a list"),
     ({"penalty": 1}, "unknown option 'penalty'; known: temperature, .*, allowed_tokens")],
)  # fmt: skip
def test_bad_ids_and_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_settings(V, **options)


def test_a_wrong_number_of_rows_is_refused() -> None:
    for name, value in [("top_k", [1, 2, 3]), ("logit_bias", [{}] * 3)]:
        with pytest.raises(InputError, match=f"{name}: expected one value or 4, one per row, got"):
            make_settings(4, V, **{name: value})
    with pytest.raises(InputError, match="allowed_tokens: expected one value or 4"):
        make_settings(4, V, allowed_tokens=[[1], [2]])
    rows = split_settings(2, V)
    for histories in ([None], [None] * 3):
        with pytest.raises(InputError, match="history: expected 2 rows, got"):
            stack_settings(rows, V, histories)
    for wrong in (mx.zeros((2, V)), mx.zeros((1, V), mx.int32), mx.zeros((2, V + 1), mx.int32)):
        with pytest.raises(InputError, match=r"history: expected int32 \[2, 7\], got"):
            make_settings(2, V, history=wrong)
    for bad in (V, -1, 1.5, True):
        with pytest.raises(InputError, match="history: "):
            make_history([None, History([1], [bad])], V)


def test_one_value_is_for_all_rows_and_several_are_one_each() -> None:
    rows = split_settings(
        2, V, temperature=(t for t in (0.5, 1.0)), logit_bias={1: 2}, allowed_tokens=iter([1, 2, 1])
    )
    assert [row["temperature"] for row in rows] == [0.5, 1.0]
    assert [row["logit_bias"] for row in rows] == [{1: 2.0}] * 2
    assert [row["allowed_tokens"] for row in rows] == [(1, 2)] * 2
    rows = split_settings(2, V, logit_bias=[None, {3: -INF}], allowed_tokens=[None, [3, 4]])
    assert [row["allowed_tokens"] for row in rows] == [None, (3, 4)]
    assert rows[0] == check_settings(V)
    assert split_settings(0, V, temperature=[]) == []


def test_bias_and_allowed_tokens_end_in_one_array() -> None:
    bias = make_settings(
        4,
        V,
        logit_bias=[{0: 1.5, 2: -INF}, None, {1: 2.0, 5: -3.0}, {}],
        allowed_tokens=[None, [6, 4], (1, 3), range(V)],
    )["bias"]
    expected = np.zeros((4, V))
    expected[0, [0, 2]] = 1.5, -INF
    expected[1] = [-INF] * 4 + [0, -INF, 0]
    expected[2] = [-INF, 2, -INF, 0, -INF, -INF, -INF]  # a bias does not allow what is not listed
    np.testing.assert_array_equal(np.array(bias), expected)


def test_history_marks_the_prompt_and_counts_the_rest() -> None:
    histories = [History([1, 1, 2], [3, 1, 3, 3]), None, History(generated=[6])]
    history = make_history(histories, V)
    assert history.dtype == mx.int32
    assert history.tolist() == [[0, 3, 1, 6, 0, 0, 0], [0] * V, [0] * 6 + [2]]
    chosen = make_settings(3, V, history=histories)
    assert chosen["history"].tolist() == history.tolist()
    assert make_settings(3, V, history=history)["history"].tolist() == history.tolist()
    both = make_settings(2, V, history=histories[0])["history"].tolist()
    assert both == history.tolist()[:1] * 2


@pytest.mark.parametrize(
    ("options", "plain", "history"),
    [({}, True, False), ({"temperature": 0.1}, False, False), ({"top_k": 3}, True, False),
     ({"logit_bias": {1: 0.0}}, False, False), ({"allowed_tokens": range(V)}, False, False),
     ({"repetition_penalty": 1.1}, False, True), ({"presence_penalty": -0.1}, False, True),
     ({"frequency_penalty": 0.1}, False, True), ({"seed": 3}, True, False)],
)  # fmt: skip
def test_what_a_row_needs(options: dict[str, Any], plain: bool, history: bool) -> None:
    row = check_settings(V, **options)
    assert (is_plain_greedy(row), uses_history(row)) == (plain, history)
