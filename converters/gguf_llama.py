"""The llama architecture of GGUF: metadata to config, names, and rows back in their old order."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from converters.gguf_file import GGUFFile
from converters.gguf_tensors import read_tensor
from funcrt.errors import ConfigError, ParamsError
from funcrt.params import Params

import mlx.core as mx
import numpy as np

ROPE_FACTORS = "rope_freqs.weight"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_KEYS = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "tensor_data_layout",
}  # fmt: skip


def hf_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; unknown names stay."""
    stem, _, part = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{part}"
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in _BLOCK:
        return name
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


def hf_config(file: GGUFFile, ignore: Collection[str] = ()) -> dict[str, Any]:
    """The Hugging Face config that the metadata describes.

    Raises ConfigError for a missing key, for one that is unknown and not in `ignore`, and for
    values that a llama model here cannot have.
    """
    own = {
        key.removeprefix("llama."): value
        for key, value in file.metadata.items()
        if key.startswith("llama.") and key not in ignore
    }
    # Zero, false and "" switch a feature off, so an unknown key holding them changes nothing.
    unknown = sorted(f"llama.{key}" for key, value in own.items() if value and key not in _KEYS)
    if unknown:
        raise ConfigError(
            f"{file.path}: metadata keys that may change the result are unknown: "
            f"{', '.join(unknown)}; if they do not matter here, name them in `ignore`"
        )
    heads = _count(file, own, "attention.head_count")
    hidden = _count(file, own, "embedding_length")
    head_dim = _count(file, own, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _count(file, own, key, head_dim) != head_dim:
            raise ConfigError(
                f"{file.path}: llama.{key} is {own[key]}, the head size is {head_dim}; "
                "they must be equal"
            )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _count(file, own, "vocab_size", _rows(file, "token_embd.weight")),
        "hidden_size": hidden,
        "intermediate_size": _count(file, own, "feed_forward_length"),
        "num_hidden_layers": _count(file, own, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(file, own, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _number(file, own, "attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "max_position_embeddings": _count(file, own, "context_length"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": _number(file, own, "rope.freq_base", 10000.0),
    }
    return {**config, "rope_scaling": _rope_scaling(file, own, config)}


def hf_params(file: GGUFFile, config: dict[str, Any]) -> Params:
    """Every tensor under its Hugging Face name, q and k rows in Hugging Face order."""
    params: Params = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue  # `hf_config` has read it
        name = hf_name(tensor.name)
        heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }.get(name.rpartition(".")[0].rpartition(".")[2])
        for key, array in read_tensor(file, tensor, name).items():
            if key in params:
                raise ParamsError(f"{file.path}: two tensors are both {key}")
            params[key] = array if heads is None else unpermute(array, heads, tensor.name)
    return params


def unpermute(rows: mx.array, heads: int, name: str) -> mx.array:
    """Undo the row order of GGUF, where dimensions i and i + D/2 of a head are neighbours.

    Args:
        rows: `[heads * D, ...]`: a weight, its scales or biases, or a bias.
        heads: heads stacked in the rows.
        name: for the message of ParamsError, raised when the rows do not divide.
    """
    count = rows.shape[0]
    if count % (2 * heads):
        raise ParamsError(f"{name}: {count} rows are not {heads} heads of an even size")
    order = np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    return rows[mx.array(order)]


def _rope_scaling(
    file: GGUFFile, own: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear")) or 1.0
    if "rope.scaling.type" not in own and factor != 1:
        kind = "linear"  # files older than the type key only had the factor
    original = own.get("rope.scaling.original_context_length")
    if ROPE_FACTORS in file.tensors:
        if kind not in ("none", "linear") or factor != 1:
            raise ConfigError(f"{file.path}: {ROPE_FACTORS} beside {kind} scaling is not supported")
        return _llama3_scaling(file, config, original)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(
            f"{file.path}: rope scaling {kind!r} is not supported; known: linear, yarn"
        )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _llama3_scaling(
    file: GGUFFile, config: dict[str, Any], original: int | None
) -> dict[str, Any] | None:
    """Read back the llama3 scaling from the divisors of the frequencies that it was baked into.

    With s = (original / wavelength - low) / (high - low), clipped to 0..1, a frequency is divided
    by 1 / ((1 - s) / factor + s) (transformers' `rope_type` llama3). Between the clips s is a line
    in 1 / wavelength; its slope and offset give `original` and `high` for low = 1, and any other
    low describes the same frequencies.
    """
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind != "F32" or tensor.shape != (config["head_dim"] // 2,):
        raise ConfigError(
            f"{file.path}: {ROPE_FACTORS} should be F32 ({config['head_dim'] // 2},), "
            f"got {tensor.kind} {tensor.shape}"
        )
    divisors = file.read(tensor).view(np.float32).astype(np.float64)
    if (divisors == 1).all():
        return None
    steps = np.arange(divisors.size) / divisors.size
    inverse_wavelengths = config["rope_theta"] ** -steps / (2 * math.pi)
    factor = divisors.max()
    guesses = [(original if isinstance(original, int) else 8192, 4.0)]
    with np.errstate(all="ignore"):  # a wild tensor ends in the ConfigError below
        s = (1 / divisors - 1 / factor) / (1 - 1 / factor)
        between = (s > 1e-3) & (s < 1 - 1e-3)
        if between.sum() >= 2:
            slope, offset = np.polyfit(inverse_wavelengths[between], s[between], 1)
            length, high = -slope / offset, 1 - 1 / offset
            if np.isfinite([length, high]).all():
                guesses.append((round(float(length)), round(float(high), 3)))
        for length, high in guesses:
            line = ((length * inverse_wavelengths - 1) / (high - 1)).clip(0, 1)
            if np.allclose(1 / ((1 - line) / factor + line), divisors, rtol=1e-4, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": float(factor),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": length,
                }
    raise ConfigError(
        f"{file.path}: {ROPE_FACTORS} does not hold llama3 scaling (divisors {divisors.min():.4g} "
        f"to {divisors.max():.4g}); other frequency tables are not supported"
    )


def _count(file: GGUFFile, own: dict[str, Any], key: str, default: int | None = None) -> int:
    value = own.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]  # written once per layer
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unusable(file, key, "a positive integer", value)
    return value


def _number(file: GGUFFile, own: dict[str, Any], key: str, default: float | None = None) -> float:
    value = own.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise _unusable(file, key, "a positive number", value)
    return float(value)


def _unusable(file: GGUFFile, key: str, expected: str, value: Any) -> ConfigError:
    got = (
        "differing values"
        if isinstance(value, list)
        else "nothing"
        if value is None
        else repr(value)
    )
    return ConfigError(f"{file.path}: metadata llama.{key}: expected {expected}, got {got}")


def _rows(file: GGUFFile, name: str) -> int | None:
    return file.tensors[name].shape[0] if name in file.tensors else None
