"""Rules of routing against float64 oracles that take one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from funcrt.errors import ConfigError
from funcrt.ops import routing
from tests.helpers import Array, relative_error, to_numpy

import mlx.core as mx
import numpy as np
import pytest

EXPERTS, CHOSEN, GROUPS, KEPT, SCALE = 12, 3, 4, 2, 2.5
LEAST = 0.5  # more than some sums of weights, less than others
BIAS = np.random.default_rng(7).normal(0, 0.3, EXPERTS)
Rule = Callable[[Any], tuple[mx.array, mx.array]]


def softmax(scores: Array) -> Array:
    scores = np.exp(scores - scores.max())
    return scores / scores.sum()


def best(scores: Array, count: int = CHOSEN) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def within_groups(scores: Array, most: int) -> Array:
    groups = scores.reshape(GROUPS, -1)
    kept = best(np.sort(groups, axis=1)[:, -most:].sum(1), KEPT)
    return np.where(np.isin(np.arange(GROUPS), kept)[:, None], groups, -np.inf).ravel()


def mixtral(scores: Array) -> tuple[list[int], Array]:
    chosen = best(scores)
    return chosen, softmax(scores)[chosen] / softmax(scores)[chosen].sum()


def plain(scores: Array) -> tuple[list[int], Array]:
    chosen = best(scores)
    return chosen, SCALE * softmax(scores)[chosen]


def gpt_oss(scores: Array) -> tuple[list[int], Array]:
    chosen = best(scores)
    return chosen, softmax(scores[chosen])


def deepseek_v2(scores: Array) -> tuple[list[int], Array]:
    chosen = best(within_groups(softmax(scores), 1))
    return chosen, SCALE * softmax(scores)[chosen]


def deepseek_v3(scores: Array, normalize: bool = True) -> tuple[list[int], Array]:
    weights = 1 / (1 + np.exp(-scores))
    chosen = best(within_groups(weights + BIAS, 2))
    total = weights[chosen].sum() if normalize else 1
    return chosen, SCALE * weights[chosen] / total


def ernie(scores: Array) -> tuple[list[int], Array]:
    weights = softmax(scores)
    chosen = best(weights + BIAS)
    return chosen, weights[chosen] / max(weights[chosen].sum(), LEAST)


grouped = {"groups": GROUPS, "kept": KEPT, "scale": SCALE}
biased = partial(routing.route_sigmoid, count=CHOSEN, bias=mx.array(BIAS), **grouped)
RULES: dict[str, tuple[Rule, Callable[[Array], tuple[list[int], Array]]]] = {
    "mixtral": (partial(routing.route_softmax, count=CHOSEN, normalize=True), mixtral),
    "plain": (partial(routing.route_softmax, count=CHOSEN, normalize=False, scale=SCALE), plain),
    "gpt_oss": (partial(routing.route_top_softmax, count=CHOSEN), gpt_oss),
    "deepseek_v2": (partial(routing.route_grouped_softmax, count=CHOSEN, **grouped), deepseek_v2),
    "deepseek_v3": (partial(biased, normalize=True), deepseek_v3),
    "ernie": (
        partial(
            routing.route_corrected_softmax, count=CHOSEN, bias=mx.array(BIAS[None]), least=LEAST
        ),
        ernie,
    ),
    "unnormed": (partial(biased, normalize=False), partial(deepseek_v3, normalize=False)),
}
every = pytest.mark.parametrize(("rule", "oracle"), RULES.values(), ids=RULES)


def make_scores(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 2, (*shape, EXPERTS)).astype(np.float32))


@every
def test_equals_the_rule(rule: Rule, oracle: Any) -> None:
    scores = make_scores(3, 40)
    chosen, weights = rule(scores)
    assert weights.dtype == mx.float32
    assert chosen.shape == weights.shape == (3, 40, CHOSEN)
    rows = [oracle(line) for line in to_numpy(scores).reshape(-1, EXPERTS)]
    assert chosen.reshape(-1, CHOSEN).tolist() == [row[0] for row in rows]
    expected = np.stack([row[1] for row in rows]).reshape(weights.shape)
    assert relative_error(weights, expected) < 1e-6


@every
def test_of_equals_the_lower_expert_comes_first(rule: Rule, oracle: Any) -> None:
    scores = mx.round(make_scores(1, 64, seed=1) / 2)  # few values, so many ties
    scores[0, 0] = 0
    for line, chosen in zip(to_numpy(scores[0]), rule(scores)[0][0].tolist(), strict=True):
        assert chosen == oracle(line)[0]


@every
def test_a_token_does_not_depend_on_others(rule: Rule, oracle: Any) -> None:
    scores, others = make_scores(2, 30), make_scores(2, 30, seed=5)
    others[0, 7:11] = scores[0, 7:11]
    for a, b in zip(rule(scores), rule(others), strict=True):
        assert mx.array_equal(a[0, 7:11], b[0, 7:11])
    for a, b in zip(rule(scores), rule(scores[1:, 3:4]), strict=True):
        assert mx.array_equal(a[1:, 3:4], b)


@every
def test_differentiates(rule: Rule, oracle: Any) -> None:
    scores = make_scores(1, 5, seed=3)
    rng = np.random.default_rng(0)
    weigh, along = rng.normal(size=(5, CHOSEN)), rng.normal(size=(5, EXPERTS))
    gradient = mx.grad(lambda s: mx.sum(rule(s)[1] * mx.array(weigh)))(scores)
    exact = [
        sum((oracle(line)[1] * w).sum() for line, w in zip(moved, weigh, strict=True))
        for moved in (to_numpy(scores[0]) + 1e-6 * along, to_numpy(scores[0]) - 1e-6 * along)
    ]
    ours = (to_numpy(gradient[0]) * along).sum()
    assert abs(ours - (exact[0] - exact[1]) / 2e-6) < 1e-5 * SCALE


@every
def test_compiles_and_exports(rule: Rule, oracle: Any, tmp_path: Path) -> None:
    scores = make_scores(2, 9)
    expected = rule(scores)
    path = str(tmp_path / "route.mlxfn")
    mx.export_function(path, rule, scores)
    for found in (mx.compile(rule)(scores), mx.import_function(path)(scores)):
        assert mx.array_equal(found[0], expected[0])
        assert relative_error(found[1], expected[1]) < 1e-6


@every
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_computes_in_float32(rule: Rule, oracle: Any, dtype: mx.Dtype) -> None:
    scores = make_scores(1, 20).astype(dtype)
    chosen, weights = rule(scores)
    for a, b in zip((chosen, weights), rule(scores.astype(mx.float32)), strict=True):
        assert mx.array_equal(a, b)


def test_all_groups_kept_are_no_groups() -> None:
    scores = make_scores(1, 20)
    all_kept = routing.route_grouped_softmax(scores, CHOSEN, groups=4, kept=4, scale=1.0)
    for a, b in zip(all_kept, routing.route_softmax(scores, CHOSEN, normalize=False), strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize(("groups", "kept"), [(5, 2), (4, 5), (6, 1), (12, 6)])
def test_impossible_groups_raise(groups: int, kept: int) -> None:
    with pytest.raises(ConfigError, match=f"{kept} of {groups} groups"):
        routing.route_sigmoid(
            make_scores(1, 2), CHOSEN, bias=mx.array(BIAS), groups=groups, kept=kept,
            normalize=True, scale=1.0,
        )  # fmt: skip
