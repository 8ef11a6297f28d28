"""Changes that are added to the matrices of a model for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from funcrt.adapters.adapter import Adapter, Change, misfits, refuse, whole_tensors
from funcrt.packing import PARTS, Quantization, Transposed, dequantize, quantization_of
from funcrt.params import Params, ParamSpec

import mlx.core as mx

if TYPE_CHECKING:
    from funcrt.model import Model


def fuse(model: Model, adapter: Adapter, *, lazy: bool = False, expand: bool = False) -> Model:
    """The fine-tune itself: changes are added in float32, and the sums rounded once.

    Sums are stored in the dtype of their matrix. A packed matrix is expanded, changed and packed
    again in the same way, which rounds it once more: `keep` does not.

    Args:
        model: the base.
        adapter: what is added.
        lazy: leave the sums to be computed when they are used.
        expand: leave the sums of packed matrices dense, in the dtype of their scales, float32 where
            those are no floats: for who packs them again otherwise.

    Raises:
        ParamsError: changes that do not fit the model, all named.
    """
    params = {**model.params, **whole_tensors(model, adapter)}
    refuse(adapter, [p for n, c in adapter.changes.items() for p in misfits(model, n, c)])
    packed = 0
    for name, change in adapter.changes.items():
        if expand and f"{name}.scales" in params:
            made = _expand(model.spec, params, name, change)
            for part in PARTS:
                params.pop(f"{name}.{part}", None)
        else:
            packed += f"{name}.scales" in params
            made = fuse_matrix(model.spec, params, name, change)
        if not lazy:
            mx.eval(made)  # one by one: only one's intermediates exist at a time
        params |= made
    notes = (*model.notes, *adapter.notes)
    if packed:
        notes = (*notes, f"{packed} packed matrices were packed again after {adapter.name}")
    return model.with_params(params, notes)


def fuse_matrix(spec: ParamSpec, params: Params, name: str, change: Change) -> Params:
    """The tensors of the matrix `name` with its change, to be computed when used. Pure."""
    packing = quantization_of(params, name, change.a.shape[-1])
    if packing is not None:
        dense = _changed(dequantize(params, name, packing), change)
        return _pack(params, name, dense, packing)
    stored = f"{name}.weight" if f"{name}.weight" in params else name
    flip = isinstance(spec.get(stored), Transposed)
    array = params[stored]
    dense = array.astype(mx.float32)
    dense = _changed(dense.swapaxes(-1, -2) if flip else dense, change)
    return {stored: (dense.swapaxes(-1, -2) if flip else dense).astype(array.dtype)}


def _changed(dense: mx.array, change: Change) -> mx.array:
    dense = dense + change.b.astype(mx.float32) @ change.a.astype(mx.float32)
    if change.magnitude is None:
        return dense
    length = mx.linalg.norm(dense, axis=-1, keepdims=True)
    return dense * (change.magnitude.astype(mx.float32)[..., None] / length)


def _expand(spec: ParamSpec, params: Params, name: str, change: Change) -> Params:
    """The dense sum, as a packed matrix's family would store it."""
    packing = quantization_of(params, name, change.a.shape[-1])
    assert packing is not None  # `misfits` has found it to be
    scales = params[f"{name}.scales"].dtype
    dense = _changed(dequantize(params, name, packing), change)
    stored = name if name in spec else f"{name}.weight"
    dense = dense.swapaxes(-1, -2) if isinstance(spec.get(stored), Transposed) else dense
    return {stored: dense.astype(scales if mx.issubdtype(scales, mx.floating) else mx.float32)}


def _pack(params: Params, name: str, dense: mx.array, packing: Quantization) -> Params:
    parts = mx.quantize(dense, group_size=packing.group_size, bits=packing.bits, mode=packing.mode)
    names = [f"{name}.{part}" for part in PARTS]
    return {
        part: array.astype(params[part].dtype) for part, array in zip(names, parts, strict=False)
    }
