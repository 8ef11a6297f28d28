"""Products with packed matrices, in the form that is fastest for so many rows on this device."""

from __future__ import annotations

from funcrt.machine import is_on_cuda
from funcrt.packing import Quantization
from funcrt.params import Params

import mlx.core as mx

# Measured on an H200, 4 bits in groups of 64, [4096] -> [28672], bfloat16 (dense: 62 to 86 us):
# MLX's packed product of 1, 2, 4, 8, 16, 32 rows takes 85, 145, 274, 94, 71, 125 us, of 16
# matrices of one row each 832 us; expanding the matrix takes 220 us and then the dense product.
_FEWEST = 8
_EXPANDED_FROM = 128


def packed_product(
    params: Params, name: str, x: mx.array, packing: Quantization, *, transpose: bool = True
) -> mx.array:
    """`x [..., I]` -> `[..., O]` by a packed matrix `[O, I]`, or `[I, O]` without `transpose`."""
    if params[f"{name}.weight"].ndim > 2 or not transpose or not is_on_cuda():
        return _multiply(params, name, x, packing, transpose)
    # One matrix of all rows: of several, MLX would read the weights again for each.
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if packing.mode == "affine" and count >= _EXPANDED_FROM:
        y = rows @ _expand(params, name, packing, x.dtype).T
    elif 1 < count < _FEWEST:
        y = _multiply(params, name, mx.pad(rows, [(0, _FEWEST - count), (0, 0)]), packing)[:count]
    else:
        y = _multiply(params, name, rows, packing)
    return y.reshape(*x.shape[:-1], -1)


def scaling(
    params: Params, name: str, packing: Quantization, dtype: mx.Dtype
) -> tuple[mx.array, mx.array | None]:
    """Scales and biases of a packed matrix, as products with activations of `dtype` take them."""
    scales = params[f"{name}.scales"]
    if packing.mode != "affine":
        return scales, None
    return scales.astype(dtype), params[f"{name}.biases"].astype(dtype)


def _multiply(
    params: Params, name: str, x: mx.array, packing: Quantization, transpose: bool = True
) -> mx.array:
    return mx.quantized_matmul(
        x,
        params[f"{name}.weight"],
        *scaling(params, name, packing, x.dtype),
        transpose=transpose,
        **packing._asdict(),
    )


def _expand(params: Params, name: str, packing: Quantization, dtype: mx.Dtype) -> mx.array:
    """The dense matrix `[O, I]`, of values rounded to `dtype`."""
    scales, biases = scaling(params, name, packing, dtype)
    return mx.dequantize(params[f"{name}.weight"], scales, biases, **packing._asdict())
