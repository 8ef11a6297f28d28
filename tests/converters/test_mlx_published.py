"""What mlx-lm publishes, of every family: read without loss, and its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import converters
from converters import mlx_names
from funcrt import params as weights
from funcrt.errors import ParamsError
from funcrt.model import Model
from funcrt.models import FAMILIES
from funcrt.packing import MICROSCALED
from funcrt.storage import load_arrays, load_json
from tests.converters import mlx_published
from tests.families.cases import run_plain
from tests.families.reasons import REASONS
from tests.helpers import TOLERANCE, relative_error
from tests.random_families import some_tokens
from tests.reference import golden

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

# mlx-lm has no module that reads these; from the first, it leaves out tensors that choose experts.
UNREAD = {"ernie4_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "youtu"}


def model_type_of(case: str) -> str:
    return str(load_json(golden.family_folder(case) / "config.json")["model_type"])


CASES = [
    case for case in golden.family_cases() if case not in UNREAD and model_type_of(case) in FAMILIES
]
ONE_ADDED = ("qwen3_next", "qwen3_5")
MODES: dict[str, dict[str, Any]] = {
    "affine": {"bits": 4, "group_size": 32},
    **{name: how._asdict() for name, how in MICROSCALED.items()},
}
# mlx-lm's ropes have these under another key; what is made of its modules here reads it.
THROUGH_US = ("mistral-new",)


def override(path: str, _: Any) -> bool | dict[str, Any]:
    """Embeddings otherwise, since mlx-lm rounds those of a mode without biases to bfloat16."""
    if path.endswith(("embed_tokens", "embeddings", "wte", "wpe", "embed_in")):
        return {"bits": 8, "group_size": 32}
    return not path.endswith(("layers.1.mlp.down_proj", "layers.0.self_attn.o_proj"))


@pytest.mark.parametrize("case", CASES)
def test_dense_tensors_are_those_of_the_original(case: str, tmp_path: Path) -> None:
    source = mlx_published.source_of(case, tmp_path / "source")
    mlx_published.make(case, source, tmp_path / "mlx")
    ours, original = converters.load(tmp_path / "mlx"), converters.load(source)
    assert list(ours.params) == list(original.params)
    assert ours.config == original.config
    for name, array in original.params.items():
        found = ours.params[name]
        if found.dtype != array.dtype:  # a norm to which mlx-lm added 1, and rounded
            assert case.startswith(ONE_ADDED)
            assert found.dtype == mx.float32
            assert mx.array_equal((found + 1).astype(array.dtype), array + 1), name
        else:
            assert mx.array_equal(found, array), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_packed_tensors_stay_packed_and_mean_the_same(case: str, mode: str, tmp_path: Path) -> None:
    source = mlx_published.source_of(case, tmp_path / "source")
    module = mlx_published.make(
        case, source, tmp_path / "mlx", packing=MODES[mode], predicate=override
    )
    model = converters.load(tmp_path / "mlx")
    packed = weights.packings(model.spec, model.params)
    shipped = {"mxfp4"} if case == "gpt_oss" else set()
    assert {how.mode for how in packed.values()} == {"affine", mode} | shipped
    _assert_means(model, mlx_names.restore(model.config, mlx_published.expanded(module)))
    if (case, "mlx_lm") not in REASONS:
        _assert_logits(case, module, tmp_path / "mlx")


def _assert_means(model: Model, expected: weights.Params) -> None:
    """Expanded here, bit for bit what MLX expands."""
    preparation = weights.Preparation("float32", dequantize=True, fusions={})
    dense = weights.prepare(model.params, model.spec, preparation)
    assert dense.keys() <= expected.keys()  # tied heads, tensors that nothing reads
    for name, array in dense.items():
        assert mx.array_equal(array, expected[name].astype(mx.float32)), name


def _assert_logits(case: str, module: Any, folder: Path) -> None:
    tokens = some_tokens(540 if "longrope" in case else 40)  # long texts turn otherwise
    ours = run_plain(converters.load(folder, dtype="float32"), tokens)
    if case in THROUGH_US:
        theirs = run_plain(converters.load(folder, dtype="float32", via="mlx_lm"), tokens)
    else:
        module.set_dtype(mx.float32)
        theirs = module(mx.array([tokens]))[0]
    assert relative_error(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe", "gpt2"])
def test_every_number_of_bits(case: str, bits: int, tmp_path: Path) -> None:
    packing = {"bits": bits, "group_size": 32}
    source = golden.family_folder(case)
    module = mlx_published.make(case, source, tmp_path, packing=packing, predicate=lambda *_: True)
    model = converters.load(tmp_path)
    assert set(weights.packings(model.spec, model.params).values()) == {(bits, 32, "affine")}
    _assert_logits(case, module, tmp_path)


@pytest.mark.parametrize("recipe", ["mixed_2_6", "mixed_3_4"])
@pytest.mark.parametrize("case", ["qwen3", "mixtral"])
def test_recipes(case: str, recipe: str, tmp_path: Path) -> None:
    packing = {"bits": 4, "group_size": 32}
    source = golden.family_folder(case)
    module = mlx_published.make(case, source, tmp_path, packing=packing, predicate=recipe)
    model = converters.load(tmp_path)
    assert len(set(weights.packings(model.spec, model.params).values())) == 2
    _assert_logits(case, module, tmp_path)


def test_stacks_of_another_number_of_experts(tmp_path: Path) -> None:
    mlx_published.make("qwen3_moe", golden.family_folder("qwen3_moe"), tmp_path)
    path = str(tmp_path / "model.safetensors")
    arrays = load_arrays(Path(path))
    name = next(key for key in arrays if "switch_mlp.up_proj" in key)
    arrays[name] = mx.concatenate([arrays[name]] * 2)
    mx.eval(arrays)
    mx.save_safetensors(path, arrays)
    with pytest.raises(ParamsError, match=r"switch_mlp\.up_proj\.weight: expected 6 matrices, got"):
        converters.load(tmp_path)


def test_gates_and_ups_of_one_tensor_that_are_packed_apart(tmp_path: Path) -> None:
    source = mlx_published.source_of("gpt_oss", tmp_path / "source")
    mlx_published.make("gpt_oss", source, tmp_path / "mlx")
    path = tmp_path / "mlx" / "model.safetensors"
    arrays = load_arrays(path)
    for key in [key for key in arrays if key.endswith("experts.up_proj.weight")]:
        arrays[key] = arrays[key][..., ::2]
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays)
    with pytest.raises(ParamsError, match=r"experts\.gate_proj and its up_proj .* packed diff"):
        converters.load(tmp_path / "mlx")
