"""Converting tensor by tensor: what is written, what the report says, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import converters
from converters.convert import (
    Recipe,
    Report,
    Rule,
    TensorReport,
    convert,
    load_rules,
    make_quantization,
)
from converters.convert.perplexity import measure_perplexity
from funcrt import params as weights
from funcrt.errors import (
    ConfigError,
    FuncrtError,
    InputError,
    ParamsError,
    PublishError,
    SourceError,
)
from funcrt.model import Model
from funcrt.models import FAMILIES
from funcrt.packing import PARTS, Quantization, Transposed
from funcrt.storage import load_arrays, load_json
from tests.converters import mlx_published
from tests.converters.conftest import Tiny
from tests.families.cases import run_plain
from tests.families.reasons import REASONS
from tests.helpers import TINY, TOLERANCE, make_model, make_params, relative_error
from tests.random_families import some_tokens
from tests.reference import golden

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

# mlx-lm rounds embeddings of modes without biases to bfloat16.
EMBEDDINGS = tuple(
    Rule(f"*{name}", make_quantization(8, 32))
    for name in ("embed_tokens", "embeddings", "wte", "wpe", "embed_in")
)


def model_type_of(case: str) -> str:
    return str(load_json(golden.family_folder(case) / "config.json")["model_type"])


CASES = [case for case in golden.family_cases() if model_type_of(case) in FAMILIES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama in bfloat16."""
    make_model("bfloat16").save(tmp_path / "source")
    return tmp_path / "source"


def packed_by(recipe: Recipe, source: Path, target: Path, **options: Any) -> tuple[Report, Model]:
    report = convert(source, target, recipe=recipe, **options)
    return report, converters.load(target)


# --- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("case", CASES)
def test_every_family_is_packed_as_mx_quantize_does_and_mlx_lm_reads_it(
    case: str, mode: str, tmp_path: Path
) -> None:
    pytest.importorskip("mlx_lm")
    source = mlx_published.source_of(case, tmp_path / "source")
    packing = make_quantization(4, 32) if mode == "affine" else make_quantization(mode=mode)
    known = [rule for rule in EMBEDDINGS if _matches(rule, source)]
    recipe = Recipe(tuple(known), packing)
    report, model = packed_by(recipe, source, tmp_path / "out", dtype="float32")
    loaded = converters.load(source, "float32")
    original, stored = loaded.in_float32(), weights.packings(loaded.spec, loaded.params)
    found = weights.packings(model.spec, model.params)
    assert {how.mode for how in found.values()} >= {mode}
    for base, how in found.items():
        if stored.get(base) != how:
            _assert_packed_by_mlx(original, model, base, how)
    for name, array in original.params.items():
        if name.removesuffix(".weight") not in found:
            assert mx.array_equal(model.params[name], array), name
    assert report.nbytes == sum(array.nbytes for array in model.params.values())
    if (case, "mlx_lm") not in REASONS:
        _assert_logits_of_mlx_lm(case, source, tmp_path / "out")


def _matches(rule: Rule, source: Path) -> bool:
    return any(rule.matches(name) for name in _matrices(converters.load(source, lazy=True)))


def _matrices(model: Model) -> list[str]:
    return [name.removesuffix(".weight") for name, shape in model.spec.items() if len(shape) > 1]


def _assert_packed_by_mlx(original: Model, model: Model, base: str, how: Quantization) -> None:
    name = f"{base}.weight" if f"{base}.weight" in original.params else base
    matrix = original.params[name]
    if isinstance(original.spec[name], Transposed):
        matrix = matrix.swapaxes(-1, -2)
    bits, group_size, mode = how
    arrays = mx.quantize(matrix, group_size=group_size, bits=bits, mode=mode)
    for part, array in zip(PARTS, arrays, strict=False):
        assert mx.array_equal(model.params[f"{base}.{part}"], array), (base, part)


def _assert_logits_of_mlx_lm(case: str, source: Path, folder: Path) -> None:
    from mlx_lm.utils import load_model

    patch = mlx_published.patch_of(load_json(source / "config.json"))
    with contextlib.redirect_stdout(None):
        module, _ = load_model(folder, lazy=True, model_config=patch)
    module.set_dtype(mx.float32)
    tokens = some_tokens(540 if "longrope" in case else 40)
    if case == "mistral-new":  # another key of ropes, which what is made of its modules here reads
        theirs = run_plain(converters.load(folder, "float32", via="mlx_lm"), tokens)
    else:
        theirs = module(mx.array([tokens]))[0]
    assert (
        relative_error(run_plain(converters.load(folder, "float32"), tokens), theirs) <= TOLERANCE
    )


@pytest.mark.parametrize("case", ["qwen3", "qwen3_next", "gpt2", "gpt_oss", "mixtral"])
def test_dense_tensors_stay_what_they_are(case: str, tmp_path: Path) -> None:
    source = golden.family_folder(case)
    report, model = packed_by(Recipe(), source, tmp_path / "out")
    original = converters.load(source)
    assert model.config == original.config
    assert report.relative_error == 0.0
    assert not report.changed
    for name, array in original.params.items():
        assert model.params[name].dtype == array.dtype
        assert mx.array_equal(model.params[name], array)


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe", "gpt2"])
def test_packed_tensors_are_kept_expanded_or_packed_again(case: str, tmp_path: Path) -> None:
    four, eight = make_quantization(4, 32), make_quantization(8, 32)
    _, packed = packed_by(Recipe(otherwise=four), golden.family_folder(case), tmp_path / "four")
    kept, again = packed_by(Recipe(otherwise=four), tmp_path / "four", tmp_path / "again")
    assert not kept.changed
    assert packed.params.keys() == again.params.keys()
    for name, array in packed.params.items():
        assert mx.array_equal(again.params[name], array)
    report, dense = packed_by(
        Recipe(otherwise="dense"), tmp_path / "four", tmp_path / "dense", dtype="float32"
    )
    assert not weights.packings(dense.spec, dense.params)
    expected = packed.in_float32()
    for name, array in expected.params.items():
        assert mx.array_equal(dense.params[name], array)
    assert report.relative_error < 1e-6
    assert "quantization" not in load_json(tmp_path / "dense" / "config.json")
    report, model = packed_by(
        Recipe(otherwise=eight), tmp_path / "four", tmp_path / "eight", dtype="float32"
    )
    for base, how in weights.packings(model.spec, model.params).items():
        assert how == eight
        _assert_packed_by_mlx(dense, model, base, how)
    assert 0 < report.relative_error < 0.01


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.Q4_0, Kind.F16])
def test_rows_of_a_gguf_file_are_those_of_the_file(tiny: Tiny, kind: Kind) -> None:
    tiny.change(hidden_size=256, intermediate_size=256, head_dim=64)
    del tiny.weights["lm_head.weight"]
    path = tiny.gguf(kind if kind is not Kind.Q6_K else Kind.F16, _add_output(kind))
    expected = converters.load(path)
    report, model = packed_by(Recipe(), path, tiny.folder / "out")
    assert model.config == expected.config
    for name, array in expected.params.items():
        assert mx.array_equal(model.params[name], array), name
    assert not report.changed
    four = make_quantization(4, 64)
    _, model = packed_by(Recipe(otherwise=four), path, tiny.folder / "out", dtype="float32")
    original = Model(expected.config, expected.in_float32().params)
    for base, how in weights.packings(model.spec, model.params).items():
        assert how == four
        _assert_packed_by_mlx(original, model, base, how)


SOURCES = [
    *sorted((golden.FAMILIES.parent / "gguf").glob("*.gguf")),
    *sorted(path.parent for path in (golden.FAMILIES.parent / "published").glob("*/config.json")),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_whatever_is_read_is_kept_as_it_is_loaded(source: Path, tmp_path: Path) -> None:
    try:
        expected = converters.load(source)
    except ConfigError as error:
        pytest.skip(str(error))  # a file of a family that is not here
    report, model = packed_by(Recipe(), source, tmp_path / "out")
    assert report.notes == expected.notes
    assert not report.changed
    assert model.config.to_hf() == expected.config.to_hf()
    assert model.params.keys() == expected.params.keys()
    for name, array in expected.params.items():
        assert model.params[name].dtype == array.dtype
        assert mx.array_equal(model.params[name], array), name


def test_an_adapter_is_fused_first(tmp_path: Path) -> None:
    source = golden.family_folder("mistral")
    adapter = golden.FAMILIES.parent / "adapters" / "mistral-plain"
    expected = converters.load(source, adapter=adapter)
    _, model = packed_by(Recipe(), source, tmp_path / "out", adapter=adapter)
    for name, array in expected.params.items():
        assert mx.array_equal(model.params[name], array), name
    plain = converters.load(source)
    assert any(not mx.array_equal(model.params[n], array) for n, array in plain.params.items())


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("case", ["mistral", "gpt_oss"])
def test_sums_of_packed_matrices_and_an_adapter_are_packed_once(
    case: str, mode: str, tmp_path: Path
) -> None:
    packing = make_quantization(4, 32) if mode == "affine" else make_quantization(mode=mode)
    source, out, eight = tmp_path / "packed", tmp_path / "out", make_quantization(8, 32)
    convert(golden.family_folder(case), source, recipe=Recipe(otherwise=packing), dtype="float32")
    base = converters.load(source)
    name = "model.layers.0.self_attn.q_proj"
    change = _write_adapter(tmp_path / "adapter", name, base)
    total = base.in_float32().params[f"{name}.weight"] + change
    report, model = packed_by(Recipe(otherwise="dense"), source, out, adapter=tmp_path / "adapter")
    found = model.params[f"{name}.weight"]
    assert found.dtype == mx.float32
    assert relative_error(found, total) < 1e-6
    assert not report.changed
    for target, how in ((eight, eight), ("keep", packing)):
        report, model = packed_by(
            Recipe(otherwise=target), source, out, adapter=tmp_path / "adapter"
        )
        assert weights.packings(model.spec, model.params)[name] == how
        arrays = mx.quantize(total, group_size=32, bits=how.bits, mode=how.mode)
        assert mx.array_equal(model.params[f"{name}.weight"], arrays[0])
        assert named(report, name).relative_error > 0
        assert (
            weights.packings(model.spec, model.params).keys()
            == weights.packings(base.spec, base.params).keys()
        )


def _write_adapter(folder: Path, name: str, base: Model) -> mx.array:
    """One of PEFT's with a change of one matrix, which is returned."""
    outputs, inputs = base.spec[f"{name}.weight"]
    a, b = mx.random.normal((2, inputs), key=mx.random.key(0)), mx.ones((outputs, 2)) / 8
    folder.mkdir()
    mx.save_safetensors(
        str(folder / "adapter_model.safetensors"),
        {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b},
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return b @ a


def _add_output(kind: Kind) -> Any:
    rng = np.random.default_rng(0)
    if kind is not Kind.Q6_K:  # which gguf cannot quantize to
        return lambda writer: writer.add_tensor("output.weight", rng.random((96, 256), np.float32))
    blocks = rng.integers(0, 256, (96, 210), dtype=np.uint8)
    blocks[:, 208:] = np.full((96, 1), 0.01, np.float16).view(np.uint8)
    return lambda writer: writer.add_tensor("output.weight", blocks, raw_dtype=kind)


def test_shards_and_their_index(folder: Path, tmp_path: Path) -> None:
    report = convert(folder, tmp_path / "out", shard_bytes=30_000)
    index = load_json(tmp_path / "out" / "model.safetensors.index.json")
    names = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(names) == report.files > 2
    assert set(index["weight_map"].values()) == names
    assert index["metadata"]["total_size"] == report.nbytes
    for name in names:
        content = sum(array.nbytes for array in load_arrays(tmp_path / "out" / name).values())
        assert content <= 30_000
    expected = converters.load(folder)
    for name, array in converters.load(tmp_path / "out").params.items():
        assert mx.array_equal(array, expected.params[name])
    convert(folder, tmp_path / "out")  # replaces it, as it is ours
    assert {path.name for path in (tmp_path / "out").glob("model*")} == {"model.safetensors"}


def test_every_tensor_is_aligned(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe((Rule("*.v_proj", make_quantization(mode="mxfp4")),), make_quantization(4, 32))
    convert(folder, tmp_path / "out", recipe=recipe)
    with (tmp_path / "out" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    sizes = {"BF16": 2, "U32": 4, "U8": 1}
    assert start % 8 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % sizes[entry["dtype"]] == 0


def test_a_module_of_mlx_lm_without_a_family(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    from mlx_lm.models import qwen

    args = qwen.ModelArgs(
        model_type="qwen", hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
        kv_channels=16, intermediate_size=128, vocab_size=96,
    )  # fmt: skip
    module = qwen.Model(args)
    from mlx.utils import tree_flatten

    arrays = {name: array.astype(mx.float16) for name, array in tree_flatten(module.parameters())}
    (tmp_path / "source").mkdir()
    mx.save_safetensors(str(tmp_path / "source" / "model.safetensors"), arrays)
    (tmp_path / "source" / "config.json").write_text(json.dumps(vars(args)))
    report, model = packed_by(
        Recipe(otherwise=make_quantization(4, 32)), tmp_path / "source", tmp_path / "out"
    )
    assert {t.written for t in report.changed} == {"affine 4/32"}
    name = "transformer.h.0.attn.c_attn"
    parts = mx.quantize(arrays[f"{name}.weight"], group_size=32, bits=4)
    for part, array in zip(PARTS, parts, strict=True):
        stored = load_arrays(tmp_path / "out" / "model.safetensors")[f"{name}.{part}"]
        assert mx.array_equal(stored, array)
    assert model.params[f"{name}.scales"].shape == parts[1].shape


# --- the report ----------------------------------------------------------------------------------


def errors_of(matrix: mx.array, packing: Quantization) -> tuple[float, float]:
    """Relative Frobenius error and largest error of `mx.quantize` itself, in float64."""
    arrays = mx.quantize(matrix, group_size=packing[1], bits=packing[0], mode=packing[2])
    back = mx.dequantize(
        *arrays, group_size=packing[1], bits=packing[0], mode=packing[2], dtype=mx.float32
    )
    before, after = (np.array(array, np.float64) for array in (matrix, back))
    error = np.linalg.norm(after - before) / np.linalg.norm(before)
    return float(error), float(np.abs(after - before).max())


@pytest.mark.parametrize("packing", [make_quantization(b, 32) for b in (2, 3, 4, 5, 6, 8)])
def test_errors_are_those_of_mx_quantize_on_the_same_matrix(
    packing: Quantization, tmp_path: Path
) -> None:
    make_model("float32").save(tmp_path / "source")
    report, _ = packed_by(Recipe(otherwise=packing), tmp_path / "source", tmp_path / "out")
    params = make_params(TINY)
    assert len(report.changed) == 1 + 7 * TINY.num_layers + 1
    squares = total = 0.0
    for tensor in report.tensors:
        array = params.get(f"{tensor.name}.weight")
        assert array is not None
        norm = float(np.linalg.norm(np.array(array, np.float64)))
        total += norm**2
        if array.ndim == 1:
            assert (tensor.relative_error, tensor.written) == (0.0, "float32")
            continue
        relative, largest = errors_of(array, packing)
        assert tensor.relative_error == pytest.approx(relative, rel=1e-5)
        assert tensor.max_error == pytest.approx(largest, rel=1e-5)
        assert tensor.bits_per_weight == packing.bits + 2.0  # float32 scale and bias for 32
        squares += (relative * norm) ** 2
    assert report.relative_error == pytest.approx(math.sqrt(squares / total), rel=1e-5)
    listed = [tensor.relative_error for tensor in report.changed]
    assert listed == sorted(listed, reverse=True)


def test_errors_of_16_bit_and_casts(folder: Path, tmp_path: Path) -> None:
    params = make_params(TINY, "bfloat16")
    report = convert(folder, tmp_path / "out", recipe=Recipe(otherwise=make_quantization(4, 32)))
    tensor = named(report, "model.layers.0.mlp.up_proj")
    matrix = params["model.layers.0.mlp.up_proj.weight"]
    weight, scales, biases = mx.quantize(matrix, group_size=32, bits=4)
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    back = mx.dequantize(weight, scales, biases, group_size=32, bits=4)
    assert tensor.max_error == mx.abs(back - matrix.astype(mx.float32)).max().item()
    make_model("float32").save(tmp_path / "wide")
    cast = convert(tmp_path / "wide", tmp_path / "narrow", dtype="bfloat16")
    assert {tensor.written for tensor in cast.tensors} == {"bfloat16"}
    assert 1e-4 < cast.relative_error < 4e-3


def named(report: Report, name: str) -> TensorReport:
    return next(tensor for tensor in report.tensors if tensor.name == name)


def test_matrices_that_groups_do_not_divide_stay(folder: Path, tmp_path: Path) -> None:
    report, model = packed_by(Recipe(otherwise=make_quantization(4, 64)), folder, tmp_path / "out")
    down = named(report, "model.layers.0.mlp.down_proj")  # 96 columns
    assert down.note == "96 columns are no multiple of the group size 64"
    assert (down.written, down.relative_error) == ("bfloat16", 0.0)
    assert named(report, "model.layers.0.mlp.up_proj").note == ""
    assert f"{down.name}.scales" not in model.params


def test_routers_stay_dense_unless_a_rule_says_otherwise(tmp_path: Path) -> None:
    source = golden.family_folder("qwen3_moe")
    report = convert(source, tmp_path / "out", recipe=Recipe(otherwise=make_quantization(4, 32)))
    assert named(report, "model.layers.1.mlp.gate").written == "bfloat16"
    assert named(report, "model.layers.1.mlp.switch_mlp.up_proj").written == "affine 4/32"


# --- recipes -------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_decides(folder: Path, tmp_path: Path) -> None:
    rules = (
        Rule("model.layers.0.*.down_proj", make_quantization(8, 32)),
        Rule("*.down_proj.weight", make_quantization(mode="mxfp4")),
        Rule("lm_head", "keep"),
    )
    report, model = packed_by(Recipe(rules, make_quantization(4, 64)), folder, tmp_path / "out")
    written = {tensor.name: tensor.written for tensor in report.tensors}
    assert written["model.layers.0.mlp.down_proj"] == "affine 8/32"
    assert written["model.layers.1.mlp.down_proj"] == "mxfp4 4/32"
    assert written["lm_head"] == "bfloat16"
    assert written["model.embed_tokens"] == "affine 4/64"
    settings = load_json(tmp_path / "out" / "config.json")["quantization"]
    assert settings == {
        "bits": 4, "group_size": 64, "mode": "affine",
        "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32, "mode": "affine"},
        "model.layers.1.mlp.down_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    }  # fmt: skip
    assert weights.packings(model.spec, model.params)["model.layers.1.mlp.down_proj"] == (
        4, 32, "mxfp4",
    )  # fmt: skip


def test_rules_that_decide_nothing_are_refused(folder: Path, tmp_path: Path) -> None:
    four = make_quantization(4, 32)
    with pytest.raises(InputError, match=r"rule 2 .* matches no matrix: '\*\.downproj'; .*lm_head"):
        convert(
            folder, tmp_path / "out", recipe=Recipe((Rule("*", four), Rule("*.downproj", four)))
        )
    with pytest.raises(InputError, match=r"rule 2 .* decides nothing: earlier rules"):
        convert(folder, tmp_path / "out", recipe=Recipe((Rule("*", four), Rule("lm_head", "keep"))))
    with pytest.raises(InputError, match=r"'\*norm\*'"):
        convert(folder, tmp_path / "out", recipe=Recipe((Rule("*norm*", four),)))
    assert not (tmp_path / "out").exists()


def test_experts_of_one_stack_are_packed_alike(tmp_path: Path) -> None:
    rules = (Rule("model.layers.1.mlp.experts.1.*", make_quantization(8, 32)),)
    with pytest.raises(InputError, match=r"switch_mlp\.gate_proj differently; they are one stack"):
        convert(
            golden.family_folder("qwen3_moe"), tmp_path / "out",
            recipe=Recipe(rules, make_quantization(4, 32)),
        )  # fmt: skip


def test_recipes_in_files(tmp_path: Path) -> None:
    expected = (
        Rule("*.down_proj", Quantization(6, 64, "affine")),
        Rule("a", Quantization(8, 32, "mxfp8")),
        Rule("b", "keep"),
        Rule("c", "dense"),
    )
    rules = [
        {"match": "*.down_proj", "bits": 6}, {"match": "a", "mode": "mxfp8"},
        {"match": "b", "keep": True}, {"match": "c", "dense": True},
    ]  # fmt: skip
    path = tmp_path / "recipe.json"
    for data in (rules, {"rules": rules}):
        path.write_text(json.dumps(data))
        assert load_rules(path) == expected
    if sys.version_info >= (3, 11):
        toml = tmp_path / "recipe.toml"
        toml.write_text(
            '[[rules]]\nmatch = "*.down_proj"\nbits = 6\n[[rules]]\nmatch = "a"\nmode = "mxfp8"\n'
            '[[rules]]\nmatch = "b"\nkeep = true\n[[rules]]\nmatch = "c"\ndense = true\n'
        )
        assert load_rules(toml) == expected
        toml.write_text("[[rules]")
        with pytest.raises(InputError, match="is not TOML"):
            load_rules(toml)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("", "is not JSON"),
        ("3", "expected a list of rules"),
        ('{"rules": [], "x": 1}', "expected a list of rules"),
        ("[3]", "rule 1: expected an object with 'match'"),
        ('[{"match": "a", "bits": 4}, {"bits": 4}]', "rule 2: expected an object with 'match'"),
        ('[{"match": "a", "bit": 4}]', "unknown key 'bit'; known: bits, dense"),
        ('[{"match": "a"}]', "expected one of: bits"),
        ('[{"match": "a", "bits": 4, "keep": true}]', "expected one of: bits"),
        ('[{"match": "a", "keep": false}]', "expected one of: bits"),
        ('[{"match": "a", "bits": 7}]', "rule 1: bits: affine packs with 2, 3, 4, 5, 6, 8, got 7"),
        ('[{"match": "a", "bits": true}]', "got True"),
        ('[{"match": "a", "mode": "q4"}]', "mode: expected one of affine, mxfp4"),
        ('[{"match": "a", "mode": "mxfp4", "group_size": 64}]', "mxfp4 packs with 32, got 64"),
    ],
)
def test_bad_recipes(data: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(data)
    with pytest.raises(InputError, match=match):
        load_rules(tmp_path / "recipe.json")


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the recipe .*none\.json"):
        load_rules(tmp_path / "none.json")


# --- perplexity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 7, 16, 17, 24, 61])
def test_perplexity_is_what_its_definition_says(count: int) -> None:
    model, width = make_model(), 16
    ids = np.random.default_rng(count).integers(0, 96, count).tolist()
    width = min(width, count)
    losses: dict[int, float] = {}
    for start in [*range(0, count - width, width // 2), count - width]:
        logits = np.array(model([ids[start : start + width]])[0][0], np.float64)
        for place in range(1, width):
            row = logits[place - 1]
            loss = np.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[start + place]]
            losses.setdefault(start + place, float(loss))
    assert sorted(losses) == list(range(1, count))
    found = measure_perplexity(model, ids, window=16)
    assert found.value == pytest.approx(math.exp(np.mean(list(losses.values()))), rel=1e-5)
    assert (found.tokens, found.window, found.dtype) == (count - 1, width, "float32")


# --- what goes wrong -----------------------------------------------------------------------------


def refuse(error: type[FuncrtError], match: str, target: Path, **options: Any) -> None:
    """Converting fails, and leaves nothing behind."""
    before = sorted(target.parent.iterdir())
    with pytest.raises(error, match=match):
        convert(target=target, **options)
    assert sorted(target.parent.iterdir()) == before


def test_places_that_are_refused(folder: Path, tmp_path: Path) -> None:
    refuse(PublishError, "both source and target", folder, source=folder)
    inside = tmp_path / "whole" / "inside"
    shutil.copytree(folder, inside)
    refuse(PublishError, "lies in", tmp_path / "whole", source=inside)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").touch()
    refuse(PublishError, "is not replaced", other, source=folder)
    refuse(PublishError, "is a file or a link", other / "mine.txt", source=folder)
    assert sorted(other.iterdir()) == [other / "mine.txt"]


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    params = make_params(TINY)
    name = "model.layers.1.mlp.up_proj.weight"
    params[name] = mx.where(mx.arange(64) == 3, float("nan"), params[name])
    Model(TINY, params).save(tmp_path / "source")
    four = Recipe(otherwise=make_quantization(4, 32))
    refuse(
        ParamsError, f"{name} holds values that are no finite numbers", tmp_path / "out",
        source=tmp_path / "source", recipe=four,
    )  # fmt: skip
    params[name] = mx.full(params[name].shape, 1e30)
    Model(TINY, params).save(tmp_path / "source")
    refuse(
        ParamsError, "no finite numbers in float16", tmp_path / "out",
        source=tmp_path / "source", dtype="float16",
    )  # fmt: skip


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    model = make_model("affine")
    name = "model.layers.0.mlp.up_proj.scales"
    model.params[name] = mx.full(model.params[name].shape, float("inf"))
    model.save(tmp_path / "source")
    refuse(ParamsError, name, tmp_path / "out", source=tmp_path / "source")


def test_a_truncated_source(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refuse(SourceError, "truncated", tmp_path / "out", source=folder)


def test_a_source_that_is_cut_while_it_is_read(folder: Path, tmp_path: Path) -> None:
    def cut(done: int, total: int, item: str) -> None:
        os.truncate(folder / "model.safetensors", 30_000)

    refuse(SourceError, "cannot convert to", tmp_path / "out", source=folder, tick=cut)


def test_interrupts_leave_nothing_and_the_old_folder_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    convert(folder, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def tick(done: int, total: int, item: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out", dtype="float32", tick=tick)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_progress_counts_bytes(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    report = convert(folder, tmp_path / "out", tick=lambda *state: seen.append(state))
    assert seen[0] == (0, report.nbytes, "model.embed_tokens")
    assert seen[-1] == (report.nbytes, report.nbytes, "")
    assert len(seen) > len(report.tensors)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {total for _, total, _ in seen} == {report.nbytes}


def test_no_room_is_told_before(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refuse(PublishError, r"needs .* MB, but only 0\.0 MB are free", tmp_path / "out", source=folder)


def test_a_disk_that_fills_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    refuse(SourceError, "the disk is full, it needs", tmp_path / "out", source=folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refuse(SourceError, "cannot convert to", locked / "out", source=folder)


# --- memory --------------------------------------------------------------------------------------

_MEASURE = """
import resource, sys
import converters
from converters.convert import convert, Recipe, make_quantization
import mlx.core as mx
mx.eval(mx.quantize(mx.ones((64, 64))))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], recipe=Recipe(otherwise=make_quantization(4, 64)))
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_is_that_of_the_largest_tensor(tmp_path: Path) -> None:
    config = replace(
        TINY, vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_layers=20,
        tie_word_embeddings=True,
    )  # fmt: skip
    spec = FAMILIES["llama"].param_spec(config)
    params = {name: mx.ones(shape, dtype=mx.bfloat16) for name, shape in spec.items()}
    Model(config, params).save(tmp_path / "source")
    sizes = [array.nbytes for array in params.values()]
    del params
    arguments = [sys.executable, "-c", _MEASURE, str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    before, after = (int(number) * unit for number in done.stdout.split())
    assert after - before < 1.3 * max(sizes) + (256 << 20) < 0.7 * sum(sizes)
