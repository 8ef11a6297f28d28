"""Weights as other tools than MLX have quantized them: which are read, and what becomes of them.

| `quant_method` | tensors | becomes |
|---|---|---|
| none | `.scales`, `.biases` of MLX | kept packed |
| `mxfp4` (gpt-oss) | `_blocks`, `_scales` | kept packed, the same bits |
| `fp8` (DeepSeek-V3, arXiv:2412.19437 §3.3) | e4m3, and a scale for each block or tensor | dense |

Everything else is refused by name. Scales of activations are left out: activations stay as they
are, which is at least as exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funcrt.errors import ConfigError, ParamsError, some_of
from funcrt.packing import expand_e8m0, expand_fp8, unfit_scales
from funcrt.params import FLOATS, Params, ParamSpec, packings

import mlx.core as mx

METHODS = ("fp8", "mxfp4")
_KEYS = ("quantization_config", "quantization")
_SCALE = "_scale_inv"
_ACTIVATIONS = ("activation_scale", "input_scale")
_FP4_BYTES = 16  # of a block of 32 values


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of another tool than MLX, empty where there are none.

    Raises ConfigError for a method that is not read, naming it.
    """
    for key in _KEYS:
        settings = config.get(key) or {}
        if not isinstance(settings, Mapping):
            raise ConfigError(f"config {key}: expected settings, got {settings!r}")
        method = settings.get("quant_method")
        if method is None:
            continue
        if method not in METHODS:
            raise ConfigError(
                f"weights quantized with {method!r} are not supported; use a dense checkpoint, "
                f"one quantized by MLX, or one of {', '.join(METHODS)}"
            )
        return settings
    return {}


def without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as it is once `expand` is done. Raises ConfigError, see there."""
    if not quantization_settings(config):
        return dict(config)
    return {key: value for key, value in config.items() if key not in _KEYS}


def expand(config: Mapping[str, Any], params: Params, dtype: str | None = None) -> Params:
    """Tensors of a checkpoint in forms that `funcrt.packing` knows, or dense; lazily.

    Args:
        config: with its quantization settings.
        params: as stored.
        dtype: of the dense ones; None is bfloat16, what such models are trained in. They are
            products of an exact float32 value and its scale, rounded once to float32, then to it.

    Raises:
        ConfigError: a method that is not read.
        ParamsError: scales that are missing, no numbers, or do not fit; all are named.
    """
    settings = quantization_settings(config)
    method = settings.get("quant_method")
    if method == "mxfp4":
        params = _pack_mxfp4(params)
    elif method == "fp8":
        params = _expand_fp8(settings, params, FLOATS[dtype or "bfloat16"])
    bare = [
        name
        for name, array in params.items()
        if array.dtype == mx.uint8 and not name.endswith(".scales")
    ]
    if bare:
        raise ParamsError(
            "tensors of one byte a value have no scales that say what they mean: "
            f"{some_of(sorted(bare))}"
        )
    return params


def check_scales(spec: ParamSpec, params: Mapping[str, mx.array]) -> None:
    """Raise ParamsError naming packed matrices of which scales or biases are no finite numbers."""
    flags = {
        f"{base}.{part}": unfit_scales(params[f"{base}.{part}"], packing.group_size)
        for base, packing in packings(spec, params).items()
        for part in ("scales", "biases")
        if f"{base}.{part}" in params
    }
    _refuse(flags)


def _refuse(flags: Mapping[str, mx.array]) -> None:
    mx.eval(list(flags.values()))
    if wrong := [name for name, flag in flags.items() if flag.item()]:
        raise ParamsError(
            f"scales that are no finite numbers: {some_of(sorted(wrong))}; the file is damaged or "
            "was quantized wrongly: fetch or quantize it again"
        )


# --- mxfp4 as gpt-oss has it ---------------------------------------------------------------------


def _pack_mxfp4(params: Params) -> Params:
    """`NAME_blocks` `[X, O, groups, 16]` and `NAME_scales` -> `NAME.weight` and `NAME.scales`.

    Both have two values in a byte, the first in its low half.
    """
    packed = dict(params)
    for name in params:
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" not in params:
            raise ParamsError(f"{name} has no {name.removesuffix('_scales')}_blocks beside it")
        if not name.endswith("_blocks"):
            continue
        base = name.removesuffix("_blocks")
        blocks, scales = packed.pop(name), packed.pop(f"{base}_scales", None)
        if scales is None:
            raise ParamsError(f"{name} has no {base}_scales beside it")
        fits = blocks.dtype == scales.dtype == mx.uint8 and blocks.ndim > 2
        if not fits or blocks.shape != (*scales.shape, _FP4_BYTES):
            raise ParamsError(
                f"{base}: expected blocks of {_FP4_BYTES} bytes with a scale each, got blocks "
                f"{blocks.shape} {blocks.dtype} and scales {scales.shape} {scales.dtype}"
            )
        packed[f"{base}.weight"] = blocks.view(mx.uint32).flatten(-2)
        packed[f"{base}.scales"] = scales
    return packed


# --- fp8 in blocks -------------------------------------------------------------------------------


def _expand_fp8(settings: Mapping[str, Any], params: Params, dtype: mx.Dtype) -> Params:
    block = settings.get("weight_block_size")
    dense, flags, problems = dict(params), {}, []
    for name in [name for name in params if name.endswith(_SCALE)]:
        target = name.removesuffix(_SCALE)
        codes, scale = params.get(target), dense.pop(name)
        if codes is None or codes.dtype != mx.uint8:
            problems.append(f"{name} has no {target} of one byte a value beside it")
            continue
        flags[name] = unfit_scales(scale, 0)
        scale = expand_e8m0(scale) if scale.dtype == mx.uint8 else scale.astype(mx.float32)
        sizes = _block_size(codes.shape, scale.shape, block)
        if sizes is None:
            problems.append(f"{name}: {scale.shape} does not fit {codes.shape} in blocks {block}")
        else:
            dense[target] = _scaled(codes, scale, sizes).astype(dtype)
    if problems:
        raise ParamsError(f"fp8 weights and scales do not fit: {some_of(sorted(problems))}")
    _refuse(flags)
    return {name: array for name, array in dense.items() if not name.endswith(_ACTIVATIONS)}


def _block_size(
    shape: tuple[int, ...], scales: tuple[int, ...], block: Any
) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None if the scales do not fit."""
    if len(shape) < 2:
        return None
    *stack, rows, columns = shape
    if scales in ((), (1,)) or scales in ((*stack,), (*stack, 1, 1)):  # one for each matrix
        return rows, columns
    if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(map(_is_size, block))):
        return None
    down, across = block
    return (down, across) if scales == (*stack, -(-rows // down), -(-columns // across)) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _scaled(codes: mx.array, scale: mx.array, sizes: tuple[int, int]) -> mx.array:
    """float32 `[..., O, I]`: each value times the scale of its block."""
    *stack, rows, columns = codes.shape
    down, across = sizes
    tall, wide = -(-rows // down), -(-columns // across)
    edges = [(0, 0)] * len(stack) + [(0, tall * down - rows), (0, wide * across - columns)]
    blocks = mx.pad(codes, edges).reshape(*stack, tall, down, wide, across)
    whole = scale.size == 1 and len(stack) > 0
    scale = scale.reshape(1 if whole else (*stack, tall, 1, wide, 1))
    values = (expand_fp8(blocks) * scale).reshape(*stack, tall * down, wide * across)
    return values[..., :rows, :columns]
