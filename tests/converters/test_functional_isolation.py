"""What a module is called with and in stays its own: constants, state, patched functions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import converters
from funcrt import cache, masks
from funcrt.model import Model
from tests.helpers import relative_error
from tests.reference.mlx_lm_checks import distance, make_module, run_model, run_module, tokens_of

import mlx.core as mx
from mlx import nn
from mlx_lm.models import cache as caches

TOLERANCE = 2e-5
ROW = tokens_of(0, 26)


class Tiny(nn.Module):
    """A model of one layer, for others to add to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_module("llama")

    @property
    def layers(self) -> Any:
        return self.inner.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.inner(tokens, cache=cache)


def run(model: Model, ids: list[int], capacity: int) -> mx.array:
    state = model.init_cache(1, capacity)
    size = cache.state_size(state)[1]
    mask = masks.causal(mx.ones((1, len(ids))), state["lengths"], size)
    return model.forward(model.params, mx.array([ids], dtype=mx.int32), mask, state)[0]


# --- sizes that happen to be equal ---------------------------------------------------------------


class Ranges(Tiny):
    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits = super().__call__(tokens, cache)
        numbers = mx.arange(4, 9).astype(mx.float32)[None, None]  # 9 slots end with these 5
        return logits.at[..., :5].add(numbers)


class Rotates(Tiny):
    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits = super().__call__(tokens, cache)
        turned = mx.fast.rope(
            logits[:, None, :, :100], 100, traditional=False, base=1e4, scale=1.0, offset=4
        )
        return mx.concatenate([turned[:, 0], logits[..., 100:]], axis=-1)


@pytest.mark.parametrize("kind", [Ranges, Rotates])
@pytest.mark.parametrize("capacity", [8, 16])
def test_numbers_that_equal_a_size_are_numbers(kind: type[Tiny], capacity: int) -> None:
    module = kind()
    model = converters.functionalize(module)
    size = cache.state_size(model.init_cache(1, capacity))[1]
    ids = ROW[: size - 4] if capacity == 8 else ROW[:5]
    assert relative_error(run(model, ids, capacity), module(mx.array([ids]))) < TOLERANCE


@pytest.mark.parametrize("name", ["afm7", "minimax_m3_vl", "phi3small"])
def test_modules_that_count_from_the_end_of_their_buffers(name: str) -> None:
    module = make_module(name)
    model = converters.functionalize(module)
    rows = [ROW, ROW[:12]]
    for left in (True, False):
        ours = run_model(model, model.forward, rows, [23, 9], left)
        for row, logits in zip(rows, ours, strict=True):
            assert distance(logits, run_module(module, row, 1)) < TOLERANCE


# --- the last projection -------------------------------------------------------------------------


class Headed(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 101)
        self.head.weight = self.inner.lm_head.weight

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.head(self.inner.model(tokens, cache=cache))


class Twice(Headed):
    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.inner.model(tokens, cache=cache)
        return self.head(x + mx.softmax(self.head(x)) @ self.head.weight)


class Catches(Headed):
    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        try:
            return super().__call__(tokens, cache)
        except Exception:  # noqa: BLE001
            return mx.zeros((*tokens.shape, 101))


class WritesLater(Headed):
    """Adds the activations of the token before, and keeps its own after the projection."""

    def make_cache(self) -> list[Any]:
        return [*(caches.KVCache() for _ in self.layers), caches.ArraysCache(size=1)]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.inner.model(tokens, cache=cache[:-1])
        old = cache[-1][0]
        before = mx.zeros_like(x[:, :1]) if old is None else old
        logits = self.head(x + mx.concatenate([before, x[:, :-1]], axis=1))
        cache[-1][0] = x[:, -1:]
        return logits


class Scaled(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x * 3)


class ScaledHead(Headed):
    def __init__(self) -> None:
        super().__init__()
        self.head = Scaled(64, 101)
        self.head.weight = self.inner.lm_head.weight


@pytest.mark.parametrize("kind", [Headed, Twice, Catches, WritesLater, ScaledHead])
def test_the_last_projection(kind: type[Headed]) -> None:
    module = kind()
    mx.eval(module.parameters())
    model = converters.functionalize(module)
    assert (model.family.layout.head is None) == (kind is ScaledHead)
    ours = run_model(model, model.forward, [ROW], [23], False)[0]
    assert relative_error(ours, run_module(module, ROW, 23)) < TOLERANCE
