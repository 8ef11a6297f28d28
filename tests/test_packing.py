"""Every form of packed matrices: all codes, and models that compute with them."""

from __future__ import annotations

import json
from pathlib import Path

import funcrt
from funcrt import masks, packing, params
from funcrt.buckets import BucketPlan
from funcrt.errors import ParamsError
from funcrt.model import Model, load_model
from funcrt.ops.experts import Pick, expert_linear
from funcrt.packing import MICROSCALED, Quantization
from funcrt.params import Params
from tests.helpers import (
    TINY,
    TOLERANCE,
    assert_same,
    ids,
    make_params,
    random_tokens,
    relative_error,
    run_plain,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

MODES = list(MICROSCALED)
AFFINE = [Quantization(b, g) for b in packing.AFFINE_BITS for g in (32, 64)]
ALL = [*AFFINE, *MICROSCALED.values()]
PLAN = BucketPlan(batch=[2], tokens=[8], capacity=[32])
Q = "model.layers.0.self_attn.q_proj"
# A matrix each: MLX multiplies what is packed in 3, 5 and 6 bits more slowly, not otherwise.
MIXED = [*MICROSCALED.values(), Quantization(3, 32), Quantization(5, 64), Quantization(6, 32)]


def pack(array: mx.array, how: Quantization, base: str) -> Params:
    parts = mx.quantize(array, group_size=how.group_size, bits=how.bits, mode=how.mode)
    return {f"{base}.{p}": a for p, a in zip(packing.PARTS, parts, strict=False)}


def expand(parts: Params, how: Quantization, base: str, dtype: mx.Dtype) -> mx.array:
    """By MLX itself."""
    arrays = [parts[f"{base}.{p}"] for p in packing.PARTS if f"{base}.{p}" in parts]
    return mx.dequantize(
        *arrays, group_size=how.group_size, bits=how.bits, mode=how.mode, dtype=dtype
    )


def pack_model(how: Quantization | list[Quantization], dtype: str = "float32") -> Model:
    """A tiny llama with every matrix packed, with several forms in turns."""
    forms = how if isinstance(how, list) else [how]
    made: Params = {}
    count = 0
    for name, array in make_params(TINY, dtype).items():
        form = forms[count % len(forms)]
        if array.ndim == 1 or array.shape[-1] % form.group_size:
            made[name] = array
        else:
            made |= pack(array, form, name.removesuffix(".weight"))
            count += 1
    return Model(TINY if dtype == "float32" else _in(dtype), made)


def _in(dtype: str) -> funcrt.ModelConfig:
    return type(TINY).from_dict({**TINY.to_dict(), "dtype": dtype})


def all_codes(how: Quantization) -> Params:
    """Rows with every value in every position of a byte, one row for each scale."""
    bits, group = how.bits, how.group_size
    values = np.arange(256, dtype=np.uint8)  # each byte holds one value of 8 bits, or all pairs
    row = np.tile(values, group * bits // 8).view(np.uint32)
    scales = np.broadcast_to(values[:, None], (256, row.size * 32 // bits // group))
    return {"w.weight": mx.array(np.tile(row, (256, 1))), "w.scales": mx.array(scales)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_all_codes_with_all_scales_are_those_of_mlx(mode: str, dtype: mx.Dtype) -> None:
    how = MICROSCALED[mode]
    parts = all_codes(how)
    assert packing.quantization_of(parts, "w", parts["w.weight"].shape[1] * 32 // how.bits) == how
    ours = packing.dequantize(parts, "w", how).astype(dtype)
    theirs = expand(parts, how, "w", dtype)
    finite = mx.isfinite(theirs)
    assert finite.sum().item() > 0.7 * finite.size
    same = mx.view(ours, mx.uint8) == mx.view(theirs, mx.uint8)
    as_numbers = mx.repeat(mx.isnan(ours) & mx.isnan(theirs), dtype.size, axis=-1)
    assert mx.all(same | as_numbers).item()  # bit for bit, signed zeros too


def test_tables_of_bytes_are_the_formats() -> None:
    codes = mx.arange(256).astype(mx.uint8)
    ours = np.array(packing.expand_fp8(codes))
    np.testing.assert_array_equal(ours, np.array(mx.from_fp8(codes, dtype=mx.float32)))
    assert ours[[0x7E, 0x08, 0x01, 0xFE]].tolist() == [448.0, 2.0**-6, 2.0**-9, -448.0]
    powers = np.array(packing.expand_e8m0(codes))
    assert powers[[0, 1, 127, 254]].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


@pytest.mark.parametrize("how", ALL, ids=str)
def test_arrays_tell_how_they_are_packed(how: Quantization) -> None:
    model = pack_model(how)
    packed = params.packings(model.spec, model.params)
    assert set(packed.values()) == {how}
    dense = model.prepare(model.params)
    name = f"{Q}.weight"
    fused = next(array for key, array in dense.items() if key.endswith("qkv_proj.weight"))
    expected = expand(model.params, how, Q, mx.float32)
    assert mx.array_equal(fused[:64] if name not in dense else dense[name], expected)


@pytest.mark.parametrize("how", [*MICROSCALED.values(), MIXED], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_and_exported_functions_equal_eager_ones(
    how: Quantization | list[Quantization], dtype: str, tmp_path: Path
) -> None:
    model = pack_model(how, dtype)
    tokens = ids(random_tokens(8, 1), random_tokens(8, 2))
    for prepared in (False, True):
        weights = model.prepared if prepared else model.params
        state = model.init_cache(2, 32)
        mask = masks.causal(mx.ones((2, 8)), state["lengths"], 32)
        eager = model.forward(weights, tokens, mask, state)[0]
        compiled = mx.compile(model.forward)(weights, tokens, mask, state)[0]
        flat, _, _ = funcrt.flatten(model.forward, weights, tokens, mask, state)
        arrays = [*weights.values(), tokens, mask, *state.values()]
        path = str(tmp_path / f"{prepared}.mlxfn")
        mx.export_function(path, flat, *arrays)
        imported = mx.import_function(path)(*arrays)[0]
        allowed = TOLERANCE if dtype == "float32" else 2e-2
        assert relative_error(compiled, eager) <= allowed
        assert relative_error(imported, compiled) <= allowed
        exact = [run_plain(model.in_float32(), row)[0] for row in tokens.tolist()]
        assert relative_error(eager, np.stack(exact)) <= (2e-5 if dtype == "float32" else 5e-2)


@pytest.mark.parametrize("how", [*MICROSCALED.values(), MIXED], ids=str)
def test_bundles_prepare_them(how: Quantization | list[Quantization], tmp_path: Path) -> None:
    model = pack_model(how)
    funcrt.export(model, tmp_path / "packed.funcrt", PLAN)
    bundle = funcrt.load_bundle(tmp_path / "packed.funcrt")
    tokens = random_tokens(8, 3)
    logits, _ = bundle([tokens, tokens])
    assert relative_error(logits[0], run_plain(model, tokens)[0]) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_packed_weights_stay_packed_where_there_is_no_room(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fused, cast and exported as packed ones."""
    model = pack_model(MICROSCALED[mode], "bfloat16")
    expected = run_plain(model, random_tokens(8))[0]
    monkeypatch.setattr(params, "available_memory", lambda: 0)
    model = pack_model(MICROSCALED[mode], "bfloat16")
    fused = f"{Q.removesuffix('q_proj')}qkv_proj"
    assert model.prepared[f"{fused}.scales"].dtype == mx.uint8
    assert f"{fused}.biases" not in model.prepared
    funcrt.export(model, tmp_path / "packed.funcrt", PLAN)
    bundle = funcrt.load_bundle(tmp_path / "packed.funcrt")
    logits, _ = bundle([random_tokens(8)] * 2)
    assert relative_error(logits[0], expected) <= 2e-2


@pytest.mark.parametrize("mode", MODES)
def test_gradients_pass_through(mode: str) -> None:
    """To what is dense; the packed product's gradient is that of the dense one."""
    model = pack_model(MICROSCALED[mode])
    dense = model.in_float32()
    tokens, norm = random_tokens(6), "model.layers.0.input_layernorm.weight"

    def slope(model: Model) -> mx.array:
        def loss(weight: mx.array) -> mx.array:
            state = model.init_cache(1, 8)
            mask = masks.causal(mx.ones((1, 6)), state["lengths"], 8)
            logits, _ = model.forward({**model.params, norm: weight}, ids(tokens), mask, state)
            return mx.mean(logits[..., 3] ** 2)

        return mx.grad(loss)(model.params[norm])

    assert relative_error(slope(model), slope(dense)) <= 1e-4


@pytest.mark.parametrize("how", [*MICROSCALED.values(), Quantization(6, 32)], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
def test_experts(how: Quantization, ordered: bool) -> None:
    stack = mx.random.normal((4, 64, 32), key=mx.random.key(0))
    parts = pack(stack, how, "w")
    dense = {"w.weight": expand(parts, how, "w", mx.float32)}
    x = mx.random.normal((3, 1, 32), key=mx.random.key(1))
    pick = Pick(mx.array([0, 2, 3]), ordered)
    assert relative_error(
        expert_linear(parts, "w", x, pick), expert_linear(dense, "w", x, pick)
    ) <= (1e-5)


def test_saved_folders_name_the_modes(tmp_path: Path) -> None:
    model = pack_model([MICROSCALED["mxfp4"], MICROSCALED["mxfp4"], MICROSCALED["nvfp4"]])
    model.save(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization"]
    common = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    assert {key: written[key] for key in common} == common
    assert written[Q.replace("q_proj", "k_proj")] == {"bits": 4, "group_size": 16, "mode": "nvfp4"}
    assert_same(load_model(tmp_path).params, model.params)


def test_one_bit_is_another_fingerprint() -> None:
    model = pack_model(MICROSCALED["nvfp4"])
    scales = model.params[f"{Q}.scales"]
    other = {**model.params, f"{Q}.scales": scales.at[0, 0].add(mx.array(1, mx.uint8))}
    assert Model(TINY, other).fingerprint != model.fingerprint


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": mx.zeros((64, 4), mx.uint32)}, "of 2 bits do not fit (64, 64) in any mode"),
        ({"scales": mx.zeros((64, 1), mx.uint8)}, "mxfp4 (4 in 32), mxfp8 (8 in 32), nvfp4"),
        ({"scales": mx.zeros((64, 2), mx.uint32)}, "no biases, which affine"),
        ({"scales": mx.zeros((32, 2), mx.uint8)}, "scales of one byte (32, 2)"),
        ({"weight": mx.zeros((64, 8), mx.uint8)}, "expected packed uint32"),
        ({"weight": mx.zeros((64, 7), mx.uint32)}, "do not fit (64, 64)"),
    ],
)
def test_parts_that_do_not_fit(change: dict[str, mx.array], match: str) -> None:
    model = pack_model(MICROSCALED["mxfp4"])
    wrong = {**model.params, **{f"{Q}.{part}": array for part, array in change.items()}}
    with pytest.raises(ParamsError) as caught:
        Model(TINY, wrong)
    assert match in str(caught.value)


def test_scales_that_are_no_numbers_are_found() -> None:
    for scales, group, expected in (
        (mx.array([[254, 0]], mx.uint8), 32, False),
        (mx.array([[0, 255]], mx.uint8), 32, True),
        (mx.array([[255, 1]], mx.uint8), 16, True),
        (mx.array([[127, 1]], mx.uint8), 16, True),
        (mx.array([[127, 1]], mx.uint8), 32, False),
        (mx.array([1.0, 2.0]), 32, False),
        (mx.array([1.0, float("nan")]), 32, True),
        (mx.array([1.0, float("inf")]), 32, True),
    ):
        assert packing.unfit_scales(scales, group).item() is expected
    assert np.isfinite(to_numpy(packing.expand_e8m0(mx.array([254], mx.uint8)))).all()
