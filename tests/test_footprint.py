"""Memory foretold, compared with what MLX's allocator counts."""

from __future__ import annotations

from functools import cache

from funcrt import BucketPlan
from funcrt.cache import CacheLayout, init_cache
from funcrt.errors import ConfigError
from funcrt.footprint import Footprint, footprint_of, stand_in
from funcrt.machine import is_on_gpu
from funcrt.model import Model
from funcrt.settings import make_settings
from tests.helpers import TINY, make_model, make_params

import mlx.core as mx
import numpy as np
import pytest

model_of = cache(make_model)
SHAPES = [(1, 4, 512), (1, 64, 512), (1, 256, 1024), (4, 16, 2048), (16, 4, 256), (8, 1, 1024)]
FEW = SHAPES[2:4] + SHAPES[-1:]  # each compiled shape may cost seconds of g++

cpu_only = pytest.mark.skipif(is_on_gpu(), reason="fitted to the CPU backend")


def laid_out(model: Model, batch: int, tokens: int, capacity: int) -> Footprint:
    plan = BucketPlan(batch=batch, tokens=tokens, capacity=capacity)
    return Footprint.of(model, model.compiled(plan).cache_spec)


def measure(model: Model, step: str, shape: tuple[int, int, int], eager: bool) -> int:
    """Bytes that one call of a step takes at most beside weights, inputs and state."""
    batch, tokens, capacity = shape
    plan = BucketPlan(batch=batch, tokens=tokens, capacity=capacity)
    compiled = model.compiled(plan, eager=eager)
    ids = mx.zeros((batch, tokens), mx.int32)
    inputs = {
        "forward": [ids, mx.ones((batch, 1, tokens, capacity), mx.bool_)],
        "prefill": [ids, ids == 0],
        "prefill_first": [ids, ids == 0],
        "decode_greedy": [ids[:, 0], ids[:, 0] == 0],
        "verify_greedy": [ids, ids == 0],
    }
    settings = make_settings(batch, model.vocab_size, temperature=1.0)
    inputs["decode"] = [*inputs["decode_greedy"], settings]
    inputs["verify"] = [*inputs["prefill"], settings]
    state = compiled.init_cache(batch, capacity)
    peaks = []
    for _ in range(12):  # how far MLX runs ahead of what it frees differs from call to call
        mx.eval(inputs, state)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        *outputs, state = getattr(compiled, step)(*inputs[step], state)
        mx.eval(outputs, state)
        peaks.append(mx.get_peak_memory() - before)
        del outputs
    return max(peaks[1:])  # the first one is traced


@cpu_only
@pytest.mark.parametrize(
    ("shape", "eager"),
    [(shape, True) for shape in SHAPES] + [(shape, False) for shape in FEW],
    ids=str,
)
def test_a_call_takes_what_was_foretold(shape: tuple[int, int, int], eager: bool) -> None:
    """At least 90 % of the peak, at most about twice."""
    model = model_of("float32")
    steps = ["decode", "decode_greedy"] if shape[1] == 1 else ["prefill", "forward"]
    for step in steps:
        foretold = laid_out(model, *shape).call(*shape, step)
        measured = measure(model, step, shape, eager)
        assert 0.9 * measured <= foretold <= 2.1 * measured, step


@cpu_only
@pytest.mark.parametrize(
    "wide",
    [
        {"intermediate_size": 2048},
        {"hidden_size": 512},
        {"num_heads": 32, "num_kv_heads": 32},
        {"num_heads": 32, "num_kv_heads": 1, "head_dim": 64},
    ],
    ids=str,
)
def test_what_stands_between_layers_is_foretold(wide: dict[str, int]) -> None:
    """A cache so short that scores do not outweigh the rest."""
    model, shape = model_of("float32", **wide), (1, 64, 66)
    foretold = laid_out(model, *shape).call(*shape)
    assert 0.9 * (measured := measure(model, "prefill", shape, False)) <= foretold
    assert foretold <= 2.1 * measured


@cpu_only
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_drawing_tokens_takes_what_was_foretold(eager: bool) -> None:
    """A vocabulary so wide that logits outweigh everything else."""
    model = model_of("float32", vocab_size=20000)
    shape = (4, 1, 128)
    foretold = laid_out(model, *shape).call(*shape)
    assert 0.9 * (measured := measure(model, "decode", shape, eager)) <= foretold <= 2 * measured
    assert foretold > 15 * 4 * 20000 * 4


@cpu_only
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize("step", ["decode_greedy", "verify_greedy"])
def test_the_likeliest_tokens_take_what_was_foretold(step: str, eager: bool) -> None:
    model = model_of("float32", vocab_size=20000)
    shape = (4, 4 if step == "verify_greedy" else 1, 128)
    foretold = laid_out(model, *shape).call(*shape, step)
    assert 0.9 * (measured := measure(model, step, shape, eager)) <= foretold <= 2 * measured


@cpu_only
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_listing_tokens_takes_what_was_foretold(eager: bool) -> None:
    model, shape = model_of("float32", vocab_size=20000), (4, 1, 128)
    foretold = laid_out(model, *shape).call(*shape, "top")
    compiled = model.compiled(BucketPlan(batch=4, tokens=4, capacity=128), eager=eager)
    logits = mx.random.normal((4, 20000))
    mx.eval(compiled.top(logits))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(compiled.top(logits))
    measured = mx.get_peak_memory() - before
    assert 0.9 * measured <= foretold <= 2 * measured


@cpu_only
def test_verifying_takes_what_was_foretold() -> None:
    model, shape = model_of("float32", vocab_size=20000), (2, 4, 128)
    foretold = laid_out(model, *shape).call(*shape, "verify")
    assert 0.9 * (measured := measure(model, "verify", shape, False)) <= foretold <= 2 * measured


@cpu_only
@pytest.mark.parametrize("kind", ["float16", "affine"])
def test_other_weights_take_what_was_foretold(kind: str) -> None:
    model, shape = model_of(kind), (1, 64, 1024)
    foretold = laid_out(model, *shape).call(*shape)
    assert 0.9 * (measured := measure(model, "prefill", shape, True)) <= foretold <= 2.1 * measured


@cpu_only
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_first_tokens_take_what_was_foretold(eager: bool) -> None:
    """Nothing that is as wide as the capacity."""
    model, shape = model_of("float32"), (2, 64, 1024)
    foretold = laid_out(model, *shape).call(*shape, "prefill_first")
    assert foretold < laid_out(model, *shape).call(*shape, "prefill") / 2
    measured = measure(model, "prefill_first", shape, eager)
    assert 0.9 * measured <= foretold <= 2.1 * measured


@cpu_only
def test_a_ring_is_looked_at_instead_of_the_capacity() -> None:
    model = model_of("float32", model_type="mistral", sliding_window=128)
    shape = (1, 64, 2048)
    foretold = laid_out(model, *shape).call(*shape)
    assert foretold < laid_out(model_of("float32"), *shape).call(*shape) / 2
    assert 0.9 * (measured := measure(model, "prefill", shape, True)) <= foretold <= 2.1 * measured


@cpu_only
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "affine"])
def test_weights_are_counted_exactly(kind: str) -> None:
    model = make_model(kind)
    footprint = Footprint.of(model, model.cache_spec(CacheLayout()))
    assert "prepared" not in vars(model)  # nothing was made to count it
    assert footprint.params == sum(array.nbytes for array in model.prepared.values())
    held = [
        memoryview(array.view(mx.uint8)).cast("B")
        for params in (model.prepared, model.params)
        for array in params.values()
    ]
    living: dict[int, int] = {}  # address -> bytes; what is stacked comes before its rows
    for view in held:
        begin = np.frombuffer(view, np.uint8).ctypes.data
        if not any(at <= begin < at + size for at, size in living.items()):
            living[begin] = view.nbytes
    assert footprint.weights == sum(living.values())


def test_states_are_counted_exactly() -> None:
    model = model_of("float32", head_dim=32)
    for layout in (CacheLayout(), CacheLayout(kv_bits=8)):
        spec = model.cache_spec(layout)
        state = init_cache(spec, 3, 40)
        bytes_ = sum(array.nbytes for array in state.values())
        assert Footprint.of(model, spec).state(3, 40) == bytes_


def test_a_call_grows_with_each_of_its_sizes() -> None:
    footprint = stand_in()
    base = footprint.call(2, 16, 512)
    assert base < footprint.call(4, 16, 512)
    assert base < footprint.call(2, 64, 512)
    assert base < footprint.call(2, 16, 1024)
    logits = 2 * 128256 * 4
    # Twice at each of 16 places, where the base has them once.
    assert footprint.call(2, 16, 512, "verify_greedy") == base + 31 * logits
    assert footprint.call(2, 16, 512, "verify") > footprint.call(2, 16, 512, "verify_greedy")
    assert footprint.call(2, 1, 512) >= footprint.call(2, 1, 512, "decode_greedy")
    rest = footprint.weights + 2 * footprint.state(2, 512) + 2 * logits
    assert footprint.total(2, 16, 512) == rest + max(base, footprint.call(2, 1, 512))


def test_what_stands_for_an_unknown_model() -> None:
    footprint = stand_in()
    assert footprint.state(1, 513) - footprint.state(1, 512) == 32 * 1024
    assert footprint.weights == 0
    assert footprint_of(None) == footprint
    assert footprint_of(footprint) is footprint


def test_a_model_is_its_own_footprint() -> None:
    model = make_model()
    assert footprint_of(model) == Footprint.of(model, model.cache_spec(CacheLayout()))


def test_a_config_without_sizes_is_refused() -> None:
    class Strange(Model):
        @property
        def config_values(self) -> dict[str, object]:
            return {**super().config_values, "intermediate_size": None}

    model = Strange(TINY, make_params(TINY))
    with pytest.raises(ConfigError, match=r"no intermediate_size \(found None\)"):
        Footprint.of(model, model.cache_spec(CacheLayout()))
