"""GGUF tensor types: which arrive packed without loss, and which are expanded.

Blocks of 32 values with one scale become MLX's affine groups of 32, because their values are
`scale * integer + bias` too (ggml's definitions, q unsigned unless said):

| type | value | bits |
|---|---|---|
| Q4_0, Q5_0 | d (q - 8), d (q - 16) | 4, 5 |
| Q4_1, Q5_1 | d q + m | 4, 5 |
| Q8_0 | d q, q signed | 8 |
| Q4_K, Q5_K | (d s) q - (e m); s, m for each 32 of 256 | 4, 5 |

Scales and biases are float16 as stored, but float32 for the last two, where they are products.
MXFP4 is MLX's mode of that name. Everything else that the `gguf` package knows is expanded by it,
to float32: the products of scales in such blocks need more than 16 bits. Only ternary types (TQ)
fit in float16, and arrive in it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from converters.gguf.file import GGUFFile, GGUFTensor
from funcrt.errors import ParamsError, SourceError, some_of

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, quants

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Codes = tuple[Bytes, Floats, Floats]
"""Integers `[N, 32]`, and the scale and bias of each group `[N]`."""

Parts = dict[str, mx.array]
"""One tensor: dense as "" alone, packed as "weight", "scales" and for affine ones "biases"."""

DENSE = {"F32": (np.float32, None), "F16": (np.float16, None), "BF16": (np.uint16, mx.bfloat16)}
_TERNARY = ("TQ1_0", "TQ2_0")
_GROUP = 32
_STEP = 1 << 16  # blocks taken apart at once: their bits take up more than they do
_HALVES = np.array([[0], [4]], np.uint8)  # shifts to the low and the high half of a byte


def _codes_q4_0(blocks: Bytes) -> Codes:
    d = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), d, np.float16(-8) * d


def _codes_q4_1(blocks: Bytes) -> Codes:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _codes_q5_0(blocks: Bytes) -> Codes:
    d = _halves(blocks, 0)
    return _fives(blocks[:, 6:], blocks[:, 2:6]), d, np.float16(-16) * d


def _codes_q5_1(blocks: Bytes) -> Codes:
    return _fives(blocks[:, 8:], blocks[:, 4:8]), _halves(blocks, 0), _halves(blocks, 2)


def _codes_q8_0(blocks: Bytes) -> Codes:
    d = _halves(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(0x80), d, np.float16(-128) * d  # flipping the sign adds 128


def _codes_q4_k(blocks: Bytes) -> Codes:
    scales, biases = _scales_k(blocks)
    # 32 bytes hold a group in their low halves and the next one in their high halves.
    quads = blocks[:, 16:].reshape(-1, 4, 1, 32) >> _HALVES
    return (quads & np.uint8(15)).reshape(-1, _GROUP), scales, biases


def _codes_q5_k(blocks: Bytes) -> Codes:
    scales, biases = _scales_k(blocks)
    quads = blocks[:, 48:].reshape(-1, 4, 1, 32) >> _HALVES
    low = (quads & np.uint8(15)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]  # bit g is of group g
    return (low | ((high & np.uint8(1)) << np.uint8(4))).reshape(-1, _GROUP), scales, biases


# Name -> bytes in a block, bits of an integer, and what takes blocks apart.
AFFINE: dict[str, tuple[int, int, Callable[[Bytes], Codes]]] = {
    "Q4_0": (18, 4, _codes_q4_0),
    "Q4_1": (20, 4, _codes_q4_1),
    "Q5_0": (22, 5, _codes_q5_0),
    "Q5_1": (24, 5, _codes_q5_1),
    "Q8_0": (34, 8, _codes_q8_0),
    "Q4_K": (144, 4, _codes_q4_k),
    "Q5_K": (176, 5, _codes_q5_k),
}
MICROSCALED = "MXFP4"
EXPANDED = (
    "Q2_K", "Q3_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "IQ4_NL", "IQ4_XS", *_TERNARY,
)  # fmt: skip


def check_kinds(file: GGUFFile) -> None:
    """Raise SourceError naming each tensor type that cannot be read, with tensors that have it."""
    known = (*DENSE, *AFFINE, MICROSCALED, *EXPANDED)
    unreadable: dict[str, list[str]] = {}
    for tensor in file.tensors.values():
        if tensor.kind not in known:
            unreadable.setdefault(tensor.kind, []).append(tensor.name)
    if unreadable:
        parts = [f"{kind} ({some_of(names, 3)})" for kind, names in unreadable.items()]
        raise SourceError(
            f"{file.path} has tensors of types that are not supported: {'; '.join(parts)}; "
            f"use a file with {', '.join(known)}"
        )


def read_tensor(tensor: GGUFTensor) -> Parts:
    """The tensor, packed if its type allows it and it has rows to pack.

    Packed: uint32 `[..., rows, columns * bits / 32]`, the rest `[..., rows, columns / 32]`.
    Raises ParamsError for scales that are not finite, and for dense values of quantized types that
    are not.
    """
    raw = tensor.read()
    if tensor.kind in DENSE:
        dtype, view = DENSE[tensor.kind]
        dense = mx.array(raw.view(dtype).reshape(tensor.shape))
        return {"": dense if view is None else dense.view(view)}
    if len(tensor.shape) > 1:
        if tensor.kind in AFFINE:
            return _affine(tensor, raw)
        if tensor.kind == MICROSCALED:
            return _microscaled(tensor, raw)
    return {"": _expand(tensor, raw)}


def _affine(tensor: GGUFTensor, raw: Bytes) -> Parts:
    size, bits, take_apart = AFFINE[tensor.kind]
    blocks = raw.reshape(-1, size)
    groups = prod(tensor.shape) // _GROUP
    each = groups // len(blocks)
    packed = np.empty((groups, bits), np.uint32)
    kept = np.float16 if each == 1 else np.float32
    scales, biases = np.empty(groups, kept), np.empty(groups, kept)
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        for start in range(0, len(blocks), _STEP):
            codes, *both = take_apart(blocks[start : start + _STEP])
            place = slice(start * each, start * each + len(codes))
            packed[place], scales[place], biases[place] = _pack(codes, bits), *both
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise ParamsError(f"{tensor.name}: the scales of its {tensor.kind} blocks are not finite")
    *rows, columns = tensor.shape
    return {
        "weight": mx.array(packed.reshape(*rows, columns * bits // 32)),
        "scales": mx.array(scales.reshape(*rows, columns // _GROUP)),
        "biases": mx.array(biases.reshape(*rows, columns // _GROUP)),
    }


def _microscaled(tensor: GGUFTensor, raw: Bytes) -> Parts:
    blocks = raw.reshape(-1, 17)  # a scale, then two values of four bits in each byte
    scales = np.ascontiguousarray(blocks[:, 0])
    if (scales == 0xFF).any():
        raise ParamsError(f"{tensor.name}: the scales of its {tensor.kind} blocks are not finite")
    *rows, columns = tensor.shape
    return {
        "weight": mx.array(_pack(_nibbles(blocks[:, 1:]), 4).reshape(*rows, columns // 8)),
        "scales": mx.array(scales.reshape(*rows, columns // _GROUP)),
    }


def _expand(tensor: GGUFTensor, raw: Bytes) -> mx.array:
    rows = raw.reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # checked below
        values = quants.dequantize(rows, GGMLQuantizationType[tensor.kind])
    if not np.isfinite(values).all():
        raise ParamsError(f"{tensor.name}: the scales of its {tensor.kind} blocks are not finite")
    kept = np.float16 if tensor.kind in _TERNARY else np.float32
    return mx.array(np.asarray(values, kept).reshape(tensor.shape))


# --- bits ----------------------------------------------------------------------------------------


def _halves(blocks: Bytes, start: int) -> Floats:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)[:, 0]


def _nibbles(packed: Bytes) -> Bytes:
    """`[N, 16]` -> `[N, 32]`: the low halves of all bytes, then the high ones."""
    values: Bytes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)
    return values


def _fives(low: Bytes, high: Bytes) -> Bytes:
    """`[N, 16]` and the fifth bits `[N, 4]` -> `[N, 32]`."""
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    values: Bytes = _nibbles(low) | (fifth << np.uint8(4))
    return values


def _scales_k(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases `[8 N]` float32 of the eight groups in each block.

    Twelve bytes hold eight s and eight m of six bits: bytes 0-3 the first four s and bytes 4-7 the
    first four m in their low six bits, bytes 8-11 the low four bits of the other s and m; the two
    highest bits of these are those of bytes 0-3 and 4-7.
    """
    d, e = (_halves(blocks, start).astype(np.float32)[:, None] for start in (0, 2))
    first, second, third = (blocks[:, start : start + 4] for start in (4, 8, 12))
    six, four = np.uint8(63), np.uint8(15)
    s = [first & six, (third & four) | ((first >> np.uint8(6)) << np.uint8(4))]
    m = [second & six, (third >> np.uint8(4)) | ((second >> np.uint8(6)) << np.uint8(4))]
    scales: Floats = d * np.concatenate(s, axis=1).astype(np.float32)
    biases: Floats = -(e * np.concatenate(m, axis=1).astype(np.float32))
    return scales.reshape(-1), biases.reshape(-1)


def _pack(codes: Bytes, bits: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Integers `[N, 32]` of so many bits -> uint32 `[N, bits]`, the first in the lowest bits."""
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 4:
        paired: Bytes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
        return np.ascontiguousarray(paired).view(np.uint32)
    # Eight at a time in one word, of which as many bytes are used as each has bits.
    words = np.zeros((len(codes), 4), np.uint64)
    for i in range(8):
        words |= codes[:, i::8].astype(np.uint64) << np.uint64(bits * i)
    used = words.astype("<u8").view(np.uint8).reshape(len(codes), 4, 8)[..., :bits]
    return np.ascontiguousarray(used).reshape(len(codes), -1).view(np.uint32)
