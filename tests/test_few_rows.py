"""Products of few rows with what comes before and after; the kernels themselves only on CUDA."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import converters
from funcrt import BucketPlan
from funcrt.config.rope import RopeConfig
from funcrt.low_rank import LORA_A, LORA_B
from funcrt.model import Model
from funcrt.ops import few_rows, heads, kernels
from funcrt.ops.attention import split_heads
from funcrt.ops.rotary import make_rotary
from tests.helpers import TINY, make_params, relative_error
from tests.reference.golden import family_folder

import mlx.core as mx
import pytest

cuda_only = pytest.mark.skipif(not kernels.are_there(), reason="a CUDA kernel")
LAYERS = TINY.num_layers


def pure(x, weight, *, norm=None, eps=0.0, gated=False, bias=None, residual=None):
    """What the kernel does, operation by operation, in float32."""
    x = x.astype(mx.float32)
    x = x if norm is None else mx.fast.rms_norm(x, norm.astype(mx.float32), eps)
    y = x @ weight.astype(mx.float32).T
    if gated:
        gate, up = mx.split(y, 2, axis=-1)
        y = gate * mx.sigmoid(gate) * up
    y = y if bias is None else y + bias.astype(mx.float32)
    return y if residual is None else y + residual.astype(mx.float32)


def pure_split(qkv, count, kv_heads, waves, upcoming=None):
    assert upcoming is None or upcoming.ndim == 2
    qk, v = mx.split(split_heads(qkv, count + 2 * kv_heads), [count + kv_heads], axis=1)
    cos, sin = (wave[:, None, None] for wave in (waves.cosines, waves.sines))
    turning, rest = mx.split(qk, [2 * cos.shape[-1]], axis=-1)
    low, high = mx.split(turning.astype(mx.float32), 2, axis=-1)
    turned = mx.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)
    q, k = mx.split(mx.concatenate([turned.astype(qk.dtype), rest], axis=-1), [count], axis=1)
    return q, k, v


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """Parts fuse as on CUDA, with the pure forms in place of the kernels, which are counted."""
    counted: Counter[str] = Counter()

    def multiply(*arrays: mx.array, **more: Any) -> mx.array:
        given = [name for name, value in more.items() if isinstance(value, mx.array) or value]
        counted["+".join(given)] += 1
        return pure(*arrays, **more)

    def split(*arguments: Any) -> tuple[mx.array, ...]:
        counted["split"] += 1
        return pure_split(*arguments)

    monkeypatch.setattr(kernels, "are_there", lambda: True)
    monkeypatch.setattr(few_rows, "supports", lambda x, weight: x.ndim == 2)
    monkeypatch.setattr(few_rows, "multiply", multiply)
    monkeypatch.setattr(heads, "split", split)
    return counted


def decode(model: Model) -> mx.array:
    """Logits of some steps of two rows, one of which sits out a step."""
    compiled = model.compiled(BucketPlan(batch=[2], tokens=[4], capacity=[16]), eager=True)
    _, state = compiled.prefill(
        mx.array([[1, 2, 3, 4], [5, 6, 0, 0]]), mx.array([[1] * 4, [1, 1, 0, 0]]),
        compiled.init_cache(2, 16),
    )  # fmt: skip
    logits = []
    for active in ([True, True], [True, False], [True, True]):
        sampled, state = compiled.decode_greedy(mx.array([7, 8]), mx.array(active), state)
        logits.append(sampled.logits[: sum(active)])
    return mx.concatenate(logits)


def test_fused_parts_give_what_plain_ones_do(calls, monkeypatch):
    model = Model(TINY, make_params(TINY))
    fused = decode(model)
    times = calls["split"]
    assert times >= 3 * LAYERS
    assert calls == {
        "norm+eps": times, "norm+eps+gated": times, "residual": 2 * times, "split": times,
    }  # fmt: skip
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    assert relative_error(fused, decode(model)) < 1e-5


def test_biases_and_activations_are_not_lost(calls, monkeypatch):
    config = replace(TINY, attention_bias=True, mlp_bias=True, hidden_act="gelu")
    model = Model(config, make_params(config))
    fused = decode(model)
    times = calls["split"]
    # Queries, keys and values, then gate and up; what attention and MLP give.
    assert calls == {"norm+eps+bias": 2 * times, "bias+residual": 2 * times, "split": times}
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    assert relative_error(fused, decode(model)) < 1e-5


def test_packed_and_changed_matrices_are_left_alone(calls, monkeypatch):
    params = make_params(TINY, "affine")
    model = Model(TINY, params)
    monkeypatch.setattr(Model, "prepared", params)
    packed = decode(model)
    assert set(calls) == {"split"}
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    assert relative_error(packed, decode(model)) < 1e-5


def test_changes_beside_matrices_are_not_lost(calls, monkeypatch):
    params = make_params(TINY)
    for i in range(LAYERS):
        name = f"model.layers.{i}.mlp.down_proj"
        outputs, inputs = params[f"{name}.weight"].shape
        for part, shape in ((LORA_A, (2, inputs)), (LORA_B, (outputs, 2))):
            params[name + part] = mx.random.normal(shape, key=mx.random.key(i)) * 0.1
    model = Model(TINY, params)
    fused = decode(model)
    times = calls["split"]
    assert calls == {
        "norm+eps": times, "norm+eps+gated": times, "residual": times, "split": times,
    }  # fmt: skip
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    assert relative_error(fused, decode(model)) < 1e-5


@pytest.mark.parametrize("model_type", ["gpt_neox", "olmo2"])
def test_subclasses_of_parts_do_what_they_do(calls, model_type):
    """They read what a projection gives in their own way, which no kernel knows."""
    decode(converters.load(family_folder(model_type), dtype="float32"))
    assert not calls


@pytest.mark.parametrize("rope", [
    RopeConfig(theta=1e4, kind="dynamic", factor=2.0, original_max_positions=64),
    RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_positions=64),
])  # fmt: skip
def test_other_ropes_are_left_alone(calls, monkeypatch, rope):
    model = Model(replace(TINY, rope=rope), make_params(TINY))
    fused = decode(model)
    assert calls["residual"]
    assert not calls["split"]
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    assert relative_error(fused, decode(model)) < 1e-5


def test_a_bias_of_another_dtype_is_cast(calls, monkeypatch):
    given: list[mx.Dtype] = []
    monkeypatch.setattr(
        few_rows, "multiply",
        lambda x, weight, bias=None, **more: (
            given.append(bias.dtype) if bias is not None else None,
            pure(x, weight, bias=bias, **more).astype(x.dtype),
        )[1],
    )  # fmt: skip
    config = replace(TINY, attention_bias=True, dtype="bfloat16")
    model = Model(config, make_params(config, "bfloat16"))
    ready = {
        name: array.astype(mx.float32) if name.endswith("bias") else array
        for name, array in model.prepared.items()
    }
    monkeypatch.setattr(Model, "prepared", ready)
    decode(model)
    assert set(given) == {mx.bfloat16}


@pytest.mark.parametrize("shape", [(2, 16), (256, 192)])
def test_a_kernel_gets_as_many_arrays_as_it_names(monkeypatch, shape):
    ran: list[tuple[str, int]] = []

    def run(name, source, constants, inputs, scalars, results, **launch):
        ran.append((source, len(inputs)))
        return [mx.zeros(shape, dtype) for shape, dtype in results]

    monkeypatch.setattr(kernels, "run", run)
    offset = mx.array([3], mx.int32)
    waves = heads.make_waves(make_rotary(RopeConfig(theta=1e4), 16, offset, offset + 1, 1, None))
    assert waves is not None
    heads.split(mx.zeros((1, 4 * 16)), 2, 1, waves, mx.zeros(shape, mx.bfloat16))
    ((source, count),) = ran
    named = source.partition("NAME(")[2].partition(")")[0].count("const ")
    assert count == named


def test_the_contract_itself_stays_differentiable(calls):
    model = Model(TINY, make_params(TINY))
    state = model.init_cache(1, 8)
    mask = mx.zeros((1, 1, 1, 8), mx.bool_)
    mask[..., 0] = True
    model.forward(model.prepared, mx.array([[3]]), mask, state)
    assert not calls


def test_what_the_kernel_is_for():
    def fits(rows, outputs, inputs, dtype=mx.bfloat16, shape=None):
        x = mx.zeros(shape or (rows, inputs), dtype)
        return few_rows.supports(x, mx.zeros((outputs, inputs), dtype))

    assert fits(1, 3072, 2048)
    assert fits(16, 960, 576)
    assert not fits(17, 3072, 2048)
    assert not fits(1, 48, 2048)
    assert not fits(1, 3072, 96)
    assert not fits(1, 3072, 2048, mx.float16)
    assert not fits(1, 3072, 2048, shape=(1, 1, 2048))
    assert not fits(1, 3072, 2048, shape=(1, 1024))


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
@pytest.mark.parametrize("outputs", [64, 8192])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_fit_every_gpu_and_sums_do_not_depend_on_the_rows(monkeypatch, rows, outputs, gated):
    launched: list[dict[str, Any]] = []

    def run(name, source, constants, inputs, scalars, results, **launch):
        launched.append({**constants, **launch})
        return [mx.zeros(shape, dtype) for shape, dtype in results]

    monkeypatch.setattr(few_rows.kernels, "run", run)
    weight, norm = mx.zeros((outputs, 2048), mx.bfloat16), mx.zeros((2048,), mx.bfloat16)
    for count in (rows, 1):
        x = mx.zeros((count, 2048), mx.bfloat16)
        out = few_rows.multiply(x, weight, norm=norm, eps=1e-5, gated=gated)
        assert out.shape == (count, outputs // 2 if gated else outputs)
    some, one = launched
    assert some["STAGES"] >= 2  # one is copied while another is used
    assert some["shared_memory"] <= 96 * 1024
    kept = 16 if gated else 16 * some["TILES"]
    assert some["blocks"] == (out.shape[1] // kept, 1, 1)
    assert {k: some[k] for k in ("TILES", "WARPS")} == {k: one[k] for k in ("TILES", "WARPS")}


CASES = {
    "plain": (), "norm": ("norm",), "gated": ("norm", "gated"), "residual": ("residual",),
    "all": ("norm", "bias", "residual"),
}  # fmt: skip


@cuda_only
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(64, 64), (192, 96), (576, 1536), (2048, 3072), (8192, 2048), (4096, 6144)],
)
def test_products(inputs, outputs, rows, case):
    """Near float32, and bit for bit what a row is alone."""
    keys = [mx.random.key(seed) for seed in range(5)]

    def draw(key: int, *shape: int, scale: float = 1.0) -> mx.array:
        return (mx.random.normal(shape, key=keys[key]) * scale).astype(mx.bfloat16)

    x, weight = draw(0, rows, inputs, scale=3.0), draw(1, outputs, inputs, scale=inputs**-0.5)
    given = CASES[case]
    more: dict[str, Any] = {"gated": "gated" in given}
    if "norm" in given:
        more |= {"norm": 1 + draw(2, inputs, scale=0.3), "eps": 1e-5}
    if "bias" in given:
        more["bias"] = draw(3, outputs)
    residual = draw(4, rows, outputs) if "residual" in given else None
    found = few_rows.multiply(x, weight, **more, residual=residual)
    assert relative_error(found, pure(x, weight, **more, residual=residual)) < 8e-3
    for _ in range(2):  # the second time CUDA graphs are updated
        last = None if residual is None else residual[-1:]
        alone = few_rows.multiply(x[-1:], weight, **more, residual=last)
        assert mx.array_equal(alone, found[-1:])


@cuda_only
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("rope", [
    RopeConfig(theta=5e5), RopeConfig(theta=1e4, partial=0.5),
    RopeConfig(theta=1e4, partial=0.5, interleaved=True),
])  # fmt: skip
@pytest.mark.parametrize("fetches", [False, True])
def test_heads(dtype, rope, fetches):
    """What MLX's own kernel makes of them, but for the last bit."""
    offset = mx.array([0, 5, 3000], mx.int32)
    rotary = make_rotary(rope, 64, offset, offset + 1, 1, None)
    qkv = mx.random.normal((3, 12 * 64), key=mx.random.key(0)).astype(dtype)
    upcoming = mx.zeros((256, 192), dtype) if fetches else None
    waves = heads.make_waves(rotary)
    assert waves is not None
    found = heads.split(qkv, 8, 2, waves, upcoming)
    qk, v = mx.split(split_heads(qkv, 12), [10], axis=1)
    q, k = mx.split(rotary(qk), [8], axis=1)
    ulp = {mx.bfloat16: 4e-3, mx.float16: 5e-4, mx.float32: 1e-6}[dtype]
    for a, b in zip(found[:2], (q, k), strict=True):
        assert relative_error(a, b) < ulp
    assert mx.array_equal(found[2], v)
