"""What a module is called with and in stays its own: constants, state, patched functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import converters
import funcrt
import tests.mlx_lm_extra  # noqa: F401 (skips without mlx-lm)
from converters.functional import mlx_lm_source
from funcrt import cache, masks
from funcrt.buckets import BucketPlan
from funcrt.bundle.golden.replay import measure_error
from funcrt.errors import ConfigError, ModuleError
from funcrt.model import Model
from tests.helpers import relative_error
from tests.reference.mlx_lm_checks import distance, make_module, run_model, run_module, tokens_of
from tests.reference.mlx_lm_configs import make_config

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import cache as caches
from mlx_lm.models.base import create_attention_mask

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


def call(model: Model, ids: list[int] = ROW[:4], capacity: int = 8) -> tuple[Any, ...]:
    """Tokens, mask and state of a first call."""
    state = model.init_cache(1, capacity)
    size = cache.state_size(state)[1]
    mask = masks.causal(mx.ones((1, len(ids))), state["lengths"], size)
    return mx.array([ids], dtype=mx.int32), mask, state


def run(model: Model, ids: list[int], capacity: int) -> mx.array:
    return model.forward(model.params, *call(model, ids, capacity))[0]


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


# --- arrays that are no parameters ---------------------------------------------------------------


class Holder:
    def __init__(self, array: mx.array) -> None:
        self.array = array


class Constant(Tiny):
    """Adds a constant that is not in row order, kept in one of several ways."""

    def __init__(self, place: str) -> None:
        super().__init__()
        array = mx.arange(202, dtype=mx.float32).reshape(101, 2).T
        mx.eval(array)
        self.place = place
        if place == "object":
            self.kept = Holder(array)
        elif place == "tuple":
            self.kept = (1, (array,))
        elif place == "list":
            self._kept = [array]
        else:
            self._kept = nn.Linear(2, 101, bias=False)
            self._kept.weight = array

    def array(self) -> mx.array:
        if self.place == "object":
            return self.kept.array
        if self.place == "tuple":
            return self.kept[1][0]
        return self._kept[0] if self.place == "list" else self._kept.weight

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return super().__call__(tokens, cache) + self.array()[:1]


@pytest.mark.parametrize("place", ["object", "tuple", "list", "module"])
def test_constants_are_exported_in_row_order(place: str, tmp_path: Path) -> None:
    module = Constant(place)
    before = module.array()
    model = converters.functionalize(module)
    assert model.params.keys() == converters.functionalize(Tiny()).params.keys()
    tokens, mask, state = call(model)
    flat = funcrt.flatten(model.forward, model.params, tokens, mask, state)[0]
    arrays = [*model.params.values(), tokens, mask, *state.values()]
    mx.export_function(str(tmp_path / "f.mlxfn"), flat, *arrays)
    logits = mx.import_function(str(tmp_path / "f.mlxfn"))(*arrays)[0]
    assert relative_error(logits, module(tokens)) < TOLERANCE
    assert module.array() is before


class Counts(Tiny):
    """Changes a parameter and a constant in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = mx.zeros((101,))
        self._count = mx.zeros((4,))

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits, bias = super().__call__(tokens, cache), self.bias
        bias += 1
        self._count[0] = self._count[0] + logits.max()
        return logits + bias + self._count[0]


def test_what_a_module_does_in_place_stays_in_the_call() -> None:
    module = Counts()
    model = converters.functionalize(module)
    expected = run(model, ROW[:4], 8)
    assert relative_error(run(model, ROW[:4], 8), expected) == 0
    mx.eval(mx.compile(lambda params: model.forward(params, *call(model)))(model.params))
    assert relative_error(run(model, ROW[:4], 8), expected) == 0
    assert not mx.any(module._count).item()
    assert not mx.any(module.bias).item()
    assert not mx.any(model.params["bias"]).item()


# --- caches --------------------------------------------------------------------------------------


class Named(caches.KVCache):
    """Only another name."""

    def __init__(self) -> None:
        super().__init__()
        self.label = "first"


class Doubles(caches.KVCache):
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(keys, 2 * values)


KVCache = type("KVCache", (), {"update_and_fetch": Doubles.update_and_fetch})


class Caches(Tiny):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def make_cache(self) -> list[Any]:
        return [self.kind() for _ in self.layers]


def test_a_cache_class_of_its_own_is_taken_only_if_it_does_the_same() -> None:
    module = Caches(Named)
    model = converters.functionalize(module)
    assert relative_error(run(model, ROW[:4], 8), module(mx.array([ROW[:4]]))) < TOLERANCE
    for kind in (Doubles, KVCache):
        with pytest.raises(ModuleError, match=rf"its cache is a .*{kind.__name__}, which is not"):
            converters.functionalize(Caches(kind))


class Rotating(Tiny):
    def __init__(self, size: int, window: int) -> None:
        super().__init__()
        self.sizes = (size, window)

    def make_cache(self) -> list[Any]:
        return [caches.RotatingKVCache(max_size=self.sizes[0]) for _ in self.layers]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.inner.model.embed_tokens(tokens)
        mask = create_attention_mask(x, cache[0], window_size=self.sizes[1])
        for layer, part in zip(self.layers, cache, strict=True):
            x = layer(x, mask, part)
        return self.inner.lm_head(self.inner.model.norm(x))


@pytest.mark.parametrize(("size", "window"), [(6, 12), (12, 6)])
def test_the_smaller_of_two_windows_counts(size: int, window: int) -> None:
    module = Rotating(size, window)
    model = converters.functionalize(module)
    ours = run_model(model, model.forward, [ROW], [23], False)[0]
    same = Rotating(6, 6)
    assert relative_error(ours, run_module(same, ROW, 1)) < TOLERANCE


# --- training ------------------------------------------------------------------------------------


class Drops(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.dropout(super().__call__(tokens, cache))


def test_a_module_in_training_is_evaluated_and_left_in_training() -> None:
    module = Drops()
    module.train()
    model = converters.functionalize(module)
    logits = run(model, ROW[:4], 8)
    assert module.training
    assert module.dropout.training
    assert relative_error(logits, module.eval()(mx.array([ROW[:4]]))) < TOLERANCE


# --- configs -------------------------------------------------------------------------------------


def test_the_config_of_a_module_can_be_a_key() -> None:
    config = {"eos_token_id": [1, 2], "nested": {"a": [1]}}
    model = converters.functionalize(Tiny(), config)
    assert model.config.eos_token_ids == (1, 2)
    assert hash(model.config) == hash(converters.functionalize(Tiny(), config).config)


@pytest.mark.parametrize("ids", ["</s>", ["</s>"], 1.5, {"a": 1}, True])
def test_end_of_text_ids_are_numbers(ids: Any) -> None:
    with pytest.raises(ConfigError, match="eos_token_id: expected a token id"):
        converters.functionalize(Tiny(), {"eos_token_id": ids})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0}, {"num_attention_heads": "4"}, {"hidden_size": -64},
        {"num_hidden_layers": None}, {"vocab_size": "many"}, {"rope_scaling": [1]},
        {"quantization": {"group_size": 32}}, {"quantization": 4},
    ],
)  # fmt: skip
def test_entries_of_wrong_types_are_refused(changes: dict[str, Any]) -> None:
    config = {k: v for k, v in make_config("qwen2").items() if v is not None} | changes
    with pytest.raises(ConfigError, match="mlx-lm cannot make a 'qwen2' of this checkpoint"):
        mlx_lm_source.make_module(config)


# --- logits of ids that never come ---------------------------------------------------------------


def test_a_bundle_may_have_ids_that_never_come(tmp_path: Path) -> None:
    """Phi-3-small gives them -inf; other infinite logits are errors."""
    model = converters.functionalize(make_module("phi3small"))
    assert mx.any(run(model, ROW[:4], 8) == -mx.inf).item()
    funcrt.export(model, tmp_path / "b", BucketPlan(batch=[1], tokens=[1], capacity=[8]))
    with funcrt.Engine(funcrt.load_bundle(tmp_path / "b")) as engine:
        found = engine.submit(ROW[:4], max_tokens=1).result().tokens
    assert list(found) == [run(model, ROW[:4], 8)[0, -1].argmax().item()]
    one, lost = mx.array([1.0, -mx.inf]), mx.array([1.0, mx.nan])
    assert measure_error(one, one, 1.0) == 0
    assert measure_error(one, mx.array([1.0, 2.0]), 1.0) == mx.inf
    assert measure_error(lost, lost, 1.0) == mx.inf
