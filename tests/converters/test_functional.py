"""Modules of mlx-lm as pure functions: one of each kind of cache, at test speed.

The table of all modules is made by `tests/reference/make_mlx_lm_modules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import converters
from funcrt.model import Model
from tests.reference.mlx_lm_checks import (
    distance,
    make_module,
    run_model,
    run_module,
    tokens_of,
)

import mlx.core as mx
import pytest
from mlx import nn

pytest.importorskip("mlx_lm")

SAMPLE = ["llama", "gemma2", "gemma3_text", "mamba2", "llama4", "deepseek_v3", "falcon_h1"]
PROMPTS = [23, 9, 1]
ROWS = [tokens_of(i, n + 3) for i, n in enumerate(PROMPTS)]
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=SAMPLE)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Model]]:
    module = make_module(request.param)
    yield module, converters.functionalize(module)


def test_eager_is_what_mlx_lm_computes(pair: tuple[nn.Module, Model]) -> None:
    module, model = pair
    theirs = run_module(module, ROWS[0], PROMPTS[0])
    ours = run_model(model, model.forward, ROWS[:1], PROMPTS[:1], False)[0]
    assert distance(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize("left", [True, False])
def test_ragged_rows_are_what_they_are_alone(pair: tuple[nn.Module, Model], left: bool) -> None:
    module, model = pair
    together = run_model(model, mx.compile(model.forward), ROWS, PROMPTS, left)
    for row, prompt, ours in zip(ROWS, PROMPTS, together, strict=True):
        assert distance(ours, run_module(module, row, prompt)) <= TOLERANCE


def snapshot(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        found[name] = (dict(part), dict(vars(part)))
    return found


def assert_untouched(before: dict[str, Any], module: nn.Module) -> None:
    after = snapshot(module)
    assert before.keys() == after.keys()
    for name, (items, attributes) in before.items():
        assert list(items) == list(after[name][0])
        assert all(after[name][0][key] is value for key, value in items.items())
        assert attributes.keys() == after[name][1].keys()
        assert all(after[name][1][key] is value for key, value in attributes.items())


def test_the_module_is_left_as_it_was(pair: tuple[nn.Module, Model]) -> None:
    module, model = pair
    before = snapshot(module)
    run_model(model, mx.compile(model.forward), ROWS[1:2], PROMPTS[1:2], False)
    assert_untouched(before, module)
