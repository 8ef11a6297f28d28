"""Checkpoints as their makers ship them, written byte by byte: mxfp4, fp8 in blocks."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from funcrt.storage import load_arrays, load_json

import mlx.core as mx
import numpy as np

Array = np.ndarray[Any, Any]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def write_typed(path: Path, tensors: Mapping[str, tuple[str, Array | mx.array]]) -> None:
    """A safetensors file of tensors with the type that each is to have by name."""
    header, data = {}, b""
    for name, (kind, array) in tensors.items():
        plain = np.array(array.view(mx.uint8)) if isinstance(array, mx.array) else array
        content = plain.tobytes()
        header[name] = {
            "dtype": kind, "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }  # fmt: skip
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """The folder with a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), "utf-8")


def to_mxfp4(rows: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Blocks `[..., O, groups, 16]`, scales `[..., O, groups]` and the values that they mean.

    Nearest codes to `rows`, with a scale of each group of 32 that is near its largest value.
    """
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    power = np.floor(np.log2(np.abs(groups).max(-1) / 6)) + rng.integers(0, 2, groups.shape[:-1])
    scaled = groups / 2.0 ** power[..., None]
    codes = np.abs(scaled[..., None] - E2M1).argmin(-1).astype(np.uint8)
    values = (E2M1[codes] * 2.0 ** power[..., None]).astype(np.float32)
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    return blocks, (power + 127).astype(np.uint8), values.reshape(rows.shape)


def ship_gpt_oss(source: Path, folder: Path, **changes: Any) -> dict[str, Array]:
    """A dense gpt-oss as OpenAI ships it.

    Returns the values that its packed stacks mean, by name, as the dense file stores stacks.
    """
    rng = np.random.default_rng(0)
    config = {**load_json(source / "config.json"), **changes}
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    write_config(folder, {**config, "quantization_config": settings})
    tensors: dict[str, tuple[str, Array | mx.array]] = {}
    meant: dict[str, Array] = {}
    for name, array in load_arrays(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = ("BF16", array.astype(mx.bfloat16))
            continue
        rows = np.array(array.astype(mx.float32)).swapaxes(-1, -2)
        blocks, scales, values = to_mxfp4(rows, rng)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = ("U8", blocks), ("U8", scales)
        meant[name] = values.swapaxes(-1, -2)
    write_typed(folder / "model.safetensors", tensors)
    return meant


def e4m3(codes: Array) -> Array:
    """What 8-bit floats mean, float32: a sign, 4 bits of exponent, 3 of mantissa."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, (codes & 7).astype(np.float32)
    small, large = mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    values = np.where(exponent == 0, small, large) * np.where(sign == 1, -1.0, 1.0)
    return np.where((codes & 0x7F) == 0x7F, np.nan, values).astype(np.float32)


def to_fp8(rows: Array, block: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Codes `[O, I]`, a float32 scale for each block, and the float32 values that they mean."""
    down, across = block
    tall, wide = -(-rows.shape[0] // down), -(-rows.shape[1] // across)
    scales = np.zeros((tall, wide), np.float32)
    codes, values = np.zeros(rows.shape, np.uint8), np.zeros(rows.shape, np.float32)
    for i in range(tall):
        for j in range(wide):
            part = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
            scales[i, j] = np.abs(rows[part]).max() / 448 * (1 + 0.1 * ((i + j) % 3))
            codes[part] = np.array(mx.to_fp8(mx.array(rows[part] / scales[i, j])))
            values[part] = e4m3(codes[part]) * scales[i, j]
    return codes, scales, values


def ship_fp8(
    source: Path, folder: Path, block: tuple[int, int] | None, *, static: bool = False
) -> dict[str, Array]:
    """A dense checkpoint with its projections as 8-bit floats, as DeepSeek or Mistral ship it.

    Args:
        source: of the golden cases.
        folder: where to.
        block: rows and columns that share a scale; None for one for each matrix.
        static: with scales for activations too.

    Returns:
        The values that the packed matrices mean, by name.
    """
    config = load_json(source / "config.json")
    settings = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block and list(block),
        "activation_scheme": "static" if static else "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    write_config(folder, {**config, "quantization_config": settings})
    tensors: dict[str, tuple[str, Array | mx.array]] = {}
    meant: dict[str, Array] = {}
    for name, array in load_arrays(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = ("BF16", array.astype(mx.bfloat16))
            continue
        rows = np.array(array.astype(mx.float32))
        codes, scales, meant[name] = to_fp8(rows, block or rows.shape)
        tensors[name] = ("F8_E4M3", codes)
        tensors[f"{name}_scale_inv"] = ("F32", scales if block else scales.reshape(()))
        if static:
            base = name.removesuffix("weight")
            tensors[f"{base}activation_scale"] = ("F32", np.ones((), np.float32))
    write_typed(folder / "model.safetensors", tensors)
    return meant
