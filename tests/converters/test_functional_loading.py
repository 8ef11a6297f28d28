"""Checkpoints through mlx-lm's modules, what a config alone tells, and where mlx-lm is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import converters
import funcrt
import tests.mlx_lm_extra  # noqa: F401 (skips without mlx-lm)
from converters.functional import loading, mlx_lm_source
from converters.functional.doctor import diagnose
from converters.functional.model import FunctionalModel
from funcrt import masks
from funcrt.buckets import BucketPlan
from funcrt.errors import ConfigError, ParamsError, SourceError
from funcrt.flat import flatten
from funcrt.models import FAMILIES
from funcrt.packing import MICROSCALED
from tests.helpers import relative_error, to_numpy
from tests.reference.make_mlx_lm_modules import load_table, passed
from tests.reference.mlx_lm_checks import make_module, run_model, run_module, tokens_of
from tests.reference.mlx_lm_configs import make_config

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_lm.utils import load_model
from typer.testing import CliRunner

TOLERANCE = 2e-5
ROW = tokens_of(0, 26)
INSTALLED = metadata.version("mlx-lm")
WITHOUT = "helium"  # a module of mlx-lm without a family here
PLAIN = {"llama": {"layer_types": None, "sliding_window": None}}  # as the family here has it


def save(folder: Path, name: str, **changes: Any) -> tuple[Path, nn.Module]:
    """A tiny checkpoint as mlx-lm writes them."""
    changes = PLAIN.get(name, {}) | changes
    module = make_module(name, **changes)
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(module.parameters())),
        {"format": "mlx"},
    )
    return write_config(folder, name, **changes), module


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    config = make_config(name) | PLAIN.get(name, {}) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_type_without_a_family_goes_through_mlx_lm(tmp_path: Path) -> None:
    assert WITHOUT not in FAMILIES
    folder, module = save(tmp_path / "a", WITHOUT)
    model = converters.load(folder)
    assert isinstance(model, FunctionalModel)
    ours = run_model(model, model.forward, [ROW], [23], False)[0]
    assert relative_error(ours, run_module(module, ROW, 23)) <= TOLERANCE
    assert model.config.model_type == WITHOUT
    assert model.config.dtype == "float32"


def test_both_ways_to_read_a_llama_agree(tmp_path: Path) -> None:
    folder, _ = save(tmp_path / "a", "llama")
    by_hand, through = converters.load(folder), converters.load(folder, via="mlx_lm")
    assert not isinstance(by_hand, FunctionalModel)
    assert isinstance(through, FunctionalModel)
    assert relative_error(by_hand([ROW])[0], through([ROW])[0]) <= TOLERANCE


def test_a_saved_model_is_read_again(tmp_path: Path) -> None:
    folder, _ = save(tmp_path / "a", "gemma2")
    model = converters.load(folder, via="mlx_lm")
    model.save(tmp_path / "b")
    again = converters.load(tmp_path / "b", via="mlx_lm")
    assert relative_error(again([ROW])[0], model([ROW])[0]) == 0
    assert load_model(tmp_path / "b")[1]["model_type"] == "gemma2"


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe", "deepseek_v3"])
def test_quantized_checkpoints(tmp_path: Path, name: str) -> None:
    """Packed as stored; dense as prepared, on a CPU; both are what mlx-lm computes."""
    module = make_module(name)
    nn.quantize(
        module, 32, 4,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
    )  # fmt: skip
    params = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), params, {"format": "mlx"})
    packing = {"group_size": 32, "bits": 4}
    write_config(tmp_path, name, quantization=packing, quantization_config=packing)
    model = converters.load(tmp_path, via="mlx_lm")
    theirs = run_module(module, ROW, 23)
    ours = run_model(model, mx.compile(model.forward), [ROW], [23], False)[0]
    assert relative_error(ours, theirs) <= TOLERANCE
    assert model.params["lm_head.weight"].dtype == mx.uint32
    assert model.prepared["lm_head.weight"].shape == (101, 64)
    assert "lm_head.scales" not in model.prepared
    assert relative_error(model([ROW])[0][0], theirs) <= 1e-4  # products of other roundings
    assert type(module.lm_head) is nn.QuantizedLinear
    assert relative_error(model.in_float32()([ROW])[0][0], theirs) <= 1e-4


PACKINGS: dict[str, dict[str, Any]] = {
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mixed": {
        "group_size": 32, "bits": 4, "lm_head": {"group_size": 32, "bits": 8},
        "model.layers.1.self_attn.q_proj": {"group_size": 64, "bits": 8},
        "model.embed_tokens": False,
    },
}  # fmt: skip


def save_packed(folder: Path, name: str) -> nn.Module:
    """A tiny qwen2 in one of `PACKINGS`."""
    module, packing = make_module("qwen2"), PACKINGS[name]
    nn.quantize(
        module, packing["group_size"], packing["bits"], mode=packing.get("mode", "affine"),
        class_predicate=lambda path, m: packing.get(path, hasattr(m, "to_quantized")),
    )  # fmt: skip
    params = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), params, {"format": "mlx"})
    write_config(folder, "qwen2", quantization=packing)
    return module


@pytest.mark.parametrize("name", PACKINGS)
def test_other_packings(tmp_path: Path, name: str) -> None:
    """Read as mlx-lm reads them; a config alone, as of the hub, tells the same sizes."""
    module = save_packed(tmp_path, name)
    loading.check(tmp_path)
    model = converters.load(tmp_path, via="mlx_lm")
    assert relative_error(model([ROW])[0][0], run_module(module, ROW, 23)) <= 1e-4
    size = sum(array.nbytes for array in model.params.values())
    assert diagnose(tmp_path, via="mlx_lm").params == (len(model.params), size)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe", "deepseek_v3"])
def test_modes_without_biases_are_expanded_and_exported(
    tmp_path: Path, name: str, mode: str
) -> None:
    """MLX itself does not export how it expands them."""
    module, how = make_module(name), MICROSCALED[mode]._asdict()
    nn.quantize(
        module, how["group_size"], how["bits"], mode=mode,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
    )  # fmt: skip
    params = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), params, {"format": "mlx"})
    write_config(tmp_path, name, quantization=how)
    model = converters.load(tmp_path, dtype="float32", via="mlx_lm")
    assert "lm_head.scales" in model.params
    assert "lm_head.scales" not in model.prepared
    expected = mx.dequantize(
        model.params["lm_head.weight"], model.params["lm_head.scales"], None, dtype=mx.float32,
        **how,
    )  # fmt: skip
    assert mx.array_equal(model.prepared["lm_head.weight"], expected)
    tokens, state = mx.array([ROW], dtype=mx.int32), model.init_cache(1, 32)
    mask = masks.causal(mx.ones((1, len(ROW))), state["lengths"], 32)
    arrays = [tokens, mask, *state.values()]
    flat, _, _ = flatten(model.forward, model.prepared, tokens, mask, state)
    path = str(tmp_path / "forward.mlxfn")
    mx.export_function(path, flat, *model.prepared.values(), *arrays)
    exported = mx.import_function(path)(*model.prepared.values(), *arrays)[0]
    assert relative_error(exported, model.in_float32()([ROW])[0]) <= TOLERANCE


RECURRENT = ["mamba", "mamba2", "rwkv7"]  # without any slots


@pytest.mark.parametrize("name", [*RECURRENT, "jamba", "deepseek_v32", "gpt_bigcode"])
def test_doctor_answers(tmp_path: Path, name: str) -> None:
    found = diagnose(write_config(tmp_path, name), via="mlx_lm")
    assert (found.functional, found.exportable, found.reason) == (True, True, "")
    assert found.via == f"mlx_lm.models.{name}"
    assert ("full" in found.caches) == (name not in RECURRENT)


@pytest.mark.long
@pytest.mark.parametrize("name", [row["module"] for row in load_table() if passed(row)])
def test_doctor_answers_for_every_module(tmp_path: Path, name: str) -> None:
    config = make_config(name) | PLAIN.get(name, {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = diagnose(tmp_path, via="mlx_lm")
    assert (found.functional, found.exportable, found.reason) == (True, True, "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(tmp_path: Path, dtype: str) -> None:
    folder, _ = save(tmp_path / "a", WITHOUT)
    model = converters.load(folder, dtype)
    assert model.config.dtype == dtype
    assert model([ROW[:4]])[0].dtype == getattr(mx, dtype)


def test_a_bundle_needs_no_mlx_lm(tmp_path: Path) -> None:
    folder, module = save(tmp_path / "a", "gemma3_text")
    plan = BucketPlan(batch=[1], tokens=[1, 16], capacity=[32])
    funcrt.export(converters.load(folder, via="mlx_lm"), tmp_path / "b.funcrt", plan)
    code = (
        "import sys, funcrt; b = funcrt.load_bundle(sys.argv[1]);"
        f"e = funcrt.Engine(b); print(e.submit({ROW[:14]}, max_tokens=8).result().tokens);"
        "e.close(); print(any(n.split('.')[0] in ('mlx_lm', 'converters') for n in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "b.funcrt")], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    caches, ids, found = make_prompt_cache(module), ROW[:14], []
    for _ in range(8):
        ids = [int(module(mx.array([ids]), cache=caches)[0, -1].argmax().item())]
        found += ids
    assert done.stdout.split("\n")[:2] == [str(found), "False"]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="via"):
        converters.load(tmp_path, via="torch")
    folder, _ = save(tmp_path / "a", WITHOUT)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(SourceError, match="truncated, damaged"):
        converters.load(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "nothing_known"}))
    with pytest.raises(ConfigError, match="nothing_known"):
        converters.load(folder)
    with pytest.raises(ConfigError, match=f"mlx-lm cannot make a '{WITHOUT}' of this checkpoint"):
        mlx_lm_source.make_module({"model_type": WITHOUT})


@pytest.mark.parametrize("via", [None, "mlx_lm"])
def test_a_model_type_that_is_no_name(tmp_path: Path, via: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ["llama"]}))
    with pytest.raises(ConfigError, match="expected a name as model_type"):
        converters.load(tmp_path, via=via)
    assert "expected a name" in diagnose(tmp_path).reason


@pytest.mark.parametrize(
    ("found", "said"), [(None, r"pip install 'funcrt\[mlx-lm\]'"), ("0.31.1", "<0.33.0'")]
)
def test_what_mlx_lm_would_be_needed_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, said: str
) -> None:
    folder = write_config(tmp_path, WITHOUT)

    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(
        ConfigError, match=rf"'{WITHOUT}' is not supported; known: cohere, .*{said}"
    ):
        converters.load(folder)


# --- what a family refuses, and mlx-lm's module reads ---------------------------------------------

WAY = r"mlx-lm's module may know what this family does not, or pass over it: .*via='mlx_lm'"


def test_a_setting_that_a_family_does_not_compute(tmp_path: Path) -> None:
    """Never read in another way in silence: the error names the way, which works."""
    folder, module = save(tmp_path / "a", "minicpm3", v_head_dim_scale=2.0)
    with pytest.raises(ConfigError, match=rf"are unknown: .*v_head_dim_scale.*; {WAY}"):
        converters.load(folder)
    assert "via='mlx_lm'" in diagnose(folder).reason
    model = converters.load(folder, via="mlx_lm")
    assert relative_error(model([ROW])[0][0], run_module(module, ROW, 23)) <= TOLERANCE


@pytest.mark.parametrize("name", PACKINGS)
def test_a_packing_that_a_family_knows(tmp_path: Path, name: str) -> None:
    module = save_packed(tmp_path, name)
    model = converters.load(tmp_path)
    assert not isinstance(model, FunctionalModel)
    assert relative_error(model([ROW])[0][0], run_module(module, ROW, 23)) <= 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
        {"hidden_act": "spiral"},
        {"quantization_config": {"quant_method": "spiral"}},
    ],
)
def test_errors_of_a_family_name_the_other_way(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_config(save(tmp_path / "a", "llama")[0], "llama", **changes)
    with pytest.raises(ConfigError, match=rf"spiral.*; {WAY}"):
        converters.load(folder)


def test_where_the_other_way_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mlx-lm's module would miss the same tensors; and a type without a module has no other way."""
    folder, _ = save(tmp_path / "a", "llama")
    write_config(folder, "llama", num_hidden_layers=5)
    with pytest.raises(ParamsError) as missing:
        converters.load(folder)
    write_config(folder, "llama", model_type="youtu", spiral=1.0)
    with pytest.raises(ConfigError) as unknown:
        converters.load(folder)
    (tmp_path / "packed").mkdir()
    save_packed(tmp_path / "packed", "mxfp4")
    write_config(tmp_path / "packed", "qwen2", num_hidden_layers=5, quantization=PACKINGS["mxfp4"])
    with pytest.raises(ParamsError) as packed:
        converters.load(tmp_path / "packed")
    assert "via='mlx_lm'" not in f"{missing.value}{unknown.value}{packed.value}"
    write_config(folder, "llama", spiral=1.0)

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ConfigError, match=r"pip install 'funcrt\[mlx-lm\]', then .*via='mlx_lm'"):
        converters.load(folder)


# --- funcrt doctor -------------------------------------------------------------------------------


def test_doctor_needs_no_weights(tmp_path: Path) -> None:
    found = diagnose(write_config(tmp_path, "kimi_linear", torch_dtype="bfloat16"))
    assert (found.functional, found.exportable, found.by_token) == (True, True, False)
    assert found.via == "mlx_lm.models.kimi_linear"
    assert found.devices == ("cpu", "cuda", "metal")
    assert set(found.caches) == {"full", "recurrent"}
    assert "GatherMM" in found.notes[0]
    assert diagnose(write_config(tmp_path, "llama")).via == "funcrt.models.llama"
    assert diagnose(tmp_path, via="mlx_lm").via == "mlx_lm.models.llama"
    with pytest.raises(ValueError, match="expected 'mlx_lm' or None, got 'torch'"):
        diagnose(tmp_path, via="torch")
    assert diagnose(write_config(tmp_path, "jamba")).by_token


@pytest.mark.parametrize("via", [None, "mlx_lm"])
def test_doctor_computes_nothing(tmp_path: Path, via: str | None) -> None:
    huge = {"hidden_size": 65536, "intermediate_size": 1 << 18, "num_attention_heads": 512}
    before = mx.get_peak_memory()
    found = diagnose(write_config(tmp_path, "qwen2", torch_dtype="bfloat16", **huge), via)
    assert found.exportable
    assert found.params[1] > 1e11
    assert mx.get_peak_memory() - before < 1e8


def test_doctor_says_why_not(tmp_path: Path) -> None:
    found = diagnose(write_config(tmp_path, "deepseek_v41"))
    assert not found.functional
    assert "LayerCache" in found.reason
    found = diagnose(write_config(tmp_path, "llama", model_type="no_such_model"))
    assert "mlx-lm 0.32.2 has no module of it" in found.reason.replace(INSTALLED, "0.32.2")
    for name in ("cache", "base"):  # modules, but of no model
        assert not diagnose(write_config(tmp_path, "llama", model_type=name)).functional
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SourceError, match="is a file"):
        diagnose(tmp_path / "model.gguf")
    with pytest.raises(SourceError, match=r"no config\.json"):
        diagnose(tmp_path / "nowhere")


def test_doctor_names_primitive_and_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import helium

    original = helium.HeliumMLP.__call__

    def blocked(self: Any, x: mx.array) -> mx.array:
        return original(self, mx.from_fp8(mx.to_fp8(x), x.dtype))

    monkeypatch.setattr(helium.HeliumMLP, "__call__", blocked)
    found = diagnose(write_config(tmp_path, "helium"))
    assert found.functional
    assert not found.exportable
    assert [b.layer for b in found.blockers] == ["model.layers.0.mlp"]
    assert "8-bit floats do not export" in found.reason


def test_the_command(tmp_path: Path) -> None:
    from funcrt.cli.app import app

    folder = str(write_config(tmp_path, WITHOUT))
    done = CliRunner().invoke(app, ["doctor", folder, "--json"])
    assert done.exit_code == 0
    facts = json.loads(done.stdout)
    assert (facts["functional"], facts["exportable"]) == (True, True)
    write_config(tmp_path, "deepseek_v41")
    done = CliRunner().invoke(app, ["doctor", folder])
    assert done.exit_code == 1
    assert "because: layers.0: its cache is a" in done.stdout


def test_what_mlx_lm_prints_is_not_the_answer(tmp_path: Path) -> None:
    """Its olmo ends the process without a package, and says so on stdout."""
    if importlib.util.find_spec("hf_olmo") is not None:
        pytest.skip("ai2-olmo is installed")
    config = {"model_type": "olmo"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = "from funcrt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", str(tmp_path), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip install ai2-olmo" in json.loads(done.stdout)["reason"]


# --- where mlx-lm itself is wrong: the functional form is right ----------------------------------


def test_rope_parameters_are_read(tmp_path: Path) -> None:
    """mlx-lm's llama does not know the key that transformers 5 writes, and takes its default."""
    folder, _ = save(tmp_path / "a", "llama")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (folder / "config.json").write_text(json.dumps(config))
    by_hand = converters.load(folder)([ROW])[0]
    theirs = load_model(folder)[0](mx.array([ROW]))
    assert relative_error(theirs, by_hand) > 0.01
    assert relative_error(converters.load(folder, via="mlx_lm")([ROW])[0], by_hand) <= TOLERANCE


def recurrent_states(module: nn.Module, rows: list[list[int]]) -> list[mx.array]:
    """What mlx-lm's recurrences keep of right-padded rows, told where they end."""
    caches, width = make_prompt_cache(module), max(map(len, rows))
    for cache in caches:
        if hasattr(cache, "lengths"):
            cache.prepare(lengths=[len(row) for row in rows])
    module(mx.array([row + [0] * (width - len(row)) for row in rows]), cache=caches)
    return [c[1] for c in caches if hasattr(c, "lengths")]


@pytest.mark.parametrize(
    ("name", "theirs_is_right"), [("nemotron_h", False), ("granitemoehybrid", True)]
)
def test_padding_stays_out_of_recurrences(name: str, theirs_is_right: bool) -> None:
    """Nemotron-H's module does not tell its recurrence where right-padded rows end.

    GraniteMoeHybrid's does, from mlx-lm 0.32.1 on.
    """
    module = make_module(name)
    rows, width = [ROW[:9], ROW[:23]], 23
    alone = run_module(module, [*rows[0], 7], 9)[-1:]
    together, own = recurrent_states(module, rows), recurrent_states(module, rows[:1])
    worst = max(relative_error(a[:1], b) for a, b in zip(together, own, strict=True))
    assert worst <= TOLERANCE if theirs_is_right else worst > 0.01

    padded = [row + [0] * (width - len(row)) for row in rows]
    model = converters.functionalize(module)
    valid = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    state = model(padded, mask=valid)[1]
    ours = model([[7], [7]], cache=state)[0][0]
    assert relative_error(ours, alone) <= TOLERANCE


def test_padding_is_masked_in_minicpm3() -> None:
    """Mlx-lm 0.32.2 takes the mask of a left-padded batch; so does the functional form."""
    module = make_module("minicpm3")
    pad = [14, 0]
    rows = [[77] * pad[0] + ROW[:9], ROW[:23]]
    alone = run_module(module, ROW[:9], 9)
    caches = [BatchKVCache(pad) for _ in make_prompt_cache(module)]
    assert relative_error(module(mx.array(rows), cache=caches)[0, 14:], alone) <= TOLERANCE
    assert relative_error(module(mx.array(rows))[0, 14:], alone) > 0.01  # the padding would count
    valid = [[0] * pad[0] + [1] * 9, [1] * 23]
    ours = converters.functionalize(module)(rows, mask=valid)[0]
    assert relative_error(ours[0, 14:], alone) <= TOLERANCE


@pytest.mark.parametrize("name", ["plamo3", "phi3small"])
def test_prompts_and_steps_agree(name: str) -> None:
    """PLaMo-3's steps forget one token of the window; Phi-3-small's prompts see what comes."""
    module = make_module(name)
    prompt, steps = (to_numpy(run_module(module, ROW, count)) for count in (len(ROW), 1))
    known = prompt > -1e30
    assert np.abs(prompt[known] - steps[known]).max() > 0.01 * np.abs(prompt[known]).max()
    right = prompt if name == "plamo3" else steps
    model = converters.functionalize(module)
    for count in (23, 1):
        ours = to_numpy(run_model(model, model.forward, [ROW[: count + 3]], [count], False)[0])
        theirs = right[: len(ours)]
        known = theirs > -1e30  # ids that never come
        error = np.abs(ours[known] - theirs[known]).max() / np.abs(theirs[known]).max()
        assert error <= TOLERANCE


# --- what a config says of weights that are not there yet -----------------------------------------

LEGACY: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"quant_method": "mxfp4"}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ({"quant_method": "mxfp8"}, {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    ),
    (
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    ),
    ({"quant_method": "gptq", "group_size": 32}, {"group_size": 32, "bits": 4}),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
]


@pytest.mark.parametrize(("legacy", "packing"), LEGACY, ids=lambda v: str(v)[:30])
@pytest.mark.parametrize("inner", [False, True])
def test_settings_of_other_tools_are_read(
    legacy: dict[str, Any], packing: dict[str, Any] | None, inner: bool
) -> None:
    config = make_config("qwen2")
    known = {"text_config": {"quantization_config": legacy}} if inner else {
        "quantization_config": legacy
    }  # fmt: skip
    wanted = {} if packing is None else {"quantization": packing}
    mine = dict(tree_flatten(mlx_lm_source.make_module(config | known).parameters()))
    theirs = dict(tree_flatten(mlx_lm_source.make_module(config | wanted).parameters()))
    assert {name: (a.shape, a.dtype) for name, a in mine.items()} == {
        name: (a.shape, a.dtype) for name, a in theirs.items()
    }


@pytest.mark.parametrize(
    ("legacy", "words"),
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'FP8' of modelopt"),
        ({"quant_method": "awq", "bits": 3}, "awq with 3 bits"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not known to mlx-lm"),
    ],
)
def test_packings_that_mlx_lm_does_not_read_are_refused_early(
    tmp_path: Path, legacy: dict[str, Any], words: str
) -> None:
    folder = write_config(tmp_path, WITHOUT, quantization_config=legacy)
    with pytest.raises(ConfigError, match=words):
        loading.check(folder)
    assert words in diagnose(str(folder)).reason


def test_tagged_floats_are_numbers(tmp_path: Path) -> None:
    """transformers writes what JSON lacks as objects."""
    endless = [0.0, {"__float__": "Infinity"}]
    loading.check(write_config(tmp_path, "mamba2", time_step_limit=endless))
    assert diagnose(str(tmp_path), via="mlx_lm").functional
