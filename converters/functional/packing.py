"""How a checkpoint's weights are packed, as far as its config tells: what mlx-lm makes of it.

The same decisions as in `mlx_lm.utils.load_model`, which takes them once it has the weights. Here
they are wanted before those are downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize

_MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
_MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}


def pack(module: Module, config: Mapping[str, Any]) -> Module:
    """The module with the layers packed that a checkpoint of this config has packed.

    Raises ValueError for a method that mlx-lm does not read.
    """
    legacy = _legacy(config)
    if config.get("quantization") is None and legacy.get("quant_method") == "bitnet":
        from mlx_lm.models.bitlinear_layers import bitnet_quantize

        packed: Module = bitnet_quantize(module, dict(legacy))
        return packed
    packing = config.get("quantization") or _of_legacy(legacy)
    if packing:
        mode = packing.get("mode", "affine")
        choose = _chooser(packing)
        quantize(module, packing["group_size"], packing["bits"], mode=mode, class_predicate=choose)
    return module


def _legacy(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    return config.get("quantization_config") or inner or {}


def _of_legacy(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The packing that other tools' settings mean; None where weights become dense when read."""
    method = settings.get("quant_method")
    if not settings:
        return None
    if method == "mxfp4":
        return _MXFP4
    if method == "mxfp8":
        return _MXFP8
    if method == "fp8":
        blocks = list(settings.get("weight_block_size") or ())
        return _MXFP8 if settings.get("scale_fmt") == "ue8m0" and blocks == [32, 32] else None
    if method == "compressed-tensors":
        from mlx_lm.utils import _compressed_tensors_quantization

        found: dict[str, Any] = _compressed_tensors_quantization(dict(settings))
        return found
    if method == "modelopt":
        inner = settings.get("quantization", settings)
        if inner["quant_algo"] != "NVFP4":
            raise ValueError(f"quant_algo {inner['quant_algo']!r} of modelopt is not supported")
        return {"group_size": inner.get("group_size", 16), "bits": 4, "mode": "nvfp4"}
    if method in ("awq", "gptq"):
        if settings.get("bits", 4) != 4:
            raise ValueError(f"{method} with {settings['bits']} bits is not supported, only 4")
        return {"group_size": settings.get("group_size", 128), "bits": 4}
    raise ValueError(f"quantization by {method!r} is not known to mlx-lm")


def _chooser(packing: Mapping[str, Any]) -> Callable[[str, Module], bool | dict[str, Any]]:
    def choose(path: str, part: Module) -> bool | dict[str, Any]:
        if path in packing:  # how this layer is packed, or that it is not
            chosen: bool | dict[str, Any] = packing[path]
            return chosen
        can = hasattr(part, "to_quantized")
        return can and part.weight.shape[-1] % packing["group_size"] == 0

    return choose
