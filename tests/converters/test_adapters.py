"""Adapters as PEFT writes them, against what it computes, and adapters that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import converters
from funcrt.errors import ConfigError, FuncrtError, ParamsError, SourceError
from funcrt.low_rank import is_low_rank
from tests.helpers import TOLERANCE, relative_error

import mlx.core as mx
import pytest

REFERENCE = Path(__file__).parents[1] / "reference"
FAMILIES = REFERENCE / "families"
CASES = sorted(path.name for path in (REFERENCE / "adapters").iterdir())
WHOLE, SCALED = "mistral-whole", "qwen3-dora"  # which cannot be kept for rows, or at all
TOKENS = [[5, 17, 33, 2, 80, 41, 9, 64]]
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")

Edit = Callable[[dict[str, Any], dict[str, mx.array]], None]


def base_of(case: str) -> Path:
    config = json.loads((REFERENCE / "adapters" / case / "adapter_config.json").read_text())
    return REFERENCE / config["base_model_name_or_path"]


def golden(case: str) -> tuple[Path, mx.array, mx.array]:
    folder = REFERENCE / "adapters" / case
    arrays = mx.load(str(folder / "golden.safetensors"))
    assert isinstance(arrays, dict)
    return folder, arrays["tokens"][None], arrays["logits"]


# --- PEFT ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_fused_adapters_give_the_logits_of_peft(case):
    folder, tokens, logits = golden(case)
    model = converters.load(base_of(case), "float32", folder)
    assert relative_error(model(tokens)[0][0], logits) < TOLERANCE
    assert not any(is_low_rank(name) for name in model.params)
    assert f"adapter {case}" in model.notes[0]
    assert f"made for families/{base_of(case).name}" in model.notes[0]


@pytest.mark.parametrize("case", [case for case in CASES if case != SCALED])
def test_kept_adapters_give_the_logits_of_peft(case):
    folder, tokens, logits = golden(case)
    model = converters.load(base_of(case), "float32", folder, fuse=False)
    assert relative_error(model(tokens)[0][0], logits) < TOLERANCE
    state = model.init_cache(1, 32)
    mask = mx.tril(mx.ones((24, 32), dtype=mx.bool_))[None, None]
    stored, _ = model.forward(model.params, tokens, mask, state)
    assert relative_error(stored[0], logits) < TOLERANCE


@pytest.mark.parametrize("case", [case for case in CASES if case not in (SCALED, WHOLE)])
def test_rows_with_the_adapter_give_the_logits_of_peft(case):
    folder, tokens, logits = golden(case)
    base = converters.load(base_of(case), "float32")
    model = converters.load(base_of(case), "float32", [folder, str(folder)], fuse=False)
    state = model.init_cache(3, 32)
    state["adapter"] = mx.array([2, 0, 1], dtype=mx.int32)
    found, _ = model(mx.concatenate([tokens] * 3), cache=state)
    assert relative_error(found[0], logits) < TOLERANCE
    assert relative_error(found[1], base(tokens)[0][0]) < TOLERANCE
    assert relative_error(found[2], logits) < TOLERANCE


def test_modules_of_mlx_lm_take_adapters_too():
    pytest.importorskip("mlx_lm")
    folder, tokens, logits = golden("mistral-plain")
    model = converters.load(base_of("mistral-plain"), "float32", folder, via="mlx_lm")
    assert relative_error(model(tokens)[0][0], logits) < TOLERANCE
    with pytest.raises(ParamsError, match="cannot have a change beside it, fuse the adapter"):
        converters.load(base_of("mistral-plain"), adapter=folder, fuse=False, via="mlx_lm")


# --- what is refused -----------------------------------------------------------------------------


def edited(tmp_path: Path, case: str, edit: Edit) -> Path:
    """A copy of an adapter with another config and other tensors."""
    folder = tmp_path / case
    shutil.copytree(REFERENCE / "adapters" / case, folder)
    config = json.loads((folder / PEFT_FILES[0]).read_text())
    tensors = dict(mx.load(str(folder / PEFT_FILES[1])))
    mx.eval(tensors)
    edit(config, tensors)
    (folder / PEFT_FILES[0]).write_text(json.dumps(config))
    mx.save_safetensors(str(folder / PEFT_FILES[1]), tensors)
    return folder


def refuse(error: type[FuncrtError], match: str, base: str, adapter: Any, **options: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        converters.load(FAMILIES / base, "float32", adapter, **options)
    assert "\n" not in str(caught.value)


SETTINGS: list[tuple[Mapping[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    ({"use_qalora": True}, "use_qalora=True"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the base"),
    ({"init_lora_weights": "olora"}, "'olora' changes the base"),
    ({"lora_alpha": None}, "lora_alpha: expected a number"),
]


@pytest.mark.parametrize(("change", "match"), SETTINGS)
def test_settings_that_change_the_sum_are_refused_by_name(tmp_path, change, match):
    folder = edited(tmp_path, "mistral-plain", lambda config, _: config.update(change))
    refuse(ConfigError, match, "mistral", folder)


def q(layer: int, half: str) -> str:
    return f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight"


def drop(_: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    del tensors[q(1, "B")]


def damage(_: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    tensors[q(0, "A")] = tensors[q(0, "A")] * float("nan")


def add_bias(_: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    tensors["base_model.model.model.layers.0.self_attn.q_proj.bias"] = mx.zeros((64,))


def shorten(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def lengthen(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    for half in "AB":
        tensors[q(9, half)] = tensors[q(0, half)]


def misrank(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    config["r"] = 16


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (drop, r"incomplete: it lacks .*layers\.1\.self_attn\.q_proj\.lora_B"),
        (damage, r"not finite in .*layers\.0\.self_attn\.q_proj\.lora_A"),
        (add_bias, r"not read: .*layers\.0\.self_attn\.q_proj\.bias"),
        (shorten, r"ends in layer 0 .*goes on to layer 1.*fewer layers"),
        (lengthen, r"does not fit this base: model\.layers\.9\.self_attn\.q_proj: .*no such"),
        (misrank, "is of rank 4, its config says 16"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, edit, match):
    refuse(ParamsError, match, "mistral", edited(tmp_path, "mistral-plain", edit))


def test_layers_may_be_chosen(tmp_path):
    def choose(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        shorten(config, tensors)
        config["layers_to_transform"] = [0]

    folder = edited(tmp_path, "mistral-plain", choose)
    assert "2 matrices" in converters.load(FAMILIES / "mistral", adapter=folder).notes[0]


@pytest.mark.parametrize("base", ["qwen2", "gpt2", "deepseek_v3"])
def test_another_base_is_refused(base):
    refuse(ParamsError, "does not fit this base", base, REFERENCE / "adapters" / "mistral-plain")


def test_an_embedding_that_would_change_the_last_projection(tmp_path):
    config = json.loads((FAMILIES / "mistral" / "config.json").read_text())
    tied = tmp_path / "tied"
    shutil.copytree(FAMILIES / "mistral", tied)
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ParamsError, match="embedding only, but this base has it as the last"):
        converters.load(tied, "float32", REFERENCE / "adapters" / WHOLE, ignore=["lm_head.weight"])


def test_files_that_are_missing_damaged_or_pickled(tmp_path):
    refuse(SourceError, "expected a folder", "mistral", tmp_path / "nothing")
    folder = edited(tmp_path, "mistral-plain", lambda *_: None)
    whole = (folder / PEFT_FILES[1]).read_bytes()
    (folder / PEFT_FILES[1]).write_bytes(whole[:-100])
    refuse(SourceError, "truncated, damaged", "mistral", folder)
    (folder / PEFT_FILES[1]).unlink()
    refuse(SourceError, "has neither", "mistral", folder)
    (folder / "adapter_model.bin").write_bytes(b"")
    refuse(SourceError, "pickles.*refused", "mistral", folder)
    (folder / PEFT_FILES[1]).write_bytes(whole)
    (folder / PEFT_FILES[0]).write_text("{")
    refuse(SourceError, "cannot read", "mistral", folder)


def test_several_adapters_cannot_be_fused():
    both: Sequence[Path] = [REFERENCE / "adapters" / "mistral-plain"] * 2
    with pytest.raises(ValueError, match="fuse=False"):
        converters.load(FAMILIES / "mistral", "float32", both)
