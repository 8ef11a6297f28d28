"""Weights that other tools have quantized: what they mean, exactly; and files that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import converters
from converters import published
from funcrt import params as weights
from funcrt.errors import ConfigError, FuncrtError, ParamsError
from funcrt.packing import MICROSCALED
from funcrt.storage import load_arrays, load_json
from tests.converters import shipped
from tests.families.cases import run_plain
from tests.helpers import TOLERANCE, quantize, relative_error
from tests.random_families import some_tokens
from tests.reference import golden

import mlx.core as mx
import numpy as np
import pytest

Tensors = dict[str, tuple[str, Any]]
WEIGHTS = "model.safetensors"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
Q = "model.layers.0.self_attn.q_proj.weight"


def refuse(folder: Path, error: type[FuncrtError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        converters.load(folder)
    assert "\n" not in str(caught.value)


def change(folder: Path, edit: Callable[[Tensors], object]) -> Path:
    """Rewrite the tensors of a folder, as (type, array) by name."""
    header = _header(folder / WEIGHTS)
    arrays = load_arrays(folder / WEIGHTS)
    mx.eval(arrays)
    tensors = {name: (header[name]["dtype"], array) for name, array in arrays.items()}
    edit(tensors)
    shipped.write_typed(folder / WEIGHTS, tensors)
    return folder


def _header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


# --- mxfp4 as gpt-oss has it ---------------------------------------------------------------------


def test_gpt_oss_stays_packed_and_means_the_same(tmp_path: Path) -> None:
    source = golden.family_folder("gpt_oss")
    meant = shipped.ship_gpt_oss(source, tmp_path)
    model = converters.load(tmp_path)
    assert set(weights.packings(model.spec, model.params).values()) == {MICROSCALED["mxfp4"]}
    dense = model.in_float32()
    for name, values in meant.items():
        np.testing.assert_array_equal(np.array(dense.params[name]), values)
    expected = run_plain(dense, some_tokens())
    model = converters.load(tmp_path, dtype="float32")
    for params in (model.params, model.prepared):
        assert relative_error(run_plain(model, some_tokens(), params), expected) <= TOLERANCE


def test_gpt_oss_saves_and_loads_as_it_is(tmp_path: Path) -> None:
    shipped.ship_gpt_oss(golden.family_folder("gpt_oss"), tmp_path / "shipped")
    model = converters.load(tmp_path / "shipped")
    model.save(tmp_path / "saved")
    again = converters.load(tmp_path / "saved")
    assert list(again.params) == list(model.params)
    assert again.fingerprint == model.fingerprint
    written = load_json(tmp_path / "saved" / "config.json")["quantization"]
    assert written == {"bits": 4, "group_size": 32, "mode": "mxfp4"}


def test_mlx_lm_reads_what_is_saved_of_it(tmp_path: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    source = golden.family_folder("gpt_oss")
    rope = {**load_json(source / "config.json")["rope_scaling"], "truncate": True}
    shipped.ship_gpt_oss(source, tmp_path / "shipped", swiglu_limit=7.0, rope_scaling=rope)
    model = converters.load(tmp_path / "shipped", dtype="float32")
    model.save(tmp_path / "saved")
    module, _ = utils.load_model(tmp_path / "saved")
    theirs = module(mx.array([some_tokens()]))[0]
    assert relative_error(run_plain(model, some_tokens()), theirs) <= TOLERANCE


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop(f"{GATE_UP}_scales"), "gate_up_proj_blocks has no .*_scales beside it"),
        (lambda t: t.pop(f"{GATE_UP}_blocks"), "gate_up_proj_scales has no .*_blocks beside it"),
        (lambda t: t.update({f"{GATE_UP}_scales": ("U8", np.full((6, 64, 1), 255, np.uint8))}),
         r"no finite numbers: .*gate_up_proj\.scales"),
        (lambda t: t.update({f"{GATE_UP}_scales": ("U8", np.ones((6, 32, 1), np.uint8))}),
         "expected blocks of 16 bytes with a scale each"),
        (lambda t: t.update({f"{GATE_UP}_scales": ("F32", np.ones((6, 64, 1), np.float32))}),
         "expected blocks of 16 bytes with a scale each"),
        (lambda t: t.update({f"{GATE_UP}_blocks": ("U8", np.ones((6, 64, 1, 8), np.uint8))}),
         "expected blocks of 16 bytes"),
    ],
)  # fmt: skip
def test_gpt_oss_with_wrong_parts(
    edit: Callable[[Tensors], object], match: str, tmp_path: Path
) -> None:
    shipped.ship_gpt_oss(golden.family_folder("gpt_oss"), tmp_path)
    refuse(change(tmp_path, edit), ParamsError, match)


# --- fp8 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(16, 16), (24, 20), (128, 128), None])
@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_fp8_is_expanded_exactly(case: str, block: tuple[int, int] | None, tmp_path: Path) -> None:
    meant = shipped.ship_fp8(golden.family_folder(case), tmp_path, block, static=block is None)
    wide, model = converters.load(tmp_path, dtype="float32"), converters.load(tmp_path)
    assert len(meant) >= 14
    for name, values in meant.items():
        if name not in model.params:
            continue  # of the layers that guess ahead
        np.testing.assert_array_equal(np.array(wide.params[name]), values)
        assert model.params[name].dtype == mx.bfloat16  # rounded once
        assert mx.array_equal(model.params[name], mx.array(values).astype(mx.bfloat16))


def test_fp8_scales_may_be_of_any_type(tmp_path: Path) -> None:
    """Also powers of two, in one byte."""
    meant = shipped.ship_fp8(golden.family_folder("qwen3"), tmp_path, (16, 16))
    name = f"{Q}_scale_inv"
    scale = load_arrays(tmp_path / WEIGHTS)[name]
    rounded = scale.astype(mx.bfloat16)
    change(tmp_path, lambda t: t.update({name: ("BF16", rounded)}))
    values = mx.array(meant[Q]) / mx.repeat(mx.repeat(scale, 16, 0), 16, 1)
    expected = values * mx.repeat(mx.repeat(rounded.astype(mx.float32), 16, 0), 16, 1)
    found = converters.load(tmp_path, dtype="float32").params[Q]
    assert relative_error(found, expected) <= 1e-6
    powers = mx.round(mx.log2(scale)).astype(mx.int32)
    change(tmp_path, lambda t: t.update({name: ("F8_E8M0", (powers + 127).astype(mx.uint8))}))
    scale = mx.power(mx.array(2.0), powers.astype(mx.float32))
    expected = values * mx.repeat(mx.repeat(scale, 16, 0), 16, 1)
    found = converters.load(tmp_path, dtype="float32").params[Q]
    assert relative_error(found, expected) <= 1e-6


@pytest.mark.parametrize("block", [(16, 24), None])
def test_stacks_of_fp8(block: tuple[int, int] | None) -> None:
    """As transformers saves experts that it keeps in fp8."""
    rows = np.random.default_rng(0).normal(0, 0.1, (3, 40, 32)).astype(np.float32)
    codes, scales, values = (
        np.stack(part)
        for part in zip(*(shipped.to_fp8(one, block or (40, 32)) for one in rows), strict=True)
    )
    settings = {"quant_method": "fp8", "weight_block_size": block}
    for shape in [scales.shape] if block else [(3,), (3, 1, 1)]:
        stored = {
            "experts.gate_up_proj": mx.array(codes),
            "experts.gate_up_proj_scale_inv": mx.array(scales.reshape(shape)),
            "experts.gate_up_proj_activation_scale": mx.ones((3,)),
        }
        dense = published.expand({"quantization_config": settings}, stored, "float32")
        assert list(dense) == ["experts.gate_up_proj"]
        np.testing.assert_array_equal(np.array(dense["experts.gate_up_proj"]), values)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop(f"{Q}_scale_inv"), r"no scales that say what they mean: .*q_proj\.weight"),
        (lambda t: t.pop(Q), r"q_proj\.weight_scale_inv has no .*q_proj\.weight of one byte"),
        (lambda t: t.update({Q: ("F32", mx.zeros((64, 32)))}), "has no .* of one byte"),
        (lambda t: t.update({f"{Q}_scale_inv": ("F32", mx.ones((2, 2)))}), "does not fit"),
        (lambda t: t.update({f"{Q}_scale_inv": ("F32", mx.full((4, 2), float("nan")))}),
         r"no finite numbers: .*q_proj\.weight_scale_inv"),
        (lambda t: t.update({f"{Q}_scale_inv": ("F8_E8M0", mx.full((4, 2), 255, mx.uint8))}),
         r"no finite numbers: .*q_proj\.weight_scale_inv"),
        (lambda t: t.update({"model.norm.k_scale": ("F32", mx.ones((1,)))}), "unknown: .*k_scale"),
    ],
)  # fmt: skip
def test_fp8_with_wrong_parts(
    edit: Callable[[Tensors], object], match: str, tmp_path: Path
) -> None:
    shipped.ship_fp8(golden.family_folder("qwen3"), tmp_path, (16, 16))
    refuse(change(tmp_path, edit), ParamsError, match)


@pytest.mark.parametrize("block", [[0, 16], [16], "16", [16, -1], [True, True]])
def test_fp8_with_wrong_blocks(block: Any, tmp_path: Path) -> None:
    shipped.ship_fp8(golden.family_folder("qwen3"), tmp_path, (16, 16))
    config = load_json(tmp_path / "config.json")
    config["quantization_config"]["weight_block_size"] = block
    shipped.write_config(tmp_path, config)
    refuse(tmp_path, ParamsError, "fp8 weights and scales do not fit: .*in blocks")


# --- others --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["awq", "gptq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "modelopt", "quark", 8],
)
@pytest.mark.parametrize("inside", [False, True])
def test_other_methods_are_refused_by_name(method: Any, inside: bool, tmp_path: Path) -> None:
    config = {**load_json(golden.family_folder("qwen3") / "config.json")}
    settings = {"quantization_config": {"quant_method": method, "bits": 4}}
    if inside:
        config = {"model_type": "llava", "text_config": {**config, **settings}}
    shipped.write_config(tmp_path, config if inside else {**config, **settings})
    refuse(tmp_path, ConfigError, f"quantized with {method!r} .*one of fp8, mxfp4")


@pytest.mark.parametrize("settings", ["awq", 4, ["fp8"]])
def test_settings_that_are_none(settings: Any, tmp_path: Path) -> None:
    config = load_json(golden.family_folder("qwen3") / "config.json")
    shipped.write_config(tmp_path, {**config, "quantization_config": settings})
    refuse(tmp_path, ConfigError, "quantization_config: expected settings")


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_of_mlx_that_are_no_numbers(part: str, value: float, tmp_path: Path) -> None:
    folder = golden.family_folder("qwen3")
    arrays = load_arrays(folder / WEIGHTS)
    packed = quantize(
        {name: array for name, array in arrays.items() if name.endswith("_proj.weight")}
    )
    arrays |= packed
    name = f"{Q.removesuffix('.weight')}.{part}"
    arrays[name] = mx.where(mx.arange(64)[:, None] == 3, value, arrays[name])
    shipped.write_config(tmp_path, load_json(folder / "config.json"))
    mx.eval(arrays)
    mx.save_safetensors(str(tmp_path / WEIGHTS), arrays)
    refuse(tmp_path, ParamsError, f"no finite numbers: .*q_proj\\.{part};")
