"""Modules of mlx-lm as pure functions: what the table of all of them does not show.

The table, `tests/reference/mlx_lm_modules.json`, is checked by `test_functional_table.py`.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import converters
import funcrt
import tests.mlx_lm_extra  # noqa: F401 (skips without mlx-lm)
from converters.functional import mlx_lm_source
from funcrt import cache, masks
from funcrt.buckets import BucketPlan
from funcrt.errors import CacheError, InputError, ModuleError, ParamsError, SourceError
from funcrt.model import Model
from tests.helpers import relative_error
from tests.reference.mlx_lm_checks import make_module, run_model, run_module, tokens_of

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import llama

TOLERANCE = 2e-5
PROMPTS = [23, 9, 1]
ROWS = [tokens_of(i, n + 3) for i, n in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return make_module("llama")


@pytest.fixture(scope="module")
def model(module: nn.Module) -> Model:
    return converters.functionalize(module)


def snapshot(module: nn.Module) -> list[tuple[Any, list[Any], dict[str, Any]]]:
    return [
        (part, list(part.items()), dict(vars(part))) for _, part in sorted(module.named_modules())
    ]


def assert_untouched(before: Any, module: nn.Module) -> None:
    after = snapshot(module)
    assert len(before) == len(after)
    for (old, items, attributes), (new, new_items, new_attributes) in zip(
        before, after, strict=True
    ):
        assert old is new
        assert [key for key, _ in items] == [key for key, _ in new_items]
        assert all(a is b for (_, a), (_, b) in zip(items, new_items, strict=True))
        assert attributes.keys() == new_attributes.keys()
        assert all(new_attributes[key] is value for key, value in attributes.items())


@pytest.mark.parametrize("name", ["llama", "plamo3", "gemma3n"])  # two change themselves
def test_a_module_is_left_as_it_was_found(name: str) -> None:
    module = make_module(name)
    before = snapshot(module)
    model = converters.functionalize(module)
    assert_untouched(before, module)
    run_model(model, mx.compile(model.forward), ROWS[1:2], PROMPTS[1:2], False)
    assert_untouched(before, module)
    run_model(model, model.forward, ROWS[1:2], PROMPTS[1:2], False)
    assert_untouched(before, module)


def test_a_module_is_left_as_it_was_found_after_an_exception(
    module: nn.Module, model: Model
) -> None:
    before, patched = snapshot(module), (mx.arange, mx.eval, mx.where, mx.array.__invert__)
    wrong = {name: array[..., :1] for name, array in model.params.items()}
    state = model.init_cache(1, 8)
    mask = mx.ones((1, 1, 2, 8), mx.bool_)
    with pytest.raises(ModuleError):
        model.forward(wrong, mx.array([[1, 2]], dtype=mx.int32), mask, state)
    assert_untouched(before, module)
    assert (mx.arange, mx.eval, mx.where, mx.array.__invert__) == patched


def test_params_are_the_modules_own(module: nn.Module, model: Model) -> None:
    names = dict(nn.utils.tree_flatten(module.parameters()))
    assert model.params.keys() == names.keys()
    assert all(model.params[name] is names[name] for name in names)


def test_other_params_give_other_logits(model: Model) -> None:
    other = converters.functionalize(make_module("llama", seed=1))
    state = model.init_cache(1, 16)
    tokens = mx.array([[5, 6, 7]], dtype=mx.int32)
    mask = masks.causal(mx.ones((1, 3)), state["lengths"], 16)
    ours = model.forward(other.params, tokens, mask, state)[0]
    theirs = other.forward(other.params, tokens, mask, state)[0]
    assert relative_error(ours, theirs) == 0
    assert relative_error(ours, model.forward(model.params, tokens, mask, state)[0]) > 0.1


def test_gradients_flow_through_a_module(model: Model) -> None:
    state = model.init_cache(1, 8)
    tokens = mx.array([[5, 6, 7]], dtype=mx.int32)
    mask = masks.causal(mx.ones((1, 3)), state["lengths"], 8)

    def loss(params: Any) -> mx.array:
        return mx.mean(mx.square(model.forward(params, tokens, mask, state)[0]))

    gradients = mx.grad(loss)(model.params)
    assert all(mx.any(gradient != 0).item() for gradient in gradients.values())


def test_the_mask_is_the_callers(model: Model) -> None:
    state = model.init_cache(1, 8)
    tokens = mx.array([[5, 6, 7, 8]], dtype=mx.int32)
    hidden = masks.causal(mx.ones((1, 4)), state["lengths"], 8)
    hidden = hidden & (mx.arange(8) != 1)  # nobody sees the second token
    other = mx.array([[5, 9, 7, 8]], dtype=mx.int32)
    a, b = (model.forward(model.params, t, hidden, state)[0] for t in (tokens, other))
    assert relative_error(a[:, 2:], b[:, 2:]) == 0
    assert relative_error(a[:, 1], b[:, 1]) > 0.01


def test_the_call_form_and_compiled_steps(module: nn.Module, model: Model) -> None:
    theirs = module(mx.array([ROWS[1]]))
    logits, state = model([[0] * 4 + ROWS[1]], mask=[[0] * 4 + [1] * len(ROWS[1])])
    assert relative_error(logits[:, 4:], theirs) < TOLERANCE
    steps = model.compiled(BucketPlan(batch=[1], tokens=[1, 16], capacity=[32]))
    padded = mx.array([ROWS[1] + [0] * (16 - len(ROWS[1]))], dtype=mx.int32)
    valid = mx.arange(16)[None] < len(ROWS[1])
    last, state = steps.prefill(padded, valid, steps.init_cache(1, 32))
    assert relative_error(last, theirs[:, -1]) < TOLERANCE
    assert state["lengths"].tolist() == [len(ROWS[1])]


def test_windows_experts_and_padding_matter() -> None:
    """The tiny configurations can fail: a wider window or fewer experts is another model."""
    for name, changes in (
        ("gemma3_text", {"sliding_window": 64}),
        ("qwen2_moe", {"num_experts_per_tok": 1}),
        ("llama4_text", {"no_rope_layers": [1, 1, 1, 1]}),
    ):
        base = run_module(make_module(name), ROWS[0], PROMPTS[0])
        assert relative_error(run_module(make_module(name, **changes), ROWS[0], 23), base) > 0.01


def test_prompts_take_the_last_projection_for_one_token() -> None:
    for name, splits in (("llama", True), ("gemma2", False), ("mamba2", True)):
        model = converters.functionalize(make_module(name))
        state = model.init_cache(1, 32)
        tokens = mx.array([ROWS[1]], dtype=mx.int32)
        mask = masks.causal(mx.ones_like(tokens), state["lengths"], 32)
        x, _ = model.family.hidden(model.config, model.params, tokens, mask, state)
        assert x.shape == (1, len(ROWS[1]), model.config.hidden_size if splits else 101)
        logits = model.family.unembed(model.config, model.params, x[:, -1])
        assert relative_error(logits, model([ROWS[1]])[0][:, -1]) < TOLERANCE


# --- what is refused -----------------------------------------------------------------------------


def test_positions_and_packed_caches_are_refused(model: Model) -> None:
    state = model.init_cache(1, 8)
    tokens = mx.array([[5, 6]], dtype=mx.int32)
    mask = masks.causal(mx.ones((1, 2)), state["lengths"], 8)
    with pytest.raises(InputError, match="cannot take others"):
        model.forward(model.params, tokens, mask, state, mx.array([[0, 0]], dtype=mx.int32))
    with pytest.raises(CacheError, match="kv_bits=8"):
        model.init_cache(1, 8, kv_bits=8)


def test_trees_are_refused_by_recurrent_modules() -> None:
    model = converters.functionalize(make_module("mamba2"))
    state = model.init_cache(1, 8)
    tokens = mx.array([[5, 6, 7]], dtype=mx.int32)
    mask = masks.from_tree(mx.array([[-1, 0, 0]]), state["lengths"], 8)[0]
    with pytest.raises(InputError, match="causal masks with padding only"):
        model.forward(model.params, tokens, mask, state)


@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "recurrent_gemma", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_idle_row_leaves_a_recurrent_state_as_it_is(name: str, count: int) -> None:
    model = converters.functionalize(make_module(name))
    rows = [ROWS[1][:9], ROWS[0][:9]]
    state = model(rows)[1]
    capacity = cache.state_size(state)[1]
    tokens = mx.array([[5, 6][:count], ROWS[0][9 : 9 + count]], dtype=mx.int32)
    real = mx.array([[0] * count, [1] * count])
    mask = masks.causal(real, state["lengths"], capacity)
    logits, after = model.forward(model.params, tokens, mask, state)
    assert mx.isfinite(logits).all().item()
    recurrent = [entry for entry in state if cache.kind_of(entry) == "recurrent"]
    assert recurrent
    for entry in recurrent:
        assert mx.array_equal(after[entry][0], state[entry][0]).item()
        assert not mx.array_equal(after[entry][1], state[entry][1]).item()
    assert after["lengths"].tolist() == [9, 9 + count]
    whole = model([ROWS[0][: 9 + count]])[0]
    assert relative_error(logits[1, -1], whole[0, -1]) <= TOLERANCE


class Tiny(nn.Module):
    """A model of one layer, to be broken."""

    def __init__(self, args: llama.ModelArgs) -> None:
        super().__init__()
        self.inner = llama.Model(args)

    @property
    def layers(self) -> Any:
        return self.inner.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.inner(tokens, cache=cache)


class Shifts(Tiny):
    """Adds a constant that is not in row order, which MLX would export wrong."""

    def __init__(self, args: llama.ModelArgs) -> None:
        super().__init__(args)
        self._shift = mx.arange(101 * 2, dtype=mx.float32).reshape(101, 2).T
        mx.eval(self._shift)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return super().__call__(tokens, cache) + self._shift[:1]


class Reads(Tiny):
    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits = super().__call__(tokens, cache)
        return logits if logits.max().item() > 0 else -logits  # this line


class Keeps(mlx_lm_cache.QuantizedKVCache):
    pass


class Odd(Tiny):
    def make_cache(self) -> list[Any]:
        return [Keeps() for _ in self.layers]


class Hidden(Tiny):
    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        return super().__call__(tokens, cache), None


@pytest.fixture
def args(module: nn.Module) -> Any:
    return module.args


def test_constants_are_exported_in_row_order(args: Any, tmp_path: Path) -> None:
    module = Shifts(args)
    model = converters.functionalize(module)
    state = model.init_cache(1, 8)
    tokens = mx.array([[5, 6]], dtype=mx.int32)
    mask = masks.causal(mx.ones((1, 2)), state["lengths"], 8)
    flat = funcrt.flatten(model.forward, model.params, tokens, mask, state)[0]
    arrays = [*model.params.values(), tokens, mask, *state.values()]
    mx.export_function(str(tmp_path / "f.mlxfn"), flat, *arrays)
    logits = mx.import_function(str(tmp_path / "f.mlxfn"))(*arrays)[0]
    assert relative_error(logits, module(tokens)) < TOLERANCE


def test_reading_values_is_refused_with_the_line(args: Any) -> None:
    with pytest.raises(ModuleError, match=r"test_functional\.py:\d+ .*# this line"):
        converters.functionalize(Reads(args))


def test_an_unknown_cache_is_refused_by_name(args: Any) -> None:
    with pytest.raises(ModuleError, match=r"layers\.0: its cache is a .*Keeps, which is not"):
        converters.functionalize(Odd(args))


def test_what_is_not_logits_is_refused(args: Any) -> None:
    with pytest.raises(ModuleError, match="expected logits"):
        converters.functionalize(Hidden(args))
    with pytest.raises(ModuleError, match="expected a module"):
        converters.functionalize("llama")  # type: ignore[arg-type]


def test_a_missing_or_foreign_mlx_lm_is_named(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SourceError, match=r"not installed: pip install 'funcrt\[mlx-lm\]'"):
        converters.functionalize(module)
    monkeypatch.setattr(metadata, "version", lambda _: "0.20.1")
    with pytest.raises(SourceError, match=r"mlx-lm 0\.20\.1 is not supported: pip install 'mlx-lm"):
        converters.functionalize(module)


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.2", True), ("0.32.2.1", True), ("0.32.3rc1", True), ("0.32.7.dev1", True),
        ("0.32.2rc1", False), ("0.32", False), ("0.32.1", False), ("0.31.9", False),
        ("0.33rc1", False), ("0.33", False), ("x", False),
    ],
)  # fmt: skip
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, supported: bool) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    if supported:
        mlx_lm_source.check_version()
    else:
        with pytest.raises(SourceError, match="is not supported"):
            mlx_lm_source.check_version()


def test_wrong_params_are_listed(model: Model) -> None:
    params = {**model.params, "extra": mx.zeros(1)}
    del params["lm_head.weight"]
    with pytest.raises(ParamsError, match=r"missing: lm_head\.weight; unknown: extra"):
        type(model)(model.config, params, None, model.family)


def test_nothing_else_imports_mlx_lm(tiny: Any) -> None:
    """Not even checkpoints that a family here reads, as folders or as GGUF files."""
    code = (
        "import sys, funcrt, converters; [converters.load(path) for path in sys.argv[1:]];"
        "print(any(name.startswith('mlx_lm') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny.hf()), str(tiny.gguf())],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"
