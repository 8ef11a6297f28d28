"""Products of few rows with what comes before and after; the kernels themselves only on CUDA."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import converters
from funcrt import BucketPlan
from funcrt.config.rope import RopeConfig
from funcrt.layers import PreNorm
from funcrt.low_rank import LORA_A, LORA_B
from funcrt.model import Model
from funcrt.ops import few_rows, heads, kernels, one_token
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


def pure_split(qkv, count, kv_heads, waves):
    qk, v = mx.split(split_heads(qkv, count + 2 * kv_heads), [count + kv_heads], axis=1)
    cos, sin = (wave[:, None, None] for wave in (waves.cosines, waves.sines))
    turning, rest = mx.split(qk, [2 * cos.shape[-1]], axis=-1)
    turning = turning.astype(mx.float32)
    if waves.interleaved:
        low, high = turning[..., ::2], turning[..., 1::2]
    else:
        low, high = mx.split(turning, 2, axis=-1)
    halves = [low * cos - high * sin, low * sin + high * cos]
    if waves.interleaved:
        turned = mx.stack(halves, axis=-1).flatten(-2)
    else:
        turned = mx.concatenate(halves, axis=-1)
    q, k = mx.split(mx.concatenate([turned.astype(qk.dtype), rest], axis=-1), [count], axis=1)
    return q, k, v


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """Parts fuse as on CUDA, with the pure forms in place of the kernels, which are counted."""
    counted: Counter[str] = Counter()

    def multiply(*arrays: mx.array, **more: Any) -> mx.array:
        given = sorted(k for k, value in more.items() if isinstance(value, mx.array) or value)
        counted["+".join(given)] += 1
        return pure(*arrays, **more)

    def split(*arguments: Any) -> tuple[mx.array, ...]:
        counted["split"] += 1
        return pure_split(*arguments)

    def multiply_heads(x, weight, count, kv_heads, waves, **more: Any) -> tuple[mx.array, ...]:
        given = sorted(name for name, value in more.items() if value is not None)
        counted["+".join(("heads", *given))] += 1
        return pure_split(pure(x, weight, **more).astype(x.dtype), count, kv_heads, waves)

    monkeypatch.setattr(kernels, "are_there", lambda: True)
    monkeypatch.setattr(few_rows, "supports", lambda x, weight: x.ndim == 2)
    monkeypatch.setattr(few_rows, "multiply", multiply)
    monkeypatch.setattr(few_rows, "supports_heads", lambda width, waves: True)
    monkeypatch.setattr(few_rows, "multiply_heads", multiply_heads)
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
    times = calls["heads+eps+norm"]
    assert times >= 3 * LAYERS
    assert calls == {
        "heads+eps+norm": times, "eps+gated+norm": times, "residual": 2 * times,
    }  # fmt: skip
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    assert relative_error(fused, decode(model)) < 1e-5


def test_biases_and_activations_are_not_lost(calls, monkeypatch):
    config = replace(TINY, attention_bias=True, mlp_bias=True, hidden_act="gelu")
    model = Model(config, make_params(config))
    fused = decode(model)
    times = calls["heads+bias+eps+norm"]
    # Queries, keys and values, then gate and up; what attention and MLP give.
    assert calls == {
        "heads+bias+eps+norm": times, "bias+eps+norm": times, "bias+residual": 2 * times,
    }  # fmt: skip
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
    times = calls["heads+eps+norm"]
    assert calls == {"heads+eps+norm": times, "eps+gated+norm": times, "residual": times}
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    assert relative_error(fused, decode(model)) < 1e-5


@pytest.mark.parametrize("model_type", ["gpt_neox", "olmo2"])
def test_subclasses_of_parts_do_what_they_do(calls, model_type):
    """They read what a projection gives in their own way, which no kernel knows."""
    decode(converters.load(family_folder(model_type), dtype="float32"))
    assert not calls


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        # Convolutions and gated MLPs, attention whose norms of heads no kernel knows.
        ("lfm2", {"eps+norm", "eps+gated+norm", "residual"}),
        ("lfm2-bias", {"bias+eps+norm", "bias+residual", "eps+norm", "eps+gated+norm", "residual"}),
        ("lfm2_moe", {"eps+norm", "eps+gated+norm", "residual"}),
        # Attention beside experts, whose products are others.
        ("mixtral", {"heads+eps+norm", "residual"}),
        ("qwen3_moe", {"eps+norm", "eps+gated+norm", "residual"}),  # one of its MLPs has none
        # Parts that need an axis of tokens, beside MLPs that do not.
        ("deepseek_v3", {"eps+gated+norm", "residual"}),
        ("qwen3_5_text", {"residual"}),  # its norms add to their weights
        ("gpt_oss", {"bias+eps+norm", "bias+residual"}),
        ("mamba2", set()),
    ],
)
def test_parts_of_all_kinds_stand_beside_each_other(calls, monkeypatch, model_type, expected):
    model = converters.load(family_folder(model_type), dtype="float32")
    fused = decode(model)
    assert set(calls) == expected
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    flat = decode(model)
    assert relative_error(fused, flat) < 1e-5
    monkeypatch.setattr(PreNorm, "FLAT", False)  # of the network with an axis of tokens throughout
    assert relative_error(flat, decode(model)) < 1e-6


@pytest.mark.parametrize("rope", [
    RopeConfig(theta=1e4, kind="dynamic", factor=2.0, original_max_positions=64),
    RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_positions=64),
])  # fmt: skip
def test_other_ropes_are_left_alone(calls, monkeypatch, rope):
    model = Model(replace(TINY, rope=rope), make_params(TINY))
    fused = decode(model)
    assert calls["residual"]
    assert calls["eps+norm"]
    assert not any(name == "split" or name.startswith("heads") for name in calls)
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


def turn(width: int, rope: RopeConfig, positions: list[int]) -> heads.Waves:
    offset = mx.array(positions, mx.int32)
    waves = heads.make_waves(make_rotary(rope, width, offset, offset + 1, 1, None))
    assert waves is not None
    return waves


@pytest.fixture
def launched(monkeypatch) -> list[dict[str, Any]]:
    """What kernels are launched with, instead of launching them."""
    found: list[dict[str, Any]] = []

    def run(name, source, constants, inputs, scalars, results, **launch):
        found.append(
            {**constants, **launch, "source": source, "inputs": inputs, "results": results,
             "scalars": scalars}
        )  # fmt: skip
        return [mx.zeros(shape, dtype) for shape, dtype in results]

    monkeypatch.setattr(kernels, "run", run)
    return found


@pytest.mark.parametrize("slots", [64, 8192])
def test_kernels_get_as_many_arrays_as_they_name(launched, slots):
    waves, numbers = turn(64, RopeConfig(theta=1e4), [3]), mx.zeros((1,), mx.int32)
    x, weight, ones = (mx.zeros(s, mx.bfloat16) for s in ((1, 128), (256, 128), (128,)))
    q, k = (mx.zeros((1, n, size, 64), mx.bfloat16) for n, size in ((2, 1), (1, slots)))
    heads.split(mx.zeros((1, 4 * 64)), 2, 1, waves)
    few_rows.multiply_heads(x, weight, 2, 1, waves, norm=ones, bias=mx.zeros((256,), mx.bfloat16))
    few_rows.multiply_heads(x, weight, 2, 1, waves)
    few_rows.multiply(x, weight, norm=ones, residual=mx.zeros((1, 256), mx.bfloat16))
    few_rows.multiply(x, weight, gated=True)
    for shown in (one_token.Held(numbers, numbers), mx.zeros((1, 1, 1, slots), mx.bool_)):
        assert one_token.attend(q, k, k, shown, 1.0).shape == q.shape
    for kernel in launched:
        arguments = kernel["source"].partition("NAME(")[2].partition(")")[0].split(",")
        reads = [a for a in arguments if a.strip().startswith("const ")]
        writes = [a for a in arguments if "*" in a and a not in reads]
        assert len(reads) == len(kernel["inputs"])
        assert len(writes) == len(kernel["results"])
        assert len(arguments) == len(reads) + len(writes) + len(kernel["scalars"])
        # No word that stands for a piece of a source is left.
        capitals = set(re.findall(r"\b[A-Z]{2,}\b", kernel["source"])) - set(kernel)
        assert not capitals - {"NAME", "ALL", "NOTHING", "TOGETHER", "STEP", "EARLY", "OUTPUTS",
                               "EIGHTS", "WIDE", "KEPT", "LINES"}  # fmt: skip


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
def test_blocks_fit_every_gpu_and_sums_do_not_depend_on_the_rows(launched, rows, outputs, gated):
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
    assert some["WARPS"] == one["WARPS"]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("kv_heads", [2, 16])
def test_blocks_of_heads_fit_every_gpu(launched, rows, kv_heads):
    waves, count = turn(64, RopeConfig(theta=1e4), [0] * rows), 2 * kv_heads
    x = mx.zeros((rows, 2048), mx.bfloat16)
    weight = mx.zeros(((count + 2 * kv_heads) * 64, 2048), mx.bfloat16)
    norm = mx.zeros((2048,), mx.bfloat16)
    found = few_rows.multiply_heads(x, weight, count, kv_heads, waves, norm=norm, eps=1e-5)
    assert [a.shape[1] for a in found] == [count, kv_heads, kv_heads]
    (kernel,) = launched
    assert kernel["STAGES"] >= 2
    assert kernel["shared_memory"] <= 96 * 1024
    assert kernel["blocks"] == (weight.shape[0] // 32, 1, 1)


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
def test_heads(dtype, rope):
    """What MLX's own kernel makes of them, but for the last bit."""
    offset = mx.array([0, 5, 3000], mx.int32)
    rotary = make_rotary(rope, 64, offset, offset + 1, 1, None)
    qkv = mx.random.normal((3, 12 * 64), key=mx.random.key(0)).astype(dtype)
    waves = heads.make_waves(rotary)
    assert waves is not None
    found = heads.split(qkv, 8, 2, waves)
    qk, v = mx.split(split_heads(qkv, 12), [10], axis=1)
    q, k = mx.split(rotary(qk), [8], axis=1)
    ulp = {mx.bfloat16: 4e-3, mx.float16: 5e-4, mx.float32: 1e-6}[dtype]
    for a, b in zip(found[:2], (q, k), strict=True):
        assert relative_error(a, b) < ulp
    assert mx.array_equal(found[2], v)


@pytest.mark.parametrize(("width", "rope", "fits"), [
    (64, RopeConfig(theta=1e4), True), (64, RopeConfig(theta=1e4, partial=0.5), True),
    (80, RopeConfig(theta=1e4), False), (64, RopeConfig(theta=1e4, partial=0.25), False),
])  # fmt: skip
def test_which_heads_the_kernel_is_for(width, rope, fits):
    assert few_rows.supports_heads(width, turn(width, rope, [0])) is fits


@cuda_only
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("rope", [
    RopeConfig(theta=5e5), RopeConfig(theta=1e4, partial=0.5),
    RopeConfig(theta=5e5, interleaved=True), RopeConfig(theta=1e4, partial=0.5, interleaved=True),
])  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(8, 2, 192), (32, 8, 2048), (4, 4, 64)])
def test_heads_of_products(width, rope, bias, sizes):
    """What product and split give, one after the other; a row is bit for bit what it is alone."""
    count, kv_heads, inputs = sizes
    outputs, rows = (count + 2 * kv_heads) * width, 16
    keys = [mx.random.key(seed) for seed in range(4)]
    x = (3 * mx.random.normal((rows, inputs), key=keys[0])).astype(mx.bfloat16)
    weight = (mx.random.normal((outputs, inputs), key=keys[1]) * inputs**-0.5).astype(mx.bfloat16)
    more: dict[str, Any] = {"norm": mx.random.normal((inputs,), key=keys[2]).astype(mx.bfloat16)}
    more |= {"eps": 1e-5}
    more["bias"] = mx.random.normal((outputs,), key=keys[3]).astype(mx.bfloat16) if bias else None
    waves = turn(width, rope, [0, 1, 5, 3000] * 4)
    found = few_rows.multiply_heads(x, weight, count, kv_heads, waves, **more)
    product = pure(x, weight, **more).astype(mx.bfloat16)
    for a, b in zip(found, pure_split(product, count, kv_heads, waves), strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < 8e-3
    for rows in (8, 1):
        some = heads.Waves(waves.cosines[-rows:], waves.sines[-rows:], waves.interleaved)
        alone = few_rows.multiply_heads(x[-rows:], weight, count, kv_heads, some, **more)
        for a, b in zip(alone, found, strict=True):
            assert mx.array_equal(a, b[-rows:])
