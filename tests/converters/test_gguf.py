from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import converters
from converters import gguf as reader
from converters.gguf.file import read_header
from funcrt.errors import ConfigError, FuncrtError, ParamsError, SourceError

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants


def dense(params: dict[str, mx.array], name: str) -> np.ndarray[Any, Any]:
    """The float32 value of a tensor, dequantized by MLX if it is packed."""
    base = name.removesuffix(".weight")
    if f"{base}.scales" not in params:
        return np.array(params[name].astype(mx.float32))
    scales, biases = (params[f"{base}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    columns = scales.shape[-1] * 32
    bits = params[name].shape[-1] * 32 // columns
    return np.array(mx.dequantize(params[name], scales, biases, group_size=32, bits=bits))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_params_equal_those_of_the_hugging_face_folder(tiny, kind, bias, tied):
    tiny.change(attention_bias=bias, mlp_bias=bias, tie_word_embeddings=tied)
    model = converters.load(tiny.gguf(kind))
    assert model.config.attention_bias == model.config.mlp_bias == bias
    assert model.config.tie_word_embeddings == tied
    for name, array in tiny.weights.items():
        expected = array
        if array.ndim == 2 and kind is not Kind.F32:
            expected = quants.dequantize(quants.quantize(array, kind), kind)
        np.testing.assert_array_equal(dense(model.params, name), expected, err_msg=name)


def test_config_and_float32_params_equal_those_of_the_hugging_face_folder(tiny):
    from_gguf, from_folder = converters.load(tiny.gguf()), converters.load(tiny.hf())
    assert from_gguf.config == from_folder.config
    assert list(from_gguf.params) == list(from_folder.params)
    for name, array in from_folder.params.items():
        assert mx.array_equal(from_gguf.params[name], array).item(), name


def test_q_and_k_are_permuted_in_the_file(tiny):
    """The test above would pass without any permutation if writer and reader both left it out."""
    q, name = tiny.weights["model.layers.0.self_attn.q_proj.weight"], "blk.0.attn_q.weight"
    file = read_header(tiny.gguf())
    stored = file.tensors[name].read().view(np.float32).reshape(q.shape)
    assert not np.array_equal(stored, q)
    np.testing.assert_array_equal(stored[:2], q[[0, 8]])  # i and i + D/2 are neighbours


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_tensors_are_those_that_mlx_reads(tiny, kind):
    path = tiny.gguf(kind)
    read = reader.read(path).params
    theirs = mx.load(str(path))
    assert len(read) == len(theirs)
    for part in ("weight", "scales", "biases"):
        ours, name = read.get(f"model.layers.1.mlp.down_proj.{part}"), f"blk.1.ffn_down.{part}"
        assert (ours is None) == (name not in theirs)
        if ours is not None:
            assert ours.dtype == theirs[name].dtype
            assert mx.array_equal(ours, theirs[name]).item()


def test_a_saved_model_reads_back_as_a_folder(tiny, tmp_path):
    model = converters.load(tiny.gguf(Kind.Q4_1))
    model.save(tmp_path / "saved")
    again = converters.load(tmp_path / "saved")
    assert again.config == model.config
    assert list(again.params) == list(model.params)
    assert all(mx.array_equal(again.params[n], a).item() for n, a in model.params.items())


def test_explicit_dtype_casts_floats_and_keeps_packed_weights(tiny):
    model = converters.load(tiny.gguf(Kind.Q8_0), dtype="bfloat16")
    assert model.config.dtype == "bfloat16"
    assert {array.dtype for array in model.params.values()} == {mx.uint32, mx.bfloat16}
    assert converters.load(tiny.gguf(Kind.Q8_0), dtype=mx.float16).config.dtype == "float16"


def test_float32_metadata_keeps_its_short_form(tiny):
    assert read_header(tiny.gguf()).metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5


# --- rope ----------------------------------------------------------------------------------------


def llama3_divisors(
    dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter stores as rope_freqs.weight, frequency by frequency."""
    divisors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (i / dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("dim", "factor", "low", "high", "original"),
    [(64, 32.0, 1.0, 4.0, 8192), (128, 8.0, 1.0, 4.0, 8192), (128, 16.0, 2.0, 5.0, 4096)],
)
def test_llama3_scaling_is_read_back_from_its_frequencies(tiny, dim, factor, low, high, original):
    tiny.change(head_dim=dim, hidden_size=4 * dim, rope_theta=500000.0)
    divisors = llama3_divisors(dim, 500000.0, factor, low, high, original)
    path = tiny.gguf(edit=lambda w: w.add_tensor("rope_freqs.weight", divisors))
    rope = converters.load(path).config.rope
    assert (rope.kind, rope.factor) == ("llama3", factor)
    if low == 1.0:
        assert (rope.low_freq_factor, rope.high_freq_factor) == (low, high)
        assert rope.original_max_positions == original
    # Other parameters may describe the same frequencies; that they do is what matters.
    again = llama3_divisors(
        dim, 500000.0, rope.factor, rope.low_freq_factor, rope.high_freq_factor,
        rope.original_max_positions,
    )  # fmt: skip
    np.testing.assert_allclose(again, divisors, rtol=1e-4)


def test_rope_frequencies_of_one_are_no_scaling(tiny):
    path = tiny.gguf(edit=lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)))
    assert converters.load(path).config.rope.kind == "default"


def test_other_rope_frequencies_are_kept_as_a_table(tiny):
    divisors = np.float32([1, 1.1, 1, 2, 3, 5, 8, 7])
    path = tiny.gguf(edit=lambda w: w.add_tensor("rope_freqs.weight", divisors))
    rope = converters.load(path).config.rope
    assert (rope.kind, rope.attention_factor) == ("longrope", 1.0)
    np.testing.assert_array_equal(np.float32(rope.short_factor), divisors)
    assert rope.long_factor == rope.short_factor


@pytest.mark.parametrize("wild", [np.arange(8), np.full(8, np.nan), np.zeros(8), np.full(8, -1)])
def test_rope_frequencies_that_are_none_are_refused(tiny, wild):
    path = tiny.gguf(edit=lambda w: w.add_tensor("rope_freqs.weight", wild.astype(np.float32)))
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight divides frequencies; expected"):
        converters.load(path)


def test_linear_and_yarn_scaling(tiny):
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    rope = converters.load(tiny.gguf(edit=linear)).config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    rope = converters.load(tiny.gguf(edit=yarn)).config.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 8.0, 64)


# --- files that must be refused ------------------------------------------------------------------


def refuse(path: Path, error: type[FuncrtError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        converters.load(path)
    assert "\n" not in str(caught.value)


def test_not_a_gguf_file(tmp_path):
    for content in (b"", b"GG", b"PK\x03\x04" + bytes(64)):
        (tmp_path / "model.gguf").write_bytes(content)
        refuse(tmp_path / "model.gguf", SourceError, "not a GGUF file")


@pytest.mark.parametrize("keep", [4, 20, 24, 60, 400, 0.3, 0.9, -1])
def test_truncated(tiny, keep):
    path = tiny.gguf()
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refuse(path, SourceError, "truncated")


@pytest.mark.parametrize(
    ("version", "what"), [(1, "version 1"), (9, "version 9"), (3 << 24, "big")]
)
def test_unknown_version(tiny, version, what):
    path = tiny.gguf()
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", version)
    path.write_bytes(content)
    refuse(path, SourceError, what)


@pytest.mark.parametrize("at", [8, 16])
def test_counts_that_lie(tiny, at):
    path = tiny.gguf()
    content = bytearray(path.read_bytes())
    content[at : at + 8] = struct.pack("<Q", 1 << 60)
    path.write_bytes(content)
    refuse(path, SourceError, "truncated|unknown type|not UTF-8|dimensions")


def description(content: bytes, name: str) -> int:
    """Where the description of a two-dimensional tensor starts, after its name."""
    return content.index(name.encode()) + len(name)


def test_shape_that_lies(tiny):
    path = tiny.gguf()
    content = bytearray(path.read_bytes())
    at = description(content, "blk.1.ffn_up.weight") + 4
    content[at : at + 8] = struct.pack("<Q", 1 << 40)
    path.write_bytes(content)
    refuse(path, SourceError, r"truncated: tensor 'blk\.1\.ffn_up\.weight'|overlap")


def test_tensors_that_overlap(tiny):
    path = tiny.gguf()
    content = bytearray(path.read_bytes())
    at = description(content, "blk.1.ffn_up.weight") + 4 + 16 + 4
    content[at : at + 8] = struct.pack("<Q", 0)
    path.write_bytes(content)
    refuse(path, SourceError, "overlap")


def test_unknown_and_unsupported_quantization_is_named(tiny):
    def edit(writer: gguf.GGUFWriter) -> None:
        blocks = np.zeros((4, 36), np.uint8)
        writer.add_tensor("blk.0.extra.weight", blocks, raw_dtype=Kind.NVFP4)

    path = tiny.gguf(edit=edit)
    refuse(path, SourceError, r"NVFP4 \(blk\.0\.extra\.weight\).*use a file with F32, .*Q4_0.*Q6_K")
    content = bytearray(path.read_bytes())
    at = description(content, "blk.0.extra.weight") + 4 + 16
    content[at : at + 4] = struct.pack("<I", 999)
    path.write_bytes(content)
    refuse(path, SourceError, r"'blk\.0\.extra\.weight' has the unknown type 999")


def test_scales_that_are_not_finite(tiny):
    path = tiny.gguf(Kind.Q8_0)
    file = read_header(path)
    content = bytearray(path.read_bytes())
    at = file.tensors["blk.0.attn_v.weight"].offset
    content[at : at + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(content)
    refuse(path, ParamsError, r"blk\.0\.attn_v\.weight: the scales")


def test_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refuse(
        tmp_path / "m.gguf", ConfigError, "architecture 'mamba' is not supported; known: .*llama"
    )


def test_split_file(tiny):
    path = tiny.gguf(edit=lambda w: w.add_uint16("split.count", 3))
    refuse(
        path, SourceError, "one of 3 parts, which are found by name: expected NAME-00001-of-00003"
    )


def test_missing_unknown_and_misshapen_tensors_are_listed(tiny):
    del tiny.weights["model.layers.1.mlp.up_proj.weight"]
    tiny.weights["model.norm.weight"] = np.zeros(32, np.float32)
    tiny.weights["blk.0.strange.weight"] = np.zeros((2, 2), np.float32)
    with pytest.raises(ParamsError) as caught:
        converters.load(tiny.gguf())
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "blk.0.strange.weight"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("count", "match"),
    [
        (1, r"unknown: model\.layers\.1\."),
        (3, r"missing: model\.layers\.2\."),
        (10_000, "10000 layers, but only"),
    ],
)
def test_wrong_number_of_layers(tiny, count, match):
    def edit(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.block_count"]
        writer.add_block_count(count)

    refuse(tiny.gguf(edit=edit), ParamsError, match)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        (
            "embedding_length",
            None,
            "llama.embedding_length: expected a positive integer, got nothing",
        ),
        ("embedding_length", "64", "got '64'"),
        ("attention.head_count", [4, 2], "got differing values"),
        ("attention.key_length", 32, "partial_rotary_factor=0.5 is not supported"),
        ("attention.sliding_window", 64, "unknown: llama.attention.sliding_window"),
        ("attention.layer_norm_rms_epsilon", 0.0, "expected a positive number"),
        ("rope.scaling.type", "longrope", "rope scaling 'longrope'"),
        ("expert_count", 8, "llama.expert_used_count: expected a positive integer, got nothing"),
    ],
)
def test_metadata_that_does_not_fit(tiny, key, value, match):
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"llama.{key}", None)
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
        if value is not None:
            add.get(type(value), writer.add_float32)(f"llama.{key}", value)

    refuse(tiny.gguf(edit=edit), ConfigError, match)


def test_ignored_metadata(tiny):
    path = tiny.gguf(edit=lambda w: w.add_uint32("llama.attention.sliding_window", 64))
    model = converters.load(path, ignore={"llama.attention.sliding_window"})
    assert model.config.num_layers == 2


def test_a_damaged_header_never_raises_anything_else(tiny):
    """Every byte of the header changed in turn: refused, or read as another valid file."""
    tiny.change(num_hidden_layers=1, vocab_size=32, intermediate_size=32)
    path = tiny.gguf(edit=lambda w: w.add_array("tokenizer.ggml.tokens", ["a", "b"]))
    content = path.read_bytes()
    header = min(tensor.offset for tensor in read_header(path).tensors.values())
    refused = 0
    for at in range(header):
        damaged = bytearray(content)
        damaged[at] ^= (0x01, 0x80, 0xFF)[at % 3]
        path.write_bytes(damaged)
        try:
            reader.read(path)
        except FuncrtError:
            refused += 1
    assert header / 2 < refused < header
