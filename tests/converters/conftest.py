"""A tiny llama checkpoint, and writers for the two formats that share no code with the readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import converters  # noqa: F401  (before mlx: it picks the host BLAS)

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 50000.0,
    "rope_scaling": None,
}

Weights = dict[str, np.ndarray[Any, Any]]


def make_weights(config: Mapping[str, Any]) -> Weights:
    """Random float32 tensors under Hugging Face names."""
    rng = np.random.default_rng(0)
    e, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    h = config["num_attention_heads"] * config["head_dim"]
    k = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, e)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (e,)
        for name, rows, columns in (("q", h, e), ("k", k, e), ("v", k, e), ("o", e, h)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, columns)
            if config["attention_bias"]:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        for name, rows, columns in (("gate", f, e), ("up", f, e), ("down", e, f)):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = (rows, columns)
            if config["mlp_bias"]:
                shapes[f"{layer}.mlp.{name}_proj.bias"] = (rows,)
    shapes["model.norm.weight"] = (e,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, e)
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Any], shards: int = 1
) -> Path:
    """A Hugging Face folder, in `shards` files with an index if more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    arrays = {name: mx.array(array) for name, array in weights.items()}
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), arrays)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: arrays[name] for name in list(arrays)[shard::shards]}
        mx.save_safetensors(str(folder / file), part)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def permute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to the rows of q and k."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Weights,
    kind: Kind = Kind.F32,
    edit: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> Path:
    """A GGUF file of arch llama: matrices in `kind`, vectors in float32. `edit` adds to it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, array in weights.items():
        key = heads.get(name.split(".")[-2])
        rows = array if key is None else permute(array, config[key])
        target = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        if rows.ndim == 2 and kind is not Kind.F32:
            writer.add_tensor(target, quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(rows))
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Tiny:
    """The checkpoint, its writers, and a folder to write to. Tests change config and weights."""

    make_weights = staticmethod(make_weights)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = dict(CONFIG)
        self.weights = make_weights(self.config)

    def change(self, **config: Any) -> None:
        self.config.update(config)
        self.weights = make_weights(self.config)

    def hf(self, shards: int = 1) -> Path:
        return write_folder(self.folder / "hf", self.config, self.weights, shards)

    def gguf(
        self,
        kind: Kind = Kind.F32,
        edit: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    ) -> Path:
        return write_gguf(self.folder / "tiny.gguf", self.config, self.weights, kind, edit)


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)
