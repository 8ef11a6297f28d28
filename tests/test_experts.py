"""Experts against a float64 loop over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from funcrt import params
from funcrt.errors import ParamsError
from funcrt.ops import experts
from funcrt.params import Params
from tests.helpers import Array, quantize, relative_error, to_numpy

import mlx.core as mx
import numpy as np
import pytest

EXPERTS, CHOSEN, WIDTH, INNER = 6, 2, 32, 64
GATE_UP = tuple(f"{i}.{part}" for i in range(EXPERTS) for part in ("gate", "up"))
DOWN = tuple(f"{i}.down" for i in range(EXPERTS))
FUSIONS = {"gate_up": GATE_UP, "down": DOWN}
FEW, MANY = (2, 2), (3, 15)  # B, T on both sides of where tokens are sorted
Inputs = tuple[mx.array, mx.array, mx.array]


def make_params(kind: str = "float32", bias: bool = False) -> Params:
    rng = np.random.default_rng(0)
    made: Params = {}
    for names, shape in ((GATE_UP, (INNER, WIDTH)), (DOWN, (WIDTH, INNER))):
        for name in names:
            made[f"{name}.weight"] = mx.array(rng.normal(0, shape[1] ** -0.5, shape))
            if bias:
                made[f"{name}.bias"] = mx.array(rng.normal(size=shape[0]))
    if kind == "affine":
        return quantize(made)
    return params.cast(made, kind)


def make_inputs(batch: int, tokens: int, seed: int = 0) -> Inputs:
    rng = np.random.default_rng([seed, batch, tokens])
    x = rng.normal(size=(batch, tokens, WIDTH)).astype(np.float32)
    chosen = rng.permuted(np.tile(np.arange(EXPERTS), (batch, tokens, 1)), axis=-1)[..., :CHOSEN]
    weights = rng.uniform(size=chosen.shape).astype(np.float32)
    return mx.array(x), mx.array(chosen.astype(np.uint32)), mx.array(weights)


def run(weights: Params, inputs: Inputs) -> mx.array:
    x, chosen, weigh = inputs

    def mlp(rows: mx.array, pick: experts.Pick) -> mx.array:
        up = experts.expert_weights(weights, "gate_up", GATE_UP, EXPERTS)
        down = experts.expert_weights(weights, "down", DOWN, EXPERTS)
        gate, value = mx.split(experts.expert_linear(up, "gate_up", rows, pick), 2, axis=-1)
        return experts.expert_linear(down, "down", gate * mx.sigmoid(gate) * value, pick)

    return experts.dispatch(x, chosen=chosen, weights=weigh, experts=mlp, total=EXPERTS)


def fuse(weights: Params, dtype: str = "float32") -> Params:
    return params.prepare(
        weights,
        {f"{n}.weight": (INNER, WIDTH) for n in GATE_UP}
        | {f"{n}.weight": (0, INNER) for n in DOWN},
        params.Preparation(dtype, dequantize=False, fusions=FUSIONS),
    )


def unpack(weights: Params, name: str) -> Array:
    if f"{name}.scales" not in weights:
        return to_numpy(weights[f"{name}.weight"])
    return to_numpy(params.dequantize(weights, name, params.Quantization(4, 32)))


def walk(weights: Params, inputs: Inputs) -> Array:
    def linear(name: str, x: Array) -> Array:
        y = unpack(weights, name) @ x
        return y + to_numpy(weights[f"{name}.bias"]) if f"{name}.bias" in weights else y

    x, chosen, weigh = (to_numpy(a) for a in inputs)
    out = np.zeros_like(x)
    for row in np.ndindex(*x.shape[:2]):
        for expert, weight in zip(chosen[row].astype(int), weigh[row], strict=True):
            gate, up = (linear(f"{expert}.{part}", x[row]) for part in ("gate", "up"))
            out[row] += weight * linear(f"{expert}.down", gate / (1 + np.exp(-gate)) * up)
    return out


sizes = pytest.mark.parametrize("size", [FEW, MANY], ids=["few", "many"])
kinds = pytest.mark.parametrize("kind", ["float32", "affine"])


def test_sizes_lie_on_both_sides_of_sorting() -> None:
    few, many = (batch * tokens * CHOSEN / EXPERTS for batch, tokens in (FEW, MANY))
    assert few < experts._SORT_FROM[mx.DeviceType.cpu] <= many


@sizes
@kinds
@pytest.mark.parametrize("bias", [False, True])
def test_equals_a_loop_over_tokens(size: tuple[int, int], kind: str, bias: bool) -> None:
    weights, inputs = make_params(kind, bias), make_inputs(*size)
    expected = walk(weights, inputs)
    fused = fuse(weights)
    assert f"{GATE_UP[0]}.weight" not in fused
    for form in (weights, fused):
        assert relative_error(run(form, inputs), expected) < 1e-6


@sizes
@kinds
def test_rows_do_not_depend_on_neighbours(size: tuple[int, int], kind: str) -> None:
    """Other tokens' values and experts change, or there are none: not a bit differs."""
    weights, inputs = fuse(make_params(kind)), make_inputs(*size)
    expected = run(weights, inputs)
    for seed in range(1, 6):
        others = make_inputs(*size, seed=seed)
        for ours, theirs in zip(inputs, others, strict=True):
            theirs[1, 1:3] = ours[1, 1:3]
        if seed == 5:  # all else is padding, and crowds one expert
            others[0][0], others[1][0], others[0][1, 0] = 1e4, 3, 0
        assert mx.array_equal(run(weights, others)[1, 1:3], expected[1, 1:3])
    assert not mx.array_equal(run(weights, others)[1, :1], expected[1, :1])


@sizes
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_keeps_the_dtype(size: tuple[int, int], kind: str) -> None:
    weights, (x, chosen, weigh) = make_params(kind, bias=True), make_inputs(*size)
    inputs = x.astype(getattr(mx, kind)), chosen, weigh
    for form in (weights, fuse(weights, kind)):
        out = run(form, inputs)
        assert out.dtype == getattr(mx, kind)
        assert relative_error(out, walk(weights, inputs)) < 4 * mx.finfo(out.dtype).eps


@pytest.mark.parametrize("kind", ["bfloat16", "affine"])
def test_more_experts_than_rows(kind: str) -> None:
    """In 16 bits, of which a CPU casts those alone."""
    weights, (x, chosen, weigh) = make_params(kind), make_inputs(1, 2)
    inputs = x.astype(mx.bfloat16), chosen, weigh
    assert chosen.size < EXPERTS
    out = run(weights, inputs)
    assert relative_error(out, walk(weights, inputs)) < 4 * mx.finfo(mx.bfloat16).eps


@sizes
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_those_of_the_loop(size: tuple[int, int], fused: bool) -> None:
    weights, (x, chosen, weigh) = make_params(bias=True), make_inputs(*size)
    rng = np.random.default_rng(0)
    target = rng.normal(size=x.shape)

    def loss(weights: Params, x: mx.array, weigh: mx.array) -> mx.array:
        form = fuse(weights) if fused else weights
        return mx.sum(run(form, (x, chosen, weigh)) * mx.array(target.astype(np.float32)))

    gradients = mx.grad(loss, argnums=(0, 1, 2))(weights, x, weigh)
    names = ("0.gate.weight", "3.up.bias", "5.down.weight", "2.down.bias")
    for name in (*names, "x", "weigh"):
        exact = []
        for sign in (1, -1):
            arrays = {**weights, "x": x, "weigh": weigh}
            along = np.random.default_rng(1).normal(size=arrays[name].shape)
            arrays[name] = to_numpy(arrays[name]) + sign * 1e-5 * along
            exact.append((walk(arrays, (arrays["x"], chosen, arrays["weigh"])) * target).sum())
        found = {**gradients[0], "x": gradients[1], "weigh": gradients[2]}[name]
        products = to_numpy(found) * along
        slope = (exact[0] - exact[1]) / 2e-5
        assert abs(products.sum() - slope) <= 1e-4 * np.abs(products).sum(), name


def test_differentiates_through_packed_experts() -> None:
    weights, (x, chosen, weigh) = fuse(make_params("affine")), make_inputs(*MANY)
    gradient = mx.grad(lambda x: mx.sum(run(weights, (x, chosen, weigh))))(x)
    along = np.random.default_rng(1).normal(size=x.shape)
    moved = [
        walk(make_params("affine"), (to_numpy(x) + s * 1e-5 * along, chosen, weigh)).sum()
        for s in (1, -1)
    ]
    products = to_numpy(gradient) * along
    assert abs(products.sum() - (moved[0] - moved[1]) / 2e-5) < 1e-4 * np.abs(products).sum()


@sizes
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "affine"])
def test_compiles_and_exports(size: tuple[int, int], kind: str, tmp_path: Path) -> None:
    weights, inputs = fuse(make_params(kind), "float32"), make_inputs(*size)
    names = list(weights)

    def flat(*arrays: mx.array) -> Any:
        x, chosen, weigh, *rest = arrays
        return (run(dict(zip(names, rest, strict=True)), (x, chosen, weigh)),)

    arrays = (*inputs, *weights.values())
    (expected,) = flat(*arrays)
    path = str(tmp_path / "experts.mlxfn")
    mx.export_function(path, flat, *arrays)
    for found in (mx.compile(flat)(*arrays), mx.import_function(path)(*arrays)):
        assert relative_error(found[0], expected) < 1e-6


def test_stacks() -> None:
    stack = experts.expert_weights(make_params("affine", bias=True), "gate_up", GATE_UP, EXPERTS)
    assert {name: array.shape for name, array in stack.items()} == {
        "gate_up.weight": (EXPERTS, 2 * INNER, WIDTH // 8),
        "gate_up.scales": (EXPERTS, 2 * INNER, WIDTH // 32),
        "gate_up.biases": (EXPERTS, 2 * INNER, WIDTH // 32),
        "gate_up.bias": (EXPERTS, 2 * INNER),
    }


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_experts_that_differ_raise(part: str) -> None:
    weights = make_params("affine", bias=True)
    if part == "weight":
        weights.update(quantize({"3.up.weight": make_params()["3.up.weight"]}, bits=8))
    else:
        del weights["3.up.bias"]
    with pytest.raises(ParamsError, match=rf"gate_up: .*{part} of 0\.gate"):
        experts.expert_weights(weights, "gate_up", GATE_UP, EXPERTS)
