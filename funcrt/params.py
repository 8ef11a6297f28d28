"""Weights as a flat dict: checking against a model's spec, and the form that graphs take.

Names are those of Hugging Face. `funcrt.packing` says what packed matrices are.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from funcrt import low_rank, streams
from funcrt.errors import ParamsError, some_of
from funcrt.low_rank import Places
from funcrt.machine import available_memory, is_on_cuda
from funcrt.packing import (
    PARTS,
    Quantization,
    Transposed,
    check_packed,
    dequantize,
    packed_shape,
    quantization_of,
)

import mlx.core as mx

__all__ = [
    "FLOATS", "Fusions", "ParamSpec", "Params", "Preparation", "Quantization", "Transposed",
    "array_bytes", "cast", "check_params", "choose_dtype", "choose_preparation", "dequantize",
    "dtype_name", "evaluate_in_turn", "find_homes", "fingerprint", "hash_bytes", "packings",
    "prepare", "quantization_of", "share_rows",
]  # fmt: skip

Params = dict[str, mx.array]
ParamSpec = dict[str, tuple[int, ...]]
Fusions = dict[str, tuple[str, ...]]

FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_NOWHERE = Places()
_EASILY = 0.3
_BYTES_AHEAD = 16_000_000
_STACKED = (*PARTS, "bias")
# Never cast: what is added to scores of which small differences decide.
_EXACT = (".e_score_correction_bias",)


def dtype_name(dtype: mx.Dtype | str) -> str:
    """`mx.float16`, `"mlx.core.float16"` or `"float16"` -> `"float16"`. Raises ParamsError."""
    name = str(dtype).rsplit(".", maxsplit=1)[-1]
    if name not in FLOATS:
        raise ParamsError(f"dtype {name!r} is not supported; use {', '.join(FLOATS)}")
    return name


def check_params(
    spec: ParamSpec, params: Mapping[str, mx.array], places: Places = _NOWHERE
) -> Params:
    """The same arrays in the order of `spec`.

    Args:
        spec: name -> shape of the dense tensor.
        params: dense or packed tensors; of a packed stack that is stored without `.weight` in its
            name, the packed values are in `NAME.weight`. Changes of low rank (`funcrt.low_rank`)
            come last.
        places: where there can be changes.

    Raises:
        ParamsError: names every missing, unknown and misshapen tensor.
    """
    problems: list[str] = []
    ordered: Params = {}
    missing: list[str] = []
    for name, shape in spec.items():
        base = _base(name)
        if len(shape) > 1 and name not in ordered and f"{base}.scales" in params:
            problems += check_packed(base, packed_shape(shape), params)
            for part in PARTS:
                if f"{base}.{part}" in params:
                    ordered[f"{base}.{part}"] = params[f"{base}.{part}"]
            continue
        if name not in params:
            missing.append(name)
            continue
        ordered[name] = params[name]
        if params[name].shape != shape:
            problems.append(f"{name}: expected shape {shape}, got {params[name].shape}")
        elif params[name].dtype not in FLOATS.values():
            problems.append(f"{name}: expected a float dtype, got {params[name].dtype}")
    matrices = {_base(name): packed_shape(shape) for name, shape in spec.items() if len(shape) == 2}
    changes, wrong = low_rank.check(matrices, params, places)
    ordered |= changes
    problems += wrong
    unknown = [name for name in params if name not in ordered]
    if missing:
        problems.insert(0, f"missing: {some_of(sorted(missing), 12)}")
    if unknown:
        problems.append(f"unknown: {some_of(sorted(unknown), 12)}")
    if problems:
        raise ParamsError("weights do not match the config; " + "; ".join(problems))
    return ordered


def packings(spec: ParamSpec, params: Mapping[str, mx.array]) -> dict[str, Quantization]:
    """How every packed matrix is packed, by its name (without `.weight`)."""
    found = ((_base(name), packed_shape(shape)[-1]) for name, shape in spec.items() if shape)
    return {
        base: packing
        for base, inputs in found
        if (packing := quantization_of(params, base, inputs)) is not None
    }


def _base(name: str) -> str:
    return name.removesuffix(".weight")


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
    packed = packings(spec, params) if preparation.dequantize else {}
    ready: Params = {}
    for name, array in params.items():
        base, _, part = name.rpartition(".")
        if base not in packed or part not in PARTS:
            ready[name] = array.astype(dtype) if _is_cast(name, array) else array
        elif part == "weight":
            dense = dequantize(params, base, packed[base]).astype(dtype)
            stored = name if name in spec else base
            flip = isinstance(spec[stored], Transposed)
            ready[stored] = dense.swapaxes(-1, -2) if flip else dense
    for fused, members in preparation.fusions.items():
        _fuse(ready, fused, members)
    return ready


def _is_cast(name: str, array: mx.array) -> bool:
    return array.dtype in FLOATS.values() and not name.endswith(_EXACT)


def _fuse(params: Params, fused: str, members: tuple[str, ...]) -> None:
    parts = [part for part in _STACKED if any(f"{member}.{part}" in params for member in members)]
    for part in parts:
        arrays = [params.get(f"{member}.{part}") for member in members]
        columns = {None if array is None else array.shape[1:] for array in arrays}
        if len(columns) > 1 or None in columns:
            return
    low_rank.fuse(params, fused, {name: params[f"{name}.weight"].shape[0] for name in members})
    for part in parts:
        params[f"{fused}.{part}"] = mx.concatenate(
            [params.pop(f"{member}.{part}") for member in members], axis=0
        )


def evaluate_in_turn(arrays: Mapping[str, mx.array]) -> Iterator[str]:
    """Evaluate prepared weights in their order, beginning few of them before those ahead are done.

    So some are read while others are made, and the intermediates of few exist at a time.

    Returns:
        The name of each when it is there.
    """
    begun: deque[str] = deque()
    size = 0
    try:
        for name, array in arrays.items():
            begun.append(name)
            mx.async_eval(array)  # type: ignore[no-untyped-call]
            size += array.nbytes
            while size > _BYTES_AHEAD and len(begun) > 1:
                done = begun.popleft()
                size -= arrays[done].nbytes
                mx.eval(arrays[done])
                yield done
        while begun:
            done = begun.popleft()
            mx.eval(arrays[done])
            yield done
    except RuntimeError:
        streams.drop_errors(len(begun) + 1)  # the others' may come later
        raise


def find_homes(params: Params, ready: Params, fusions: Fusions) -> dict[str, mx.array]:
    """The prepared arrays that stored ones are, or are stacked into; expanded ones have none."""
    stacks = {member: fused for fused, members in fusions.items() for member in members}
    homes = {}
    for name in params:
        member, _, part = name.rpartition(".")
        home = name if name in ready else f"{stacks.get(member)}.{part}"
        if home in ready:
            homes[name] = ready[home]
    return homes


def share_rows(params: Params, ready: Mapping[str, mx.array], name: str, fusions: Fusions) -> None:
    """Let stored arrays be rows of the prepared one that they were stacked into, in place.

    So memory holds them once. Where they were cast or expanded, they stay what they are.
    """
    fused, _, part = name.rpartition(".")
    begin = 0
    for member in fusions.get(fused, ()) if part in _STACKED else ():
        stored = params[f"{member}.{part}"]
        if stored.dtype != ready[name].dtype:
            return
        params[f"{member}.{part}"] = ready[name][begin : begin + stored.shape[0]]
        mx.eval(params[f"{member}.{part}"])
        begin += stored.shape[0]


def fingerprint(params: Mapping[str, mx.array], config: Mapping[str, object]) -> str:
    """sha256 of a config, and of the names, shapes, dtypes and values of all weights.

    Every bit counts, so a fine-tune that changes one row of one matrix is another model. It takes
    about as long as reading the weights from a file (1 GB/s for each core).
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    names = sorted(params)
    from concurrent.futures import ThreadPoolExecutor  # loading a bundle does without it

    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock; MLX stays here
        hashes = list(pool.map(hash_bytes, [array_bytes(params[name]) for name in names]))
    for name, value in zip(names, hashes, strict=True):
        digest.update(f"{name} {params[name].shape} {params[name].dtype} {value}".encode())
    return digest.hexdigest()


def array_bytes(array: mx.array) -> memoryview:
    """The bytes of an evaluated array in row order, not copied where they already are.

    Never flattened in MLX, whose axes end at 2 GiB; embeddings and stacked experts do not.
    """
    if not array.size:
        return memoryview(b"")
    rows = array if array.ndim else array[None]  # a scalar has no last axis to view
    view = memoryview(rows.view(mx.uint8))  # type: ignore[arg-type]
    if not view.c_contiguous:  # asked first: `mx.contiguous` copies rows of what is much larger
        view = memoryview(mx.contiguous(rows).view(mx.uint8))  # type: ignore[arg-type]
    return view.cast("B")


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
    base = [array for name, array in params.items() if not low_rank.is_low_rank(name)]
    floats = [array for array in base if array.dtype in FLOATS.values()]
    matrices = [array for array in floats if array.ndim > 1]
    stored = {dtype_name(array.dtype) for array in matrices or floats}
    return next((dtype for dtype in FLOATS if dtype in stored), "float32")


def choose_preparation(config_dtype: str, params: Params, fusions: Fusions) -> Preparation:
    """Dense weights where they fit easily, packed ones elsewhere, and on Metal.

    On a CPU MLX's packed products are slow. On an H200 dense ones are at least as quick: 62 us
    against 85 for one row of [4096] -> [28672], and twice as quick in a whole model at 16 rows.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    dense = _fits_dense(params) if on_cpu else is_on_cuda() and _fits_easily(params, config_dtype)
    return Preparation(config_dtype, dequantize=dense, fusions=fusions)


def _fits_dense(params: Mapping[str, mx.array]) -> bool:
    return _count_values(params) * 4 < 0.7 * available_memory()


def _fits_easily(params: Mapping[str, mx.array], dtype: str) -> bool:
    """Packed weights were not chosen for nothing: caches and larger batches need memory, too."""
    return _count_values(params) * FLOATS[dtype].size < _EASILY * available_memory()


def _count_values(params: Mapping[str, mx.array]) -> int:
    return sum(
        # At least two bits a value: an upper bound that needs no spec.
        array.size * (16 if array.dtype == mx.uint32 else 1)
        for array in params.values()
    )
