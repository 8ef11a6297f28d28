"""Checkpoints that see: their text model gives transformers' logits of texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import converters
from converters import multimodal
from funcrt.errors import ConfigError, FuncrtError, ParamsError
from funcrt.storage import load_arrays, load_json
from tests.converters import mlx_published
from tests.families.cases import run_plain
from tests.helpers import TOLERANCE, relative_error
from tests.reference import golden

import mlx.core as mx
import pytest

PUBLISHED = Path(golden.__file__).parent / "published"
CASES = sorted(path.parent.name for path in PUBLISHED.glob("*/golden.safetensors"))
SEEING = [case for case in CASES if case in multimodal.WRAPPERS]


def refuse(folder: Path, error: type[FuncrtError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        converters.load(folder)
    assert "\n" not in str(caught.value)


def copy(
    case: str,
    folder: Path,
    config: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda config: config,
    rename: Callable[[str], str] = lambda name: name,
    *,
    turn: bool = False,
    **more: mx.array,
) -> Path:
    """A case with another config, other names, more tensors, or stacks of experts turned."""
    folder.mkdir(exist_ok=True)
    arrays = load_arrays(PUBLISHED / case / "model.safetensors")
    arrays = {rename(name): array for name, array in arrays.items()} | more
    if turn:  # as Qwen publishes them
        stacks = [name for name in arrays if ".experts." in name]
        arrays |= {name: mx.contiguous(arrays[name].swapaxes(1, 2)) for name in stacks}
    mx.eval(arrays)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    changed = dict(config(load_json(PUBLISHED / case / "config.json")))
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def assert_golden(folder: Path, case: str) -> None:
    arrays = load_arrays(PUBLISHED / case / "golden.safetensors")
    model = converters.load(folder, dtype="float32")
    found = run_plain(model, [int(token) for token in arrays["tokens"]])
    assert relative_error(found, arrays["logits"]) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_texts_give_the_logits_of_transformers(case: str) -> None:
    """Also of weights that are quantized as gpt-oss and DeepSeek are."""
    assert_golden(PUBLISHED / case, case)


def test_all_that_are_known_are_tried() -> None:
    assert set(SEEING) == set(multimodal.WRAPPERS)


@pytest.mark.parametrize("case", SEEING)
def test_what_is_left_out_is_said(case: str) -> None:
    model = converters.load(PUBLISHED / case)
    (note,) = model.notes
    assert note.startswith(f"only the text model ({model.config.model_type}) of this {case} is")
    names = load_arrays(PUBLISHED / case / "model.safetensors")
    for part in ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector"):
        there = any(name.removeprefix("model.").startswith(f"{part}.") for name in names)
        assert (f"{part} (" in note) == there
    assert "(90" in note
    assert not converters.load(golden.family_folder("qwen3")).notes


@pytest.mark.parametrize("case", SEEING)
def test_the_text_model_saves_as_one(case: str, tmp_path: Path) -> None:
    model = converters.load(PUBLISHED / case)
    model.save(tmp_path / "text")
    again = converters.load(tmp_path / "text")
    assert not again.notes
    assert again.fingerprint == model.fingerprint
    assert_golden(tmp_path / "text", case)


def test_marks_of_images_are_plain_tokens() -> None:
    """They have rows of the embedding like any other id."""
    model = converters.load(PUBLISHED / "gemma3", dtype="float32")
    plain, marked = (run_plain(model, [5, 6, token, 7]) for token in (8, 90))
    assert mx.array_equal(plain[:2], marked[:2])
    assert mx.all(mx.isfinite(marked)).item()
    assert relative_error(plain[2:], marked[2:]) > 1e-2


# --- older and newer spellings -------------------------------------------------------------------


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """As Qwen published these first: the text's settings beside the others."""
    text = dict(config.pop("text_config"))
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "model_type": config["model_type"]}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return {**text, **config}


@pytest.mark.parametrize("case", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_configs(case: str, tmp_path: Path) -> None:
    assert_golden(copy(case, tmp_path, flat), case)


@pytest.mark.parametrize("case", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_every_spelling_of_three_positions(case: str, key: str, tmp_path: Path) -> None:
    def spell(config: dict[str, Any]) -> dict[str, Any]:
        text = config["text_config"]
        rope = text.pop("rope_parameters")
        for kind in ({"type": "mrope"}, {"rope_type": "default", "type": "default"}):
            text[key] = {**rope, **kind}
        text["rope_theta"] = rope["rope_theta"]
        return config

    assert_golden(copy(case, tmp_path, spell), case)


def test_stacks_of_experts_as_qwen_publishes_them(tmp_path: Path) -> None:
    assert_golden(copy("qwen3_vl_moe", tmp_path, turn=True), "qwen3_vl_moe")


@pytest.mark.parametrize("case", ["gemma3", "llava", "mistral3", "qwen2_vl", "internvl"])
def test_newer_names(case: str, tmp_path: Path) -> None:
    """As transformers 5 has them in memory."""

    def rename(name: str) -> str:
        for old, new in (
            ("language_model.model.", "model.language_model."),
            ("language_model.lm_head.", "lm_head."),
            ("lm_head.", "lm_head."),
            ("model.", "model.language_model."),
            ("", "model."),
        ):
            if name.startswith(old):
                return new + name.removeprefix(old)
        raise AssertionError

    assert_golden(copy(case, tmp_path, rename=rename), case)


def test_settings_that_published_text_configs_leave_out(tmp_path: Path) -> None:
    """Sizes that transformers fills in: google/gemma-3-4b-it names five only."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    part = multimodal.text_part({"model_type": "gemma3", "text_config": text})
    assert part is not None
    config = converters.huggingface.read_config(part.config)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert (config.head_dim, config.hidden_size) == (256, 2560)


# --- as mlx-lm publishes them --------------------------------------------------------------------


@pytest.mark.parametrize("case", ["gemma3", "mistral3", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("packed", [False, True])
def test_published_by_mlx_lm(case: str, packed: bool, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    packing = {"bits": 4, "group_size": 32} if packed else None
    source = copy(case, tmp_path / "source", turn=case == "qwen3_vl_moe")
    module = mlx_published.make(
        case, source, tmp_path / "mlx", packing=packing, predicate=lambda *_: True
    )
    model = converters.load(tmp_path / "mlx", dtype="float32")
    assert len(model.notes) == 1
    if not packed:
        assert_golden(tmp_path / "mlx", case)
        return
    assert any(name.endswith(".scales") for name in model.params)
    if case == "gemma3":
        return  # mlx-lm's module needs six layers
    module.set_dtype(mx.float32)
    tokens = [int(t) for t in load_arrays(PUBLISHED / case / "golden.safetensors")["tokens"]]
    assert relative_error(run_plain(model, tokens), module(mx.array([tokens]))[0]) <= TOLERANCE


# --- bad ones ------------------------------------------------------------------------------------


def test_tensors_of_no_part(tmp_path: Path) -> None:
    folder = copy("llava", tmp_path, **{"language_model.model.extra.weight": mx.zeros((2,))})
    refuse(folder, ParamsError, r"unknown: model\.extra\.weight")
    folder = copy("llava", tmp_path, **{"somewhere.weight": mx.zeros((2,))})
    refuse(folder, ParamsError, r"unknown: somewhere\.weight")


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    name = "model.language_model.norm.weight"
    folder = copy("llava", tmp_path, **{name: mx.zeros((32,))})
    refuse(folder, ParamsError, r"norm\.weight and another tensor are both model\.norm\.weight")


def test_other_parts_may_be_of_any_type(tmp_path: Path) -> None:
    ids = {"vision_tower.embeddings.position_ids": mx.zeros((1, 4), mx.int64)}
    assert_golden(copy("llava", tmp_path, **ids), "llava")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: {**c, "text_config": None}, "text_config: expected the text model's settings"),
        (lambda c: {**c, "text_config": [1]}, "text_config: expected the text model's settings"),
        (lambda c: {**c, "text_config": {**c["text_config"], "model_type": "spiral"}}, "'spiral'"),
        (lambda c: {**c, "text_config": {**c["text_config"], "spiral": 1}}, "unknown: spiral"),
    ],
)
def test_wrong_text_configs(
    change: Callable[[dict[str, Any]], dict[str, Any]], match: str, tmp_path: Path
) -> None:
    refuse(copy("llava", tmp_path, change), ConfigError, match)


def test_the_command_line_says_it(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from funcrt.cli.sources import load_checkpoint

    shutil.copytree(PUBLISHED / "gemma3", tmp_path / "gemma3")
    load_checkpoint(str(tmp_path / "gemma3"), None)
    out, err = capfd.readouterr()
    assert "note: only the text model (gemma3_text) of this gemma3 is read" in err
    assert not out
