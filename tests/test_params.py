from __future__ import annotations

from dataclasses import replace

from funcrt import masks
from funcrt import params as weights
from funcrt.errors import ParamsError
from funcrt.model import Model
from funcrt.models import family
from tests.helpers import (
    KINDS,
    TINY,
    TOLERANCE,
    assert_same,
    expand,
    ids,
    make_model,
    make_params,
    quantize,
    random_tokens,
    relative_error,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

LLAMA = family("llama")

BIASED = replace(TINY, attention_bias=True, mlp_bias=True)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def refuse(params: weights.Params, *matches: str) -> None:
    with pytest.raises(ParamsError) as caught:
        Model(TINY, params)
    for match in matches:
        assert match in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [TINY, BIASED, replace(TINY, tie_word_embeddings=True)])
def test_spec_counts_every_weight(config):
    spec = LLAMA.param_spec(config)
    e, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    h, k = 64, 32
    layer = 2 * e * h + 2 * e * k + 3 * e * f + 2 * e
    if config.attention_bias:
        layer += h + 2 * k + e + 2 * f + e
    embeddings = v * e if config.tie_word_embeddings else 2 * v * e
    assert sum(int(np.prod(shape)) for shape in spec.values()) == 2 * layer + e + embeddings


def test_check_restores_the_order_of_the_network():
    for params in (make_params(TINY), make_params(TINY, "affine")):
        shuffled = {name: params[name] for name in sorted(params, reverse=True)}
        checked = Model(TINY, shuffled).params
        names = [name for name in checked if not name.endswith((".scales", ".biases"))]
        assert names == list(LLAMA.param_spec(TINY))
        assert_same({name: checked[name] for name in sorted(checked, reverse=True)}, shuffled)


def test_every_problem_is_listed():
    params = make_params(TINY)
    del params[f"{Q}.weight"], params["model.norm.weight"]
    params["lm_head.bias"] = mx.zeros((96,))
    params[f"{DOWN}.weight"] = params[f"{DOWN}.weight"].T
    params["lm_head.weight"] = mx.zeros((96, 64), mx.int32)
    refuse(
        params,
        f"missing: {Q}.weight, model.norm.weight",
        "unknown: lm_head.bias",
        f"{DOWN}.weight: expected shape (64, 96), got (96, 64)",
        "lm_head.weight: expected a float dtype, got mlx.core.int32",
    )


def test_a_long_list_is_cut():
    refuse({}, "missing: lm_head.weight, ", " and 9 more")
    assert len(LLAMA.param_spec(TINY)) == 21


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({f"{Q}.biases": None}, "no biases, which affine"),
        ({f"{Q}.scales": None}, f"{Q}.weight: expected shape (64, 64), got (64, 8)"),
        ({f"{Q}.weight": mx.zeros((64, 64))}, f"{Q}.weight: expected packed uint32"),
        ({f"{Q}.weight": mx.zeros((32, 8), mx.uint32)}, f"{Q}.weight: expected packed uint32"),
        ({f"{Q}.weight": mx.zeros((64, 7), mx.uint32)}, "7 packed columns do not hold 64"),
        ({f"{Q}.weight": mx.zeros((64, 2), mx.uint32)}, "2 packed columns do not hold 64"),
        ({f"{Q}.weight": mx.zeros((64, 64), mx.uint32)}, "64 packed columns do not hold 64"),
        ({f"{Q}.scales": mx.zeros((64, 3))}, "scales (64, 3)"),
        ({f"{Q}.scales": mx.zeros((2, 2))}, "scales (2, 2)"),
        ({f"{Q}.biases": mx.zeros((64, 1))}, "biases (64, 1)"),
        ({f"{Q}.biases": mx.zeros((64, 2), mx.float16)}, "share a float dtype"),
        ({f"{Q}.scales": mx.zeros((64, 2), mx.uint8)}, "share a float dtype"),
        # MLX packs groups of 32, 64 and 128 only.
        ({f"{Q}.{p}": mx.zeros((64, 4)) for p in ("scales", "biases")}, "scales (64, 4)"),
        ({f"{Q}.{p}": mx.zeros((64, 0)) for p in ("scales", "biases")}, "scales (64, 0)"),
        ({"model.norm.scales": mx.zeros((2,))}, "model.norm"),
    ],
)
def test_packed_matrices_are_checked(changes, match):
    params = {**make_params(TINY, "affine"), **changes}
    refuse({name: array for name, array in params.items() if array is not None}, match)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_packing_follows_from_the_shapes(bits, group_size):
    config = replace(TINY, intermediate_size=128)
    params = quantize(make_params(config), group_size, bits)
    model = Model(config, params)
    for name in (f"{Q}.weight", f"{DOWN}.weight", "model.embed_tokens.weight"):
        base, columns = name.removesuffix(".weight"), model.spec[name][1]
        assert weights.quantization_of(params, base, columns) == (bits, group_size, "affine")
    assert weights.quantization_of(params, "model.norm", 64) is None
    if bits in (2, 4, 8):
        ours = weights.dequantize(params, Q, weights.Quantization(bits, group_size))
        np.testing.assert_allclose(np.array(ours), expand(model)[f"{Q}.weight"], atol=1e-6)


def prepared(model: Model, dequantize: bool, fuse: bool = True) -> weights.Params:
    fusions = LLAMA.fusions(model.config) if fuse else {}
    preparation = weights.Preparation(model.config.dtype, dequantize, fusions)
    return weights.prepare(model.params, model.spec, preparation)


def run(model: Model, params: weights.Params) -> mx.array:
    tokens = ids(random_tokens(12, 1), random_tokens(12, 2))
    state = model.init_cache(2, 16)
    mask = masks.causal(mx.ones((2, 12)), state["lengths"], 16)
    return model.forward(params, tokens, mask, state)[0]


@pytest.mark.parametrize("config", [TINY, BIASED])
@pytest.mark.parametrize("kind", KINDS)
def test_prepared_weights_give_the_stored_results(kind, config):
    model = make_model(kind, attention_bias=config.attention_bias, mlp_bias=config.mlp_bias)
    expected = run(model, model.params)
    exact = run(Model(replace(model.config, dtype="float32"), model.params), model.params)
    allowed = max(TOLERANCE, 1.25 * relative_error(expected, exact))
    for dequantize in (False, True):
        for fuse in (False, True):
            ready = prepared(model, dequantize, fuse)
            assert relative_error(run(model, ready), exact) <= allowed
            has_packed = any(array.dtype == mx.uint32 for array in ready.values())
            assert has_packed == (kind == "affine" and not dequantize)
            assert any("qkv_proj" in name for name in ready) == fuse
            assert any("q_proj" in name for name in ready) != fuse
            floats = {array.dtype for array in ready.values()} - {mx.uint32}
            assert floats == {weights.FLOATS[model.config.dtype]}
    assert model.prepared.keys() == model.prepare(model.params).keys()


def test_preparing_casts_once_from_full_precision():
    """16-bit scales are widened before they are multiplied, dense weights only change dtype."""
    params = {
        name: array if array.dtype == mx.uint32 else array.astype(mx.float16)
        for name, array in make_params(TINY, "affine").items()
    }
    model = Model(TINY, params)
    ready = prepared(model, dequantize=True, fuse=False)
    by_hand = expand(model)
    for name, array in ready.items():
        np.testing.assert_allclose(np.array(array), by_hand[name], rtol=1e-6, atol=1e-7)
    assert list(ready) == [name for name in params if not name.endswith((".scales", ".biases"))]


def test_fused_rows_stand_in_order():
    model = make_model(attention_bias=True)
    ready = prepared(model, dequantize=False)
    layer = "model.layers.1"
    for part in ("weight", "bias"):
        rows = [model.params[f"{layer}.self_attn.{n}_proj.{part}"] for n in "qkv"]
        fused = ready[f"{layer}.self_attn.qkv_proj.{part}"]
        np.testing.assert_array_equal(fused, np.concatenate([np.array(r) for r in rows]))
    rows = [model.params[f"{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    fused = ready[f"{layer}.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(fused, np.concatenate([np.array(r) for r in rows]))
    assert not any(f"{layer}.self_attn.{n}_proj.weight" in ready for n in "qkv")


@pytest.mark.parametrize("mixture", ["bits", "groups", "dense first", "dense last"])
def test_mixed_packings_stay_unfused(mixture):
    dense = make_params(TINY)
    params = quantize(dense)
    q, v = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
    changed = q if mixture == "dense first" else v
    for part in ("weight", "scales", "biases"):
        del params[f"{changed}.{part}"]
    if mixture.startswith("dense"):
        params[f"{changed}.weight"] = dense[f"{changed}.weight"]
    else:
        group, bits = (32, 8) if mixture == "bits" else (64, 4)
        params |= quantize({f"{changed}.weight": dense[f"{changed}.weight"]}, group, bits)
    model = Model(TINY, params)
    ready = prepared(model, dequantize=False)
    assert f"{v}.weight" in ready
    assert "model.layers.0.self_attn.qkv_proj.weight" not in ready
    assert "model.layers.1.self_attn.qkv_proj.weight" in ready
    assert relative_error(run(model, ready), run(model, model.params)) <= TOLERANCE
    expanded = prepared(model, dequantize=True)
    assert "model.layers.0.self_attn.qkv_proj.weight" in expanded
    assert relative_error(run(model, expanded), run(model, model.params)) <= TOLERANCE


@pytest.mark.parametrize("spelled", [mx.float16, "float16", "mlx.core.float16"])
def test_dtype_names(spelled):
    assert weights.dtype_name(spelled) == "float16"
    assert weights.choose_dtype({}, spelled) == "float16"


@pytest.mark.parametrize("bad", [mx.int8, "fp16", "", mx.complex64])
def test_dtypes_that_do_not_compute(bad):
    with pytest.raises(ParamsError, match="use float32, float16, bfloat16"):
        weights.dtype_name(bad)


def test_dtype_is_float32_on_cpu_unless_memory_is_short(monkeypatch):
    params = make_params(TINY, "bfloat16")
    with mx.stream(mx.cpu):
        before = mx.default_device()
        mx.set_default_device(mx.cpu)
        assert weights.choose_dtype(params) == "float32"
        packed = quantize(make_params(TINY))
        assert weights.choose_preparation("float32", packed, {}).dequantize
        monkeypatch.setattr(weights, "available_memory", lambda: 1000)
        assert weights.choose_dtype(params) == "bfloat16"
        wide = {**params, "model.norm.weight": mx.ones((64,))}  # a vector does not count
        assert weights.choose_dtype(wide) == "bfloat16"
        assert weights.choose_dtype({**params, "lm_head.weight": mx.ones((2, 2))}) == "float32"
        assert not weights.choose_preparation("float32", packed, {}).dequantize
        mx.set_default_device(before)


def test_cast_leaves_packed_arrays():
    packed = make_params(TINY, "affine")
    cast = weights.cast(packed, "float16")
    for name, array in packed.items():
        is_packed = array.dtype == mx.uint32
        assert cast[name].dtype == (mx.uint32 if is_packed else mx.float16)
        if is_packed:
            np.testing.assert_array_equal(to_numpy(cast[name]), to_numpy(array))


@pytest.mark.parametrize("shape", [(), (3,), (0, 3), (2, 3), (2, 1, 3)])
def test_bytes_of_an_array(shape):
    array = mx.random.uniform(shape=shape)
    assert bytes(weights.array_bytes(array)) == np.array(array).tobytes()
    turned = array.transpose()
    assert bytes(weights.array_bytes(turned)) == np.array(turned).tobytes()


def test_arrays_of_2_gib_have_bytes():
    """As large embeddings and stacked experts; an axis of so many bytes is none to MLX."""
    array = mx.zeros((1 << 15, 1 << 15), dtype=mx.bfloat16)
    assert len(weights.array_bytes(array)) == array.nbytes == 1 << 31


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "affine"])
def test_stored_weights_become_rows_of_what_they_are_stacked_into(kind: str, tmp_path) -> None:
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    original = make_params(TINY, kind)
    model = Model(replace(TINY, dtype=dtype), original)
    before = {name: mx.array(array) for name, array in model.params.items()}
    fused, kept = model.weight_bytes
    assert (kept > 0) == (kind == "affine")  # those are expanded
    assert fused == sum(array.nbytes for array in model.prepared.values())
    assert list(model.params) == list(before)
    for name, array in before.items():
        assert mx.array_equal(model.params[name], array), name
    assert model.weight_bytes == (fused, kept)
    model.save(tmp_path / "saved")
    for name, array in mx.load(str(tmp_path / "saved" / "model.safetensors")).items():
        assert mx.array_equal(array, before[name]), name


def test_stacked_weights_are_in_memory_once() -> None:
    config = replace(TINY, hidden_size=256, intermediate_size=4096, num_layers=4)
    params = make_params(config)
    mx.eval(params)
    model = Model(config, params)
    size = sum(array.nbytes for array in params.values())
    del params
    before = mx.get_active_memory()
    assert model.prepared
    assert mx.get_active_memory() - before < size // 20


def test_bytes_of_rows_are_not_copied() -> None:
    whole = mx.ones((4096, 1024))
    rows = whole[1024:2048]
    mx.eval(whole, rows)
    before = mx.get_active_memory()
    assert weights.array_bytes(rows).nbytes == rows.nbytes
    held = weights.array_bytes(rows)
    assert mx.get_active_memory() - before < rows.nbytes // 10
    assert bytes(held[:4]) == bytes(memoryview(mx.ones((1,))).cast("B"))
    turned = mx.arange(6).reshape(2, 3).T
    assert bytes(weights.array_bytes(turned)) == bytes(
        weights.array_bytes(mx.array(turned.tolist()))
    )
