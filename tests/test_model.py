"""Saving a model as a folder, and reading it back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import funcrt
from funcrt import storage
from funcrt.errors import ConfigError, PublishError, SourceError
from funcrt.model import Model, load_model
from tests.helpers import TINY, make_params

import mlx.core as mx
import pytest


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "affine"])
def test_a_saved_model_is_the_same_when_read_back(kind: str, tmp_path: Path) -> None:
    model = Model(TINY, make_params(TINY, kind))
    model.save(tmp_path / "model")
    again = funcrt.load_model(tmp_path / "model")
    assert list(again.params) == list(model.params)
    for name, array in model.params.items():
        assert again.params[name].dtype == array.dtype
        assert mx.array_equal(again.params[name], array)
    assert again.config == replace(TINY, dtype=again.config.dtype)
    assert mx.array_equal(again([1, 2, 3])[0], Model(again.config, model.params)([1, 2, 3])[0])


def test_quantization_is_written_as_mlx_checkpoints_have_it(tmp_path: Path) -> None:
    Model(TINY, make_params(TINY, "affine")).save(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))
    assert config["quantization"] == {"bits": 4, "group_size": 32, "mode": "affine"}


def test_a_dtype_casts_what_is_stored(tmp_path: Path) -> None:
    Model(TINY, make_params(TINY)).save(tmp_path / "model")
    half = load_model(tmp_path / "model", "float16")
    assert half.config.dtype == "float16"
    assert {array.dtype for array in half.params.values()} == {mx.float16}
    assert half([1, 2])[0].dtype == mx.float16


def test_saving_over_an_older_model_replaces_it(tmp_path: Path) -> None:
    Model(TINY, make_params(TINY, seed=1)).save(tmp_path / "model")
    Model(TINY, make_params(TINY, seed=2)).save(tmp_path / "model")
    expected = make_params(TINY, seed=2)["model.norm.weight"]
    assert mx.array_equal(load_model(tmp_path / "model").params["model.norm.weight"], expected)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_saving_over_its_own_source_loses_nothing(tmp_path: Path) -> None:
    Model(TINY, make_params(TINY)).save(tmp_path / "model")
    load_model(tmp_path / "model").save(tmp_path / "model")  # its weights are still on disk
    assert mx.array_equal(
        load_model(tmp_path / "model").params["model.norm.weight"],
        make_params(TINY)["model.norm.weight"],
    )


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    Model(TINY, make_params(TINY)).save(tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(PublishError, match="not replaced"):
        Model(TINY, make_params(TINY)).save(tmp_path / "model")
    assert (tmp_path / "model" / "notes.txt").read_text("utf-8") == "mine"


def test_a_checkpoint_that_others_made_is_not_replaced(tmp_path: Path) -> None:
    Model(TINY, make_params(TINY)).save(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    data = json.loads(config.read_text("utf-8"))
    del data["funcrt_version"]
    config.write_text(json.dumps(data), "utf-8")
    with pytest.raises(PublishError, match="not replaced"):
        Model(TINY, make_params(TINY)).save(tmp_path / "model")


def test_the_working_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PublishError, match="the folder this runs in"):
        Model(TINY, make_params(TINY)).save(".")


def test_a_model_without_a_tokenizer_knows_what_ends_a_text() -> None:
    model = Model(TINY, make_params(TINY))
    (completion,) = funcrt.Engine(model).generate([[1, 2, 3]], max_tokens=4)
    ending = replace(TINY, eos_token_ids=(completion.tokens[1],))
    (cut,) = funcrt.Engine(Model(ending, make_params(TINY))).generate([[1, 2, 3]], max_tokens=4)
    stop = completion.tokens.index(completion.tokens[1])
    assert cut.tokens == completion.tokens[: stop + 1]
    assert cut.finish_reason == "stop"


def test_an_interrupted_save_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Model(TINY, make_params(TINY, seed=1)).save(tmp_path / "model")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "save_json", fail)
    with pytest.raises(SourceError, match="No space left"):
        Model(TINY, make_params(TINY, seed=2)).save(tmp_path / "model")
    kept = load_model(tmp_path / "model").params["model.norm.weight"]
    assert mx.array_equal(kept, make_params(TINY, seed=1)["model.norm.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known: .*llama"):
        Model(replace(TINY, model_type="elephant"), {})


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"model\.safetensors does not exist"):
        load_model(tmp_path)
