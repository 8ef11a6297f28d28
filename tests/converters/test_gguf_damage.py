"""GGUF files that are wrong in ways that are special to an architecture, or meant to exhaust."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import converters
from converters import gguf as reader
from converters.gguf.file import read_header
from funcrt.errors import ConfigError, ParamsError, SourceError
from tests.converters.gguf_copies import read_dense, write
from tests.reference.gguf_cases import FILES

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

HUGE = 2**31 - 1
MOST = 20_000_000  # bytes that reading a small file may take


def changed(case: str, folder: Path, **changes: Any) -> Path:
    """A copy with other metadata (of the architecture; dots as two underscores), None to drop."""
    file = read_header(FILES / f"{case}.gguf")
    start = file.metadata["general.architecture"]
    values = {f"{start}.{key.replace('__', '.')}": value for key, value in changes.items()}
    metadata = {k: v for k, v in {**file.metadata, **values}.items() if v is not None}
    arrays = {name: (array, Kind.F32) for name, array in read_dense(file).items()}
    return write(folder / "changed.gguf", metadata, arrays)


@pytest.mark.parametrize(
    ("case", "changes", "error", "match"),
    [
        ("mixtral", {"expert_count": HUGE}, ParamsError, "experts, but the tensors are of .6."),
        ("mixtral", {"expert_used_count": 7}, ConfigError, "num_experts_per_tok: expected at most"),
        ("qwen3_moe", {"expert_count": None}, ConfigError, "expert_count: expected a positive"),
        ("gemma3_text", {"block_count": HUGE}, ParamsError, "layers, but only 41 tensors"),
        ("gemma2", {"block_count": HUGE}, ParamsError, "layers, but only 24 tensors"),
        ("lfm2", {"block_count": HUGE}, ParamsError, "layers, but only 29 tensors"),
        ("mamba2", {"block_count": HUGE}, ParamsError, "layers, but only 21 tensors"),
        ("deepseek_v2", {"block_count": HUGE}, ParamsError, "layers, but only"),
        ("mistral", {"attention__head_count": HUGE}, ConfigError, "head_count"),
        ("stablelm", {"attention__head_count": HUGE}, ConfigError, "head_count"),
        ("lfm2", {"attention__head_count": HUGE}, ConfigError, "head_count: expected at most 32"),
        ("lfm2", {"attention__head_count_kv": [0, 2]}, ConfigError, "0 or one number, 3 times"),
        ("lfm2", {"attention__head_count_kv": [1, 2, 0]}, ConfigError, "0 or one number, 3 times"),
        ("deepseek_v2", {"attention__head_count": 3}, ConfigError, "heads of 8 in 32, got 3"),
        ("glm4_moe", {"expert_gating_func": 1}, ConfigError, "expert_gating_func: expected 2"),
        ("qwen3_next", {"ssm__group_count": HUGE}, ParamsError, "rows are not 2147483647 heads"),
        ("qwen3_next", {"ssm__state_size": HUGE}, ParamsError, "rows are not 2 heads of"),
        ("qwen3_5_text", {"ssm__inner_size": HUGE}, ParamsError, "rows are not 4 heads of 5368709"),
        ("exaone4", {"rope__freq_base": float("inf")}, ConfigError, "freq_base: expected a pos"),
        ("exaone4", {"attention__sliding_window_pattern": [True]}, ConfigError, "or 3 flags, got"),
        ("olmo3", {"attention__sliding_window_pattern": 0.5}, ConfigError, "expected a period, or"),
        ("phi3-longrope", {"rope__dimension_count": 6}, ConfigError, r"rope_factors_long.*\(3,\)"),
        ("granite", {"attention__temperature_scale": 0.1}, ConfigError, "unknown: granite.att"),
        ("granite", {"rope__scaling__finetuned": False}, ConfigError, "finetuned: expected true"),
        ("qwen3", {"attention__causal": False}, ConfigError, "causal: expected true, for a model"),
        ("gpt2", {"context_length": None}, ConfigError, "gpt2.context_length: expected a positive"),
    ],
)
def test_metadata_that_does_not_fit(case, changes, error, match, tmp_path):
    path = changed(case, tmp_path, **changes)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match) as caught:
            converters.load(path)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def rewritten(folder: Path, old: bytes, new: bytes) -> Path:
    content = (FILES / "mistral.gguf").read_bytes()
    assert old in content
    (folder / "model.gguf").write_bytes(content.replace(old, new, 1))
    return folder / "model.gguf"


def test_duplicate_tensors(tmp_path):
    path = rewritten(tmp_path, b"blk.0.attn_q.weight", b"blk.1.attn_q.weight")
    with pytest.raises(SourceError, match=r"tensor 'blk\.1\.attn_q\.weight' appears twice"):
        converters.load(path)


def test_duplicate_metadata(tmp_path):
    path = rewritten(tmp_path, b"general.type", b"general.name")
    with pytest.raises(SourceError, match=r"metadata key 'general\.name' appears twice"):
        converters.load(path)


def test_two_names_for_one_tensor(tmp_path):
    """Old files had a tensor for each expert; a file with both forms holds an expert twice."""
    file = read_header(FILES / "mixtral.gguf")
    arrays = {name: (array, Kind.F32) for name, array in read_dense(file).items()}
    arrays["blk.0.ffn_up.3.weight"] = np.zeros((32, 32), np.float32), Kind.F32
    path = write(tmp_path / "twice.gguf", file.metadata, arrays)
    with pytest.raises(ParamsError, match=r"two tensors are both .*block_sparse_moe\.experts\.3"):
        converters.load(path)


def test_experts_in_tensors_of_their_own(tmp_path):
    """As files were before there were stacks."""
    file = read_header(FILES / "mixtral.gguf")
    arrays = {}
    for name, array in read_dense(file).items():
        if "_exps." not in name:
            arrays[name] = array, Kind.F32
            continue
        for i, expert in enumerate(array):
            arrays[name.replace("_exps.weight", f".{i}.weight")] = expert, Kind.F32
    model = converters.load(write(tmp_path / "old.gguf", file.metadata, arrays), dtype="float32")
    expected = converters.load(FILES / "mixtral.gguf", dtype="float32")
    assert list(model.params) == list(expected.params)
    assert all((model.params[n] == a).all().item() for n, a in expected.params.items())


def test_blocks_that_predict_further_ahead_are_left_out(tmp_path):
    file = read_header(FILES / "glm4_moe.gguf")
    arrays = {name: (array, Kind.F32) for name, array in read_dense(file).items()}
    arrays["blk.2.nextn.eh_proj.weight"] = np.zeros((32, 64), np.float32), Kind.F32
    metadata = {**file.metadata, "glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    model = converters.load(write(tmp_path / "ahead.gguf", metadata, arrays))
    assert model.config.num_layers == 2


def test_a_file_without_a_tokenizer_is_a_model_without_text():
    assert reader.read(FILES / "mistral.gguf").tokenizer is None
    assert converters.load(FILES / "mistral.gguf").tokenizer is None


@pytest.mark.parametrize("count", [1 << 60, 1 << 40, 1 << 32])
@pytest.mark.parametrize("item", [0, 6, 8])
def test_arrays_longer_than_the_file(item, count, tmp_path):
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    key = struct.pack("<Q", 3) + b"a.b" + struct.pack("<IIQ", 9, item, count)
    (tmp_path / "long.gguf").write_bytes(header + key + bytes(100))
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="truncated or damaged"):
            read_header(tmp_path / "long.gguf")
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


def test_arrays_of_arrays_are_refused(tmp_path):
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    key = struct.pack("<Q", 3) + b"a.b" + struct.pack("<IIQ", 9, 9, 1)
    (tmp_path / "nested.gguf").write_bytes(header + key + bytes(100))
    with pytest.raises(SourceError, match="is an array of unknown type 9"):
        read_header(tmp_path / "nested.gguf")
