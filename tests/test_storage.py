from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from funcrt import load_model, storage
from funcrt.errors import ConfigError, FuncrtError, ParamsError, SourceError
from tests.helpers import (
    KINDS,
    assert_same,
    make_model,
    make_params,
    quantize,
    random_tokens,
    run_plain,
)

import mlx.core as mx
import numpy as np
import pytest

ARRAYS = {
    "b": mx.arange(6, dtype=mx.float32).reshape(2, 3),
    "a": mx.array([1, 2], dtype=mx.uint32),
    "c": mx.array([0.5], dtype=mx.bfloat16),
}
Header = dict[str, Any]


def refuse(call: Callable[[Path], object], path: Path, match: str) -> None:
    with pytest.raises(SourceError, match=match) as caught:
        call(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


def write(path: Path, header: bytes | object, data: bytes, length: int | None = None) -> Path:
    """A safetensors file with any header at all."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def test_arrays_come_back(file):
    storage.save_arrays(file, ARRAYS, {"format": "mlx"})
    loaded = storage.load_arrays(file)
    assert_same({name: loaded[name] for name in ARRAYS}, ARRAYS)


def test_json_comes_back(tmp_path):
    path = tmp_path / "a.json"
    storage.save_json(path, {"é": [1, None], "b": {"c": 0.5}})
    assert storage.load_json(path) == {"é": [1, None], "b": {"c": 0.5}}
    assert "é" in path.read_text("utf-8")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"3", b"null", b'{"a": "\xff"}', b"[" * 100_000],
    ids=lambda content: repr(content[:12]),
)
def test_json_that_is_no_object(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    refuse(storage.load_json, path, "cannot read|expected a JSON object")


def test_what_is_not_there(tmp_path):
    for read in (storage.load_json, storage.load_arrays, storage.check_safetensors):
        refuse(read, tmp_path / "none.safetensors", "does not exist")
        refuse(read, tmp_path, "Is a directory")


def test_every_truncation_is_noticed(file):
    storage.save_arrays(file, ARRAYS)
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        refuse(storage.load_arrays, file, "truncated|not a")
    file.write_bytes(whole)
    storage.check_safetensors(file)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        {"a": 1},
        {"a": None},
        {"a": []},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {**ENTRY, "data_offsets": [0]}},
        {"a": {**ENTRY, "data_offsets": [0, 8, 9]}},
        {"a": {**ENTRY, "data_offsets": ["0", "8"]}},
        {"a": {**ENTRY, "data_offsets": [-8, 0]}},
        {"a": {**ENTRY, "data_offsets": [8, 0]}},
        {"a": {**ENTRY, "data_offsets": [0, 12]}},
        {"a": {**ENTRY, "data_offsets": [0, 4]}},
        {"a": {**ENTRY, "shape": [3]}},
        {"a": {**ENTRY, "shape": [2**20, 2**20]}},
        {"a": {**ENTRY, "shape": [2**62, 4]}},
        {"a": {**ENTRY, "shape": [-2]}},
        {"a": {**ENTRY, "shape": 2}},
        {"a": {**ENTRY, "shape": "2"}},
        {"a": {**ENTRY, "dtype": "F64X"}},
        {"a": {**ENTRY, "dtype": "F16"}},
        {"a": {**ENTRY, "dtype": 5}},
        {"a": {"shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
        {"a": {**ENTRY, "shape": [2.0]}},
        {"a": {**ENTRY, "shape": [True, 2]}},
        {"a": {**ENTRY, "shape": [2**31, 0], "data_offsets": [0, 0]}},
        {"a": {**ENTRY, "data_offsets": [0.0, 8.0]}},
        {"a": {**ENTRY, "dtype": "F4", "shape": [0], "data_offsets": [0, 8]}},
        {"a": ENTRY, "b": ENTRY},
        {"a": {**ENTRY, "shape": [1], "data_offsets": [4, 8]}},
        {"a": {**ENTRY, "shape": [1], "data_offsets": [0, 4]}},
        {"a\n": ENTRY},
        {"\ud800": ENTRY},
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": NaN}}',
        b'{"a": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}',
        {"__metadata__": "", "a": ENTRY},
        {"__metadata__": 3, "a": ENTRY},
        {"__metadata__": {"format": 3}, "a": ENTRY},
    ],
    ids=lambda header: str(header)[:60],
)
def test_damaged_headers(file, header):
    refuse(
        storage.load_arrays, write(file, header, bytes(8)), "not a|damaged|truncated|cannot read"
    )


def test_a_header_longer_than_the_file(file):
    for length in (9, 2**31, 2**63, 2**64 - 1):
        refuse(storage.check_safetensors, write(file, b"{}", b"", length), "truncated")


def test_a_sound_header_passes(file):
    write(file, {"__metadata__": {"format": "pt"}, "a": ENTRY}, bytes(8))
    assert storage.load_arrays(file)["a"].tolist() == [0, 0]
    write(file, {"a": {**ENTRY, "shape": [0], "data_offsets": [0, 0]}}, b"")
    assert storage.load_arrays(file)["a"].shape == (0,)
    write(file, {"a": {**ENTRY, "shape": [], "data_offsets": [0, 4]}}, bytes(4))
    assert storage.load_arrays(file)["a"].shape == ()


@pytest.mark.parametrize("dtype", ["bool_", "uint8", "int8", "uint16", "int16", "int64", "float16"])
def test_every_dtype_of_mlx_passes(file, dtype):
    arrays = {"a": mx.ones((3, 2)).astype(getattr(mx, dtype))}
    storage.save_arrays(file, arrays)
    assert_same(storage.load_arrays(file), arrays)


# --- models on disk -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back(tmp_path, kind):
    model = make_model(kind, tie_word_embeddings=kind == "float16", attention_bias=True)
    model.save(tmp_path / "new" / "folder")
    loaded = load_model(tmp_path / "new" / "folder", None if kind == "affine" else kind)
    assert loaded.config == model.config
    assert_same(loaded.params, model.params)
    assert loaded.tokenizer is None
    tokens = random_tokens(9)
    np.testing.assert_array_equal(run_plain(loaded, tokens)[0], run_plain(model, tokens)[0])


def test_dtype_casts_what_is_stored(tmp_path):
    make_model("bfloat16").save(tmp_path)
    kept = load_model(tmp_path)
    assert {array.dtype for array in kept.params.values()} == {mx.bfloat16}
    cast = load_model(tmp_path, mx.float16)
    assert {array.dtype for array in cast.params.values()} == {mx.float16}
    assert cast.config.dtype == "float16"
    with pytest.raises(ParamsError, match="int8"):
        load_model(tmp_path, "int8")


def test_the_packing_is_written_as_mlx_checkpoints_do(tmp_path):
    model = make_model("affine")
    params, dense = dict(model.params), make_params(model.config)
    params |= quantize({"lm_head.weight": dense["lm_head.weight"]}, 64, 8)
    type(model)(model.config, params).save(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization"]
    assert written == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "lm_head": {"group_size": 64, "bits": 8, "mode": "affine"},
    }
    assert_same(load_model(tmp_path).params, type(model)(model.config, params).params)
    make_model().save(tmp_path)
    assert "quantization" not in json.loads((tmp_path / "config.json").read_text())


def test_models_that_cannot_be_read(tmp_path):
    make_model().save(tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    hf = json.loads(path.read_text())

    def refuse_model(error: type[FuncrtError], match: str) -> None:
        with pytest.raises(error, match=match):
            load_model(tmp_path)

    for config, error, match in [
        ({**hf, "model_type": "elephant"}, ConfigError, "'elephant' is not supported; known: "),
        ({**hf, "num_hidden_layers": 3}, ParamsError, "missing: model.layers.2"),
        ({**hf, "num_hidden_layers": 1}, ParamsError, "unknown: model.layers.1"),
        ({**hf, "intermediate_size": 97}, ParamsError, r"expected shape \(97, 64\)"),
        ({**hf, "tie_word_embeddings": True}, ParamsError, "unknown: lm_head.weight"),
        ({**hf, "attention_bias": True}, ParamsError, "missing: .*q_proj.bias"),
    ]:
        storage.save_json(path, config)
        refuse_model(error, match)
    path.write_text("[]")
    refuse_model(SourceError, "JSON object")
    path.unlink()
    refuse_model(SourceError, "config.json does not exist")
    storage.save_json(path, hf)
    weights.write_bytes(weights.read_bytes()[:-1])
    refuse_model(SourceError, "truncated")
    weights.unlink()
    refuse_model(SourceError, "model.safetensors does not exist")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="cannot write the model to"):
        make_model().save(tmp_path / "file" / "folder")


@pytest.mark.parametrize("shape", ["[2,3]", "[-2,-2]", "[5]", "[2,2.5]", '["2",2]', "4"])
def test_shapes_that_do_not_fit_their_bytes_are_refused(tmp_path, shape):
    header = f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,16]}}}}'.encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(SourceError, match="damaged entry for a"):
        storage.load_arrays(path)


def test_any_file_name_and_no_metadata_will_do(tmp_path):
    path = tmp_path / "a.safetensors"
    storage.save_arrays(path, {"a": mx.arange(4)})
    path.rename(other := tmp_path / "weights.cache")
    assert storage.load_arrays(other)["a"].tolist() == [0, 1, 2, 3]
    assert storage.load_metadata(other) == {}
