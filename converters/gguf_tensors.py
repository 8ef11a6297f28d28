"""GGUF tensor types that arrive without loss: dense floats, and blocks as MLX affine groups of 32.

A block holds 32 values of one row: `w = d * (q - 8)` for Q4_0, `w = d * q + m` for Q4_1 and
`w = d * q` with signed q for Q8_0 (ggml's definitions). MLX computes `w = scale * q + bias` with
unsigned q, so that only the bit order changes. In 4-bit blocks byte i holds values i and i + 16;
MLX puts values 2i and 2i + 1 there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from converters.gguf_file import GGUFFile, GGUFTensor
from funcrt.errors import ParamsError, SourceError
from funcrt.params import Params

import mlx.core as mx
import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Half = np.ndarray[Any, np.dtype[np.float16]]
Unpack = Callable[[Bytes], tuple[Bytes, Half, Half]]

_LOW, _FOUR = np.uint8(0x0F), np.uint8(4)
DENSE = {"F32": (np.float32, None), "F16": (np.float16, None), "BF16": (np.uint16, mx.bfloat16)}


def _unpack_q4_0(blocks: Bytes) -> tuple[Bytes, Half, Half]:
    d = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), d, np.float16(-8) * d


def _unpack_q4_1(blocks: Bytes) -> tuple[Bytes, Half, Half]:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _unpack_q8_0(blocks: Bytes) -> tuple[Bytes, Half, Half]:
    d = _halves(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(0x80), d, np.float16(-128) * d  # flipping the sign bit adds 128


# Name -> bytes in a block of 32, and what takes them apart.
QUANTIZED: dict[str, tuple[int, Unpack]] = {
    "Q4_0": (18, _unpack_q4_0),
    "Q4_1": (20, _unpack_q4_1),
    "Q8_0": (34, _unpack_q8_0),
}


def check_kinds(file: GGUFFile) -> None:
    """Raise SourceError naming each tensor type that cannot be read, with tensors that have it."""
    unreadable: dict[str, list[str]] = {}
    for tensor in file.tensors.values():
        if tensor.kind not in DENSE and tensor.kind not in QUANTIZED:
            unreadable.setdefault(tensor.kind, []).append(tensor.name)
    if unreadable:
        parts = [
            f"{kind} ({', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)})"
            for kind, names in unreadable.items()
        ]
        raise SourceError(
            f"{file.path} has tensors of types that are not supported: {'; '.join(parts)}; "
            f"use a file with {', '.join([*QUANTIZED, *DENSE])}"
        )


def read_tensor(file: GGUFFile, tensor: GGUFTensor, name: str) -> Params:
    """The tensor under its new `name`, or packed `.weight`, `.scales` and `.biases` beside it.

    Packed: uint32 `[rows, columns * bits / 32]`, scales and biases float16 `[rows, columns / 32]`.
    Raises ParamsError for a quantized tensor that is no matrix, or scales that are not finite.
    """
    raw = file.read(tensor)
    if tensor.kind in DENSE:
        dtype, view = DENSE[tensor.kind]
        dense = mx.array(raw.view(dtype).reshape(tensor.shape))
        return {name: dense if view is None else dense.view(view)}
    base = name.removesuffix(".weight")
    if base == name or len(tensor.shape) != 2:
        raise ParamsError(f"{tensor.name}: {tensor.kind} is for matrices, got {tensor.shape}")
    block_bytes, unpack = QUANTIZED[tensor.kind]
    with np.errstate(over="ignore"):  # checked below
        packed, scales, biases = unpack(raw.reshape(-1, block_bytes))
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise ParamsError(f"{tensor.name}: the scales of its {tensor.kind} blocks are not finite")
    rows = tensor.shape[0]
    return {
        f"{base}.weight": mx.array(np.ascontiguousarray(packed).view(np.uint32).reshape(rows, -1)),
        f"{base}.scales": mx.array(scales.reshape(rows, -1)),
        f"{base}.biases": mx.array(biases.reshape(rows, -1)),
    }


def _halves(blocks: Bytes, start: int) -> Half:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    values: Bytes = np.concatenate([packed & _LOW, packed >> _FOUR], axis=1)  # [N, 32]
    paired: Bytes = values[:, 0::2] | (values[:, 1::2] << _FOUR)
    return paired
