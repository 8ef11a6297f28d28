"""Weights as a flat dict: checking against a model's spec, and the form that graphs take.

Names are those of Hugging Face. A quantized matrix `NAME.weight` is packed in uint32 and comes with
`NAME.scales` and `NAME.biases`; its bits and group size follow from the shapes, so that a params
dict needs nothing beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from funcrt.errors import ParamsError
from funcrt.machine import available_memory

import mlx.core as mx

Params = dict[str, mx.array]
ParamSpec = dict[str, tuple[int, ...]]
Fusions = dict[str, tuple[str, ...]]

FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)  # what MLX's packed products take
_PARTS = ("weight", "scales", "biases", "bias")
# Never cast: what is added to scores of which small differences decide.
_EXACT = (".e_score_correction_bias",)


class Quantization(NamedTuple):
    """How one matrix is packed (the arguments of `mx.quantized_matmul`)."""

    bits: int
    group_size: int


def dtype_name(dtype: mx.Dtype | str) -> str:
    """`mx.float16`, `"mlx.core.float16"` or `"float16"` -> `"float16"`. Raises ParamsError."""
    name = str(dtype).rsplit(".", maxsplit=1)[-1]
    if name not in FLOATS:
        raise ParamsError(f"dtype {name!r} is not supported; use {', '.join(FLOATS)}")
    return name


def quantization_of(params: Mapping[str, mx.array], name: str, inputs: int) -> Quantization | None:
    """Packing of the matrix `name` with `inputs` columns before packing; None if it is dense."""
    scales = params.get(f"{name}.scales")
    if scales is None:
        return None
    packed = params[f"{name}.weight"].shape[-1]
    return Quantization(bits=packed * 32 // inputs, group_size=inputs // scales.shape[-1])


def check_params(spec: ParamSpec, params: Mapping[str, mx.array]) -> Params:
    """The same arrays in the order of `spec`.

    Args:
        spec: name -> shape of the dense tensor.
        params: dense or affine-quantized tensors.

    Raises:
        ParamsError: names every missing, unknown and misshapen tensor.
    """
    problems: list[str] = []
    ordered: Params = {}
    missing: list[str] = []
    for name, shape in spec.items():
        if name not in params:
            missing.append(name)
            continue
        base = name.removesuffix(".weight")
        ordered[name] = params[name]
        if base != name and f"{base}.scales" in params:
            problems += _check_quantized(base, shape, params)
            for part in ("scales", "biases"):
                if f"{base}.{part}" in params:
                    ordered[f"{base}.{part}"] = params[f"{base}.{part}"]
        elif params[name].shape != shape:
            problems.append(f"{name}: expected shape {shape}, got {params[name].shape}")
        elif params[name].dtype not in FLOATS.values():
            problems.append(f"{name}: expected a float dtype, got {params[name].dtype}")
    unknown = [name for name in params if name not in ordered]
    if missing:
        problems.insert(0, f"missing: {_listed(missing)}")
    if unknown:
        problems.append(f"unknown: {_listed(unknown)}")
    if problems:
        raise ParamsError("weights do not match the config; " + "; ".join(problems))
    return ordered


def _listed(names: list[str], most: int = 12) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _check_quantized(
    base: str, shape: tuple[int, ...], params: Mapping[str, mx.array]
) -> list[str]:
    weight, scales = params[f"{base}.weight"], params[f"{base}.scales"]
    biases = params.get(f"{base}.biases")
    if biases is None:
        return [f"{base}: has scales but no biases; only affine quantization is supported"]
    *rows, inputs = shape
    if weight.dtype != mx.uint32 or list(weight.shape[:-1]) != rows:
        return [
            f"{base}.weight: expected packed uint32 for {shape}, got {weight.shape} {weight.dtype}"
        ]
    fitting = [(*rows, inputs // size) for size in GROUP_SIZES if inputs % size == 0]
    if scales.shape not in fitting or biases.shape != scales.shape:
        return [
            f"{base}: scales {scales.shape} and biases {biases.shape} do not fit {shape} "
            f"in groups of {', '.join(map(str, GROUP_SIZES))}"
        ]
    if scales.dtype not in FLOATS.values() or biases.dtype != scales.dtype:
        return [f"{base}: scales and biases must share a float dtype"]
    bits, left = divmod(weight.shape[-1] * 32, inputs)
    if left or bits not in AFFINE_BITS:
        return [f"{base}.weight: {weight.shape[-1]} packed columns do not hold {inputs} values"]
    return []


# --- the form that graphs take -------------------------------------------------------------------


@dataclass(frozen=True)
class Preparation:
    """How stored weights become the ones that graphs take.

    Attributes:
        dtype: floating leaves are cast to it, but for those that must stay exact.
        dequantize: expand packed matrices to dense ones.
        fusions: fused name -> the matrices stacked into it, in order (q/k/v, gate/up).
    """

    dtype: str
    dequantize: bool
    fusions: Fusions


def prepare(params: Params, spec: ParamSpec, preparation: Preparation) -> Params:
    """Pure and traceable: dequantize, cast and fuse, in a fixed key order.

    Matrices packed differently from each other are left unfused.
    """
    dtype = FLOATS[preparation.dtype]
    ready: Params = {}
    for name, array in params.items():
        base, _, part = name.rpartition(".")
        packing = quantization_of(params, base, spec.get(f"{base}.weight", (1,))[-1])
        if (
            packing is not None
            and preparation.dequantize
            and part in ("weight", "scales", "biases")
        ):
            if part == "weight":
                ready[name] = dequantize(params, base, packing).astype(dtype)
        else:
            ready[name] = array.astype(dtype) if _is_cast(name, array) else array
    for fused, members in preparation.fusions.items():
        _fuse(ready, fused, members)
    return ready


def _is_cast(name: str, array: mx.array) -> bool:
    return array.dtype in FLOATS.values() and not name.endswith(_EXACT)


def dequantize(params: Mapping[str, mx.array], base: str, packing: Quantization) -> mx.array:
    """The dense float32 matrix `base`: 16-bit scales lose nothing before the caller's one cast."""
    return mx.dequantize(
        params[f"{base}.weight"],
        params[f"{base}.scales"].astype(mx.float32),
        params[f"{base}.biases"].astype(mx.float32),
        group_size=packing.group_size,
        bits=packing.bits,
    )


def _fuse(params: Params, fused: str, members: tuple[str, ...]) -> None:
    parts = [part for part in _PARTS if any(f"{member}.{part}" in params for member in members)]
    for part in parts:
        arrays = [params.get(f"{member}.{part}") for member in members]
        columns = {None if array is None else array.shape[1:] for array in arrays}
        if len(columns) > 1 or None in columns:
            return
    for part in parts:
        params[f"{fused}.{part}"] = mx.concatenate(
            [params.pop(f"{member}.{part}") for member in members], axis=0
        )


def evaluate_singly(arrays: Iterable[mx.array]) -> None:
    """Evaluate prepared weights one by one, so that only one's intermediates exist at a time."""
    for array in arrays:
        mx.eval(array)


def fingerprint(params: Mapping[str, mx.array], config: Mapping[str, object]) -> str:
    """sha256 of a config, and of the names, shapes, dtypes and values of all weights.

    Every bit counts, so a fine-tune that changes one row of one matrix is another model. It takes
    about as long as reading the weights from a file (1 GB/s for each core).
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    names = sorted(params)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock; MLX stays here
        hashes = list(pool.map(hash_bytes, [array_bytes(params[name]) for name in names]))
    for name, value in zip(names, hashes, strict=True):
        digest.update(f"{name} {params[name].shape} {params[name].dtype} {value}".encode())
    return digest.hexdigest()


def array_bytes(array: mx.array) -> memoryview:
    """The bytes of an evaluated array in row order, not copied where they already are."""
    rows = mx.contiguous(array).reshape(-1)  # a scalar has no last axis to view
    return memoryview(rows.view(mx.uint8))  # type: ignore[arg-type]


def hash_bytes(content: memoryview) -> str:
    """sha256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


# --- host policy ---------------------------------------------------------------------------------


def cast(params: Mapping[str, mx.array], dtype: str) -> Params:
    """Floating leaves in `dtype`; packed ones as they are, and those that must stay exact."""
    return {
        name: array.astype(FLOATS[dtype]) if _is_cast(name, array) else array
        for name, array in params.items()
    }


def choose_dtype(params: Mapping[str, mx.array], wanted: mx.Dtype | str | None = None) -> str:
    """Compute dtype: the one that is `wanted`, or a choice for the default device.

    float32 on CPU when the dense weights fit in memory (MLX's 16-bit CPU products are slower than
    float32 ones); otherwise the widest float dtype that matrices, or their scales, are stored in.
    """
    if wanted is not None:
        return dtype_name(wanted)
    if mx.default_device().type == mx.DeviceType.cpu and _fits_dense(params):
        return "float32"
    stored = {
        dtype_name(array.dtype)
        for array in params.values()
        if array.ndim > 1 and array.dtype in FLOATS.values()
    }
    return next((dtype for dtype in FLOATS if dtype in stored), "float32")


def choose_preparation(config_dtype: str, params: Params, fusions: Fusions) -> Preparation:
    """Dense weights on CPU when they fit (its packed products are slow), packed ones elsewhere."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return Preparation(config_dtype, dequantize=on_cpu and _fits_dense(params), fusions=fusions)


def _fits_dense(params: Mapping[str, mx.array]) -> bool:
    values = sum(
        # At least two bits a value: an upper bound that needs no spec.
        array.size * (16 if array.dtype == mx.uint32 else 1)
        for array in params.values()
    )
    return values * 4 < 0.7 * available_memory()
