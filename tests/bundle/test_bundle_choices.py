"""Golden calls of functions that choose tokens, and what the verification sees of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from funcrt import sampling
from funcrt.bundle import Bundle, export, load_bundle, verify
from funcrt.bundle.golden.calls import VERIFYING
from funcrt.bundle.golden.choices import expect_top, make_sparse
from funcrt.bundle.golden.replay import places, replay, spread_settings
from funcrt.compiled import Compiled
from funcrt.model import Model
from funcrt.sampling import History
from funcrt.storage import load_arrays
from tests.bundle.conftest import SMALL, Exports
from tests.helpers import TINY, random_tokens
from tests.toy_families import make_toy, registered

import mlx.core as mx
import numpy as np
import pytest


def test_sparse_settings_are_spread_to_what_was_meant() -> None:
    rows = sampling.split_settings(
        4,
        9,
        logit_bias=[{1: 2.0, 3: -math.inf}, None, {2: 1.5, 8: 4.0}, None],
        allowed_tokens=[None, None, [2, 5], None],
    )
    histories = [History([1, 1, 4], [4, 4, 0]), History(), History([8]), History([], [3])]
    for chosen in (slice(0, 4), slice(1, 2)):  # the second has nothing at all
        sparse = make_sparse(rows[chosen], histories[chosen])
        expected = sampling.stack_settings(rows[chosen], 9, histories[chosen])
        for name, array in spread_settings(sparse, 9).items():
            assert array.dtype == expected[name].dtype
            assert mx.array_equal(array, expected[name]).item()


def test_expected_alternatives_take_the_lowest_of_equal_ids() -> None:
    logits = mx.array([[0.0, -0.0, 2.0, 0.0], [1.0, 1.0, 3.0, 3.0]])
    expected = expect_top(logits)
    assert expected["expected_tokens"].tolist() == [2, 0, 1, 3, 2, 3, 0, 1]
    assert mx.allclose(expected["reference"], sampling.top(logits)[1].reshape(-1)).item()


@pytest.mark.parametrize("kind", ["float32", "affine", "bfloat16"])
def test_guesses_are_right_and_wrong(exports: Exports, kind: str) -> None:
    bundle = load_bundle(exports(kind)[1])
    arrays = load_arrays(bundle.folder / "golden/cpu.safetensors")
    seen: dict[str, set[tuple[int, int]]] = {name: set() for name in VERIFYING}
    for place, observed in replay(bundle.compiled(), bundle.target.golden, arrays):
        if place.call.function in VERIFYING:
            counts: Any = mx.sum(arrays[f"{place.prefix}valid"], axis=1).tolist()
            seen[place.call.function] |= set(zip(counts, observed.accepted.tolist(), strict=True))
    for name, pairs in seen.items():
        assert any(accepted > 0 for _, accepted in pairs), name
        assert any(accepted < count - 1 for count, accepted in pairs), name
    assert (0, 0) in seen["verify"]  # an idle row


def test_wide_inputs_are_small_on_disk(bundle: Bundle) -> None:
    arrays = load_arrays(bundle.folder / "golden/cpu.safetensors")
    wide = {name for name, array in arrays.items() if array.shape[-1:] == (bundle.vocab_size,)}
    assert {name.rpartition(".")[2] for name in wide} == {"logits"}  # of `sample`; `top` uses them
    for place in places(bundle.target.golden):
        if "history.values" in {n.removeprefix(place.prefix) for n in arrays}:
            penalties = arrays[f"{place.prefix}repetition_penalty"].tolist()
            assert len(set(penalties)) > 1
            assert arrays[f"{place.prefix}history.values"].size > 0
            assert arrays[f"{place.prefix}bias.values"].size > 0


@pytest.mark.parametrize("function", ["verify", "verify_greedy", "decode", "sample"])
@pytest.mark.parametrize("name", ["accepted", "history"])
def test_results_that_contradict_themselves_fail(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, function: str, name: str
) -> None:
    original = getattr(Compiled, function)

    def spoil(chosen: sampling.Sampled) -> sampling.Sampled:
        array = getattr(chosen, name)
        return chosen if array is None else chosen._replace(**{name: array + 1})

    def run(*arguments: Any) -> Any:
        result = original(*arguments)
        if function == "sample":
            return spoil(result)
        return spoil(result[0]), result[1]

    monkeypatch.setattr(Compiled, function, run)
    failed = {
        (row.function.partition("_b")[0], row.check)
        for row in verify(bundle, write=False)
        if not row.passed
    }
    gives = {
        "verify": {"accepted", "history"},
        "verify_greedy": {"accepted"},
        "decode": {"history"},
        "sample": {"history"},
    }[function]
    expected = {(function, name)} if name in gives else set()
    if expected and name == "accepted":
        expected.add((function, "lengths"))
    assert failed == expected


def test_a_wrong_rollback_fails(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Compiled.verify_greedy

    def run(*arguments: Any) -> Any:
        chosen, state = original(*arguments)
        return chosen, {**state, "lengths": state["lengths"] + 1}

    monkeypatch.setattr(Compiled, "verify_greedy", run)
    failed = {
        (row.function.partition("_b")[0], row.check)
        for row in verify(bundle, write=False)
        if not row.passed
    }
    assert failed == {("verify_greedy", "lengths")}


def test_a_bundle_speculates_as_its_model_does(model: Model, bundle: Bundle) -> None:
    functions = [model.compiled(bundle.plan), bundle.compiled()]
    chosen = sampling.make_settings(
        2, TINY.vocab_size, temperature=[0.8, 0.0], repetition_penalty=1.2, seed=[1, 2],
        history=History([5, 6], [7]),
    )  # fmt: skip
    tokens = mx.array([random_tokens(4, 1), random_tokens(4, 2)], dtype=mx.int32)
    valid = mx.array([[1, 1, 1, 1], [0, 1, 1, 0]])
    results = []
    for compiled in functions:
        logits, state = compiled.prefill(tokens, valid, compiled.init_cache(2, 16))
        right = compiled.sample(logits, state["lengths"] + 0, chosen)
        line = mx.concatenate([right.tokens[:, None], tokens[:, :1], tokens[:, :2]], axis=1)
        seen, state = compiled.verify(line, valid, {**chosen, "history": right.history}, state)
        greedy, state = compiled.verify_greedy(line, valid, state)
        results.append(
            [*compiled.top(logits), *seen, *greedy[:4], greedy.accepted, *state.values()]
        )
    for ours, theirs in zip(*results, strict=True):
        close = mx.allclose(ours, theirs, rtol=0, atol=1e-4, equal_nan=True)
        assert close.item()


def test_a_model_that_cannot_go_back(tmp_path: Path) -> None:
    with registered():
        model = make_toy("toy_hybrid")
        bundle = export(model, tmp_path / "hybrid", SMALL)
        rows = verify(bundle, write=False)
        assert all(row.passed for row in rows)
        assert {"verify_b2_t8_s16", "verify_greedy_b2_t8_s16"} <= {row.function for row in rows}
        eager, exported = model.compiled(SMALL, eager=True), bundle.compiled()
    tokens = mx.array([[t % 64 for t in random_tokens(8, row)] for row in range(2)], dtype=mx.int32)
    valid = mx.array([[True] * 8, [False] * 3 + [True] * 5])
    states = []
    for compiled in (eager, exported):
        seen, state = compiled.verify_greedy(tokens, valid, compiled.init_cache(2, 16))
        states.append(state)
        assert state["lengths"].tolist() == (1 + seen.accepted).tolist()
    for ours, theirs in zip(*(state.values() for state in states), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-4)
