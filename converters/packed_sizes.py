"""The tensors that a checkpoint should hold, as its config.json tells before any is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.published import quantization_settings
from funcrt.errors import ConfigError
from funcrt.packing import MICROSCALED, Quantization, packed_shape
from funcrt.params import Params, ParamSpec

import mlx.core as mx


def zeros(config: Mapping[str, Any], spec: ParamSpec, dtype: mx.Dtype) -> Params:
    """Zeros in the shapes of `spec`, packed where `config` says so; nothing is computed.

    Matrices that mlx-lm names otherwise than the family (stacks of experts) are taken to be packed
    like most.

    Raises ConfigError for settings that are none, or of a method that is not read.
    """
    params: Params = {}
    for name, shape in spec.items():
        base, rows = name.removesuffix(".weight"), packed_shape(shape)
        packing = _packing_of(config, name, base, rows)
        if packing is None:
            params[name] = mx.zeros(shape, dtype)
            continue
        *outer, inputs = rows
        grouped = (*outer, inputs // packing.group_size)
        params[f"{base}.weight"] = mx.zeros((*outer, inputs * packing.bits // 32), mx.uint32)
        if packing.mode == "affine":
            params |= {f"{base}.{part}": mx.zeros(grouped, dtype) for part in ("scales", "biases")}
        else:
            params[f"{base}.scales"] = mx.zeros(grouped, mx.uint8)
    return params


def _packing_of(
    config: Mapping[str, Any], name: str, base: str, rows: tuple[int, ...]
) -> Quantization | None:
    is_stack = name == base and len(rows) == 3
    if quantization_settings(config).get("quant_method") == "mxfp4":
        return MICROSCALED["mxfp4"] if is_stack else None
    settings = config.get("quantization")
    matrix = (name != base and len(rows) > 1 and rows[-2] != 1) or is_stack
    if not matrix or not isinstance(settings, Mapping) or not settings:
        return None
    own = settings.get(base, True)  # false keeps it dense
    if own is False or rows[-1] % _read(settings).group_size:
        return None
    return _read(own if isinstance(own, Mapping) else settings)


def _read(settings: Mapping[str, Any]) -> Quantization:
    mode = settings.get("mode", "affine")
    bits, group_size = settings.get("bits"), settings.get("group_size")
    if mode in MICROSCALED:
        return MICROSCALED[mode]
    if mode != "affine" or not isinstance(bits, int) or not isinstance(group_size, int):
        raise ConfigError(
            f"config quantization: expected bits, group_size and one of the modes affine, "
            f"{', '.join(MICROSCALED)}; got {dict(settings)!r:.200}"
        )
    return Quantization(bits, group_size)
