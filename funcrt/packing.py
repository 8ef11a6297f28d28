"""Packed matrices, in every form that MLX multiplies: how arrays tell it, and what they stand for.

A packed matrix `NAME` has its values in `NAME.weight` (uint32), rows apart, and for each group of
values in a row `NAME.scales`. Its bits, group size and mode follow from shapes and dtypes, so that
a params dict needs nothing beside it:

| mode | bits | group | scales | value |
|---|---|---|---|---|
| affine | 2, 3, 4, 5, 6, 8 | 32, 64, 128 | float | scale * integer + bias, from `NAME.biases` |
| mxfp4 | 4 | 32 | uint8 e8m0 | scale * e2m1 |
| mxfp8 | 8 | 32 | uint8 e8m0 | scale * e4m3 |
| nvfp4 | 4 | 16 | uint8 e4m3 | scale * e2m1 |

e2m1, e4m3 and e8m0 are the floats of the OCP Microscaling Formats (MX) Specification, version 1.0,
§5; nvfp4 is NVIDIA's form with smaller groups (arXiv:2509.25149 §2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from funcrt.errors import ParamsError

import mlx.core as mx

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)  # what MLX's packed products take
PARTS = ("weight", "scales", "biases")
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class Quantization(NamedTuple):
    """How one matrix is packed (the arguments of `mx.quantized_matmul`)."""

    bits: int
    group_size: int
    mode: str = "affine"


MICROSCALED = {
    "mxfp4": Quantization(4, 32, "mxfp4"),
    "mxfp8": Quantization(8, 32, "mxfp8"),
    "nvfp4": Quantization(4, 16, "nvfp4"),
}


class Transposed(tuple[int, ...]):
    """Shape `[..., I, O]` of a dense tensor that is `[..., O, I]` where it is packed.

    Packed matrices have their groups along the inputs that a product adds up.
    """

    __slots__ = ()


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`[..., O, I]` of a matrix in a spec: the values that its packed form holds."""
    return (*shape[:-2], shape[-1], shape[-2]) if isinstance(shape, Transposed) else shape


def quantization_of(params: Mapping[str, mx.array], name: str, inputs: int) -> Quantization | None:
    """Packing of the matrix `name` with `inputs` columns before packing; None if it is dense.

    Raises ParamsError for scales in bytes that are of no known mode.
    """
    scales = params.get(f"{name}.scales")
    if scales is None:
        return None
    bits = params[f"{name}.weight"].shape[-1] * 32 // inputs
    group_size = inputs // max(scales.shape[-1], 1)
    if scales.dtype != mx.uint8:
        return Quantization(bits, group_size)
    for packing in MICROSCALED.values():
        if (packing.bits, packing.group_size) == (bits, group_size):
            return packing
    raise ParamsError(
        f"{name}: {bits} bits in groups of {group_size} with scales of one byte are of no mode "
        f"that is known: {', '.join(f'{p.mode} ({p[0]} in {p[1]})' for p in MICROSCALED.values())}"
    )


def check_packed(base: str, shape: tuple[int, ...], params: Mapping[str, mx.array]) -> list[str]:
    """What is wrong with a packed matrix `base` that holds `shape` `[..., O, I]` values."""
    weight, scales = params.get(f"{base}.weight"), params[f"{base}.scales"]
    *rows, inputs = shape
    if weight is None or weight.dtype != mx.uint32 or list(weight.shape[:-1]) != rows:
        found = "nothing" if weight is None else f"{weight.shape} {weight.dtype}"
        return [f"{base}.weight: expected packed uint32 for {shape}, got {found}"]
    bits, left = divmod(weight.shape[-1] * 32, inputs)
    if scales.dtype == mx.uint8 and f"{base}.biases" not in params:
        return _check_microscaled(base, (*rows, inputs), 0 if left else bits, scales)
    biases = params.get(f"{base}.biases")
    if biases is None:
        return [f"{base}: has scales but no biases, which affine quantization needs"]
    fitting = [(*rows, inputs // size) for size in GROUP_SIZES if inputs % size == 0]
    if scales.shape not in fitting or biases.shape != scales.shape:
        return [
            f"{base}: scales {scales.shape} and biases {biases.shape} do not fit {shape} "
            f"in groups of {', '.join(map(str, GROUP_SIZES))}"
        ]
    if scales.dtype not in _FLOATS or biases.dtype != scales.dtype:
        return [f"{base}: scales and biases must share a float dtype"]
    if left or bits not in AFFINE_BITS:
        return [f"{base}.weight: {weight.shape[-1]} packed columns do not hold {inputs} values"]
    return []


def _check_microscaled(base: str, shape: tuple[int, ...], bits: int, scales: mx.array) -> list[str]:
    *rows, inputs = shape
    for packing in MICROSCALED.values():
        fits = bits == packing.bits and inputs % packing.group_size == 0
        if fits and scales.shape == (*rows, inputs // packing.group_size):
            return []
    known = ", ".join(f"{p.mode} ({p[0]} in {p[1]})" for p in MICROSCALED.values())
    return [
        f"{base}: scales of one byte {scales.shape} and weights of {bits} bits do not fit {shape} "
        f"in any mode: {known}"
    ]


def dequantize(params: Mapping[str, mx.array], base: str, packing: Quantization) -> mx.array:
    """The dense float32 matrix `base`: 16-bit scales lose nothing before the caller's one cast.

    Bit for bit what `mx.dequantize` gives. Pure; unlike that, it exports in every mode.
    """
    weight, scales = params[f"{base}.weight"], params[f"{base}.scales"]
    if packing.mode != "affine":
        values = _table(packing.bits)[weight.view(mx.uint8)]  # the first values in the low bits
        values = values.reshape(*scales.shape, packing.group_size)
        factors = (_e4m3() if packing.mode == "nvfp4" else _e8m0())[scales]
        return (values * factors[..., None]).reshape(*scales.shape[:-1], -1)
    return mx.dequantize(
        weight,
        scales.astype(mx.float32),
        params[f"{base}.biases"].astype(mx.float32),
        group_size=packing.group_size,
        bits=packing.bits,
    )


def expand_fp8(codes: mx.array) -> mx.array:
    """e4m3 codes (uint8) -> float32 of the same shape."""
    return _e4m3()[codes]


def expand_e8m0(codes: mx.array) -> mx.array:
    """e8m0 codes (uint8) -> float32 powers of two of the same shape; infinity for 255."""
    return _e8m0()[codes]


def unfit_scales(scales: mx.array, group_size: int) -> mx.array:
    """Whether any scale is no number, as a bool scalar that is still to be computed.

    Args:
        scales: of one packed matrix, or its biases.
        group_size: of scales in bytes: 16 tells nvfp4 from the others.
    """
    if scales.dtype != mx.uint8:
        return ~mx.all(mx.isfinite(scales))
    if group_size == MICROSCALED["nvfp4"].group_size:
        return mx.any((scales & 0x7F) == 0x7F)
    return mx.any(scales == 0xFF)


# Tables stand in for conversions that MLX does not export. They are made once: one constant in a
# graph, however many matrices it expands.


@lru_cache
def _table(bits: int) -> mx.array:
    """float32 `[256, n]`: the n values in each byte of packed weights."""
    if bits == 8:
        return _e4m3()[:, None]
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # e2m1
    values = half + [-value for value in half]
    return mx.array([[values[byte & 15], values[byte >> 4]] for byte in range(256)])


@lru_cache
def _e4m3() -> mx.array:
    """float32 `[256]`: a sign, 4 bits of exponent, 3 of mantissa; no infinity, two NaNs."""
    half = [
        math.ldexp(code % 8, -9) if code < 8 else math.ldexp(8 + code % 8, code // 8 - 10)
        for code in range(127)
    ]
    half.append(math.nan)
    return mx.array(half + [-value for value in half])


@lru_cache
def _e8m0() -> mx.array:
    """float32 `[256]`: powers of two; the last code is NaN, for which MLX takes 2**128."""
    return mx.array([math.ldexp(1.0, code - 127) for code in range(255)] + [math.inf])
