from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import converters
from converters import huggingface
from funcrt.errors import ConfigError, FuncrtError, ParamsError, SourceError
from tests.reference import golden

import mlx.core as mx
import numpy as np
import pytest

INDEX = "model.safetensors.index.json"


def refuse(source: Path | str, error: type[FuncrtError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        converters.load(source)
    assert "\n" not in str(caught.value)


def rewrite_index(folder: Path, **files: str) -> None:
    """Point the tensors of some shards elsewhere."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {k: files.get(v[:11], v) for k, v in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
def test_params_are_those_of_the_files(tiny, shards):
    model = converters.load(tiny.hf(shards))
    assert set(model.params) == set(tiny.weights)
    for name, array in tiny.weights.items():
        np.testing.assert_array_equal(np.array(model.params[name]), array)
    assert model.tokenizer is None


def test_source_may_be_a_string_and_one_file_of_any_name_is_enough(tiny):
    folder = tiny.hf()
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert converters.load(str(folder)).config.num_layers == 2


@pytest.mark.parametrize("stored", [mx.float16, mx.bfloat16])
def test_dtype(tiny, stored):
    tiny.weights = {k: mx.array(v).astype(stored) for k, v in tiny.weights.items()}
    folder = tiny.hf()
    kept = converters.load(folder)
    assert {array.dtype for array in kept.params.values()} == {stored}
    cast = converters.load(folder, dtype="float32")
    assert {array.dtype for array in cast.params.values()} == {mx.float32}
    assert cast.config.dtype == "float32"
    with pytest.raises(FuncrtError, match="int8"):
        converters.load(folder, dtype=mx.int8)


def test_mlx_quantized_folder_stays_quantized(tiny):
    packed = {}
    for name, array in tiny.weights.items():
        if array.ndim == 2:
            parts = mx.quantize(mx.array(array), group_size=32, bits=4)
            base = name.removesuffix(".weight")
            packed |= {
                f"{base}.{p}": a for p, a in zip(("weight", "scales", "biases"), parts, strict=True)
            }
        else:
            packed[name] = array
    tiny.weights = packed
    tiny.config["quantization"] = {"group_size": 32, "bits": 4}
    model = converters.load(tiny.hf())
    assert model.params["lm_head.weight"].dtype == mx.uint32
    assert set(model.params) == set(packed)


def test_params_do_not_change_with_the_file(tiny):
    folder = tiny.hf()
    model = converters.load(folder)
    tiny.weights = {name: np.zeros_like(array) for name, array in tiny.weights.items()}
    tiny.hf()
    assert model.params["lm_head.weight"].abs().max().item() > 0


# --- extras --------------------------------------------------------------------------------------


def test_known_buffers_and_equal_tied_heads_are_dropped(tiny):
    tiny.change(tie_word_embeddings=True)
    expected = set(tiny.weights)
    for layer in range(2):
        tiny.weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    tiny.weights["lm_head.weight"] = tiny.weights["model.embed_tokens.weight"]
    assert set(converters.load(tiny.hf()).params) == expected


def test_a_tied_head_that_differs_is_an_error_unless_ignored(tiny):
    tiny.change(tie_word_embeddings=True)
    tiny.weights["lm_head.weight"] = tiny.weights["model.embed_tokens.weight"] + 1
    folder = tiny.hf()
    refuse(folder, ParamsError, r"lm_head\.weight differs from model\.embed_tokens\.weight")
    assert "lm_head.weight" not in converters.load(folder, ignore="lm_head.weight").params


def test_missing_unknown_and_misshapen_tensors_are_listed(tiny):
    del tiny.weights["model.layers.1.mlp.up_proj.weight"]
    tiny.weights["model.norm.weight"] = np.zeros(32, np.float32)
    tiny.weights["model.strange"] = np.zeros(2, np.float32)
    with pytest.raises(ParamsError) as caught:
        converters.load(tiny.hf())
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.strange"):
        assert name in str(caught.value)


def test_more_layers_than_tensors(tiny):
    tiny.config["num_hidden_layers"] = 10_000
    refuse(tiny.hf(), ParamsError, "10000 layers, but only")


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_more_experts_than_rows(case, tmp_path):
    source = golden.family_folder(case)
    config = json.loads((source / "config.json").read_text())
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    (tmp_path / "config.json").write_text(json.dumps({**config, key: 10**9}))
    shutil.copy(source / "model.safetensors", tmp_path)
    refuse(tmp_path, ParamsError, "1000000000 experts, but no tensor has as many rows")


@pytest.mark.parametrize(
    ("layers", "match"),
    [(3, r"missing: model\.layers\.2\."), (1, r"unknown: model\.layers\.1\.")],
)
def test_another_number_of_layers(tiny, layers, match):
    tiny.config["num_hidden_layers"] = layers
    refuse(tiny.hf(), ParamsError, match)


# --- damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -1000])
def test_truncated_file(tiny, keep):
    path = tiny.hf() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(path.parent, SourceError, r"model\.safetensors is truncated, damaged or not a")


@pytest.mark.parametrize(
    "change",
    [{"shape": [4096, 4096]}, {"data_offsets": [0, 1 << 40]}, {"dtype": "F99"}, {"shape": "x"}],
)
def test_header_that_lies(tiny, change):
    path = tiny.hf() / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"].update(change)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    refuse(path.parent, SourceError, "truncated, damaged or not a")


def test_a_damaged_header_never_raises_anything_else(tiny):
    tiny.change(num_hidden_layers=1)
    path = tiny.hf() / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    refused = 0
    for at in range(8 + length):
        damaged = bytearray(content)
        damaged[at] ^= (0x01, 0x80, 0x04)[at % 3]
        path.write_bytes(damaged)
        try:
            huggingface.read_safetensors(path, tiny.weights)
        except FuncrtError:
            refused += 1
    assert refused > length / 2


def test_dtypes_that_graphs_cannot_take(tiny):
    tiny.weights["model.norm.weight"] = mx.zeros(64, mx.int8)
    refuse(tiny.hf(), ParamsError, r"model\.norm\.weight \(I8\); supported: F32")
    tiny.weights["model.norm.weight"] = mx.zeros(64, mx.uint8)
    refuse(tiny.hf(), ParamsError, r"no scales that say what they mean: model\.norm\.weight")


# --- folders -------------------------------------------------------------------------------------


def test_missing_shard_is_listed(tiny):
    folder = tiny.hf(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuse(folder, SourceError, r"lacks files that its index names: model-00002-of-00003")


def test_tensors_missing_from_a_shard_are_listed(tiny):
    folder = tiny.hf(shards=3)
    rewrite_index(folder, **{"model-00003": "model-00001-of-00003.safetensors"})
    refuse(
        folder,
        SourceError,
        r"00001-of-00003\.safetensors lacks tensors .*: lm_head\.weight, model\.",
    )


def test_a_tensor_in_two_shards(tiny):
    folder = tiny.hf(shards=2)
    path = str(folder / "model-00002-of-00002.safetensors")
    arrays = {**mx.load(path), "model.embed_tokens.weight": mx.zeros((96, 64))}
    mx.eval(arrays)
    mx.save_safetensors(path, arrays)
    refuse(folder, SourceError, r"'model\.embed_tokens\.weight' is in model-00002-of-00002")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "C:x", ""]
)
def test_index_that_points_outside(tiny, name):
    folder = tiny.hf(shards=2)
    rewrite_index(folder, **{"model-00001": name})
    refuse(folder, SourceError, "points outside its folder")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_index_that_is_none(tiny, content):
    folder = tiny.hf(shards=2)
    (folder / INDEX).write_text(content)
    refuse(folder, SourceError, r"index\.json")


def test_shards_may_be_links_that_lead_elsewhere(tiny, tmp_path):
    """The hub's cache looks like this."""
    folder = tiny.hf(shards=2)
    (tmp_path / "blobs").mkdir()
    for path in folder.glob("*.safetensors"):
        blob = tmp_path / "blobs" / path.name.replace(".", "")
        path.rename(blob)
        path.symlink_to(blob)
    assert set(converters.load(folder).params) == set(tiny.weights)


def test_several_files_without_an_index(tiny):
    folder = tiny.hf(shards=2)
    (folder / INDEX).unlink()
    refuse(folder, SourceError, r"has 2 safetensors files but no model\.safetensors\.index\.json")


def test_pickles_only(tiny):
    folder = tiny.hf()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse(folder, SourceError, "PyTorch pickles, which can run code")


def test_folder_without_weights_or_config(tiny, tmp_path):
    folder = tiny.hf()
    (folder / "model.safetensors").unlink()
    refuse(folder, SourceError, "has no safetensors files")
    (folder / "config.json").unlink()
    (folder / "model.Q4_0.gguf").touch()
    refuse(folder, SourceError, r"has no config\.json.*name it: .*model\.Q4_0\.gguf")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_config_that_is_none(tiny, content):
    folder = tiny.hf()
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    refuse(folder, SourceError, r"config\.json")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("model_type", "unheard_of", "model_type 'unheard_of' is not supported"),
        ("rope_scaling", {"rope_type": "spiral"}, "rope type 'spiral'"),
        ("a_new_feature", 7, "unknown: a_new_feature"),
        ("quantization_config", {"quant_method": "gptq"}, "quantized with 'gptq'"),
    ],
)
def test_config_that_is_not_supported(tiny, key, value, match):
    tiny.config[key] = value
    refuse(tiny.hf(), ConfigError, match)


def test_ignored_config_key(tiny):
    tiny.config["a_new_feature"] = 7
    assert converters.load(tiny.hf(), ignore=["a_new_feature"]).config.num_layers == 2


def test_a_safetensors_file_is_not_a_model(tiny):
    refuse(tiny.hf() / "model.safetensors", SourceError, "pass its folder")
