"""Weights as mlx-lm saves them, under the names of published files.

mlx-lm stacks the matrices of all experts, and takes the matrix that latent attention absorbs apart
into what multiplies queries and what makes values.
"""

from __future__ import annotations

from funcrt.config import ModelConfig
from funcrt.errors import ParamsError
from funcrt.layers.latent import LatentAttention
from funcrt.layers.moe import Experts, StackedExperts
from funcrt.models import FAMILIES
from funcrt.params import Params, dequantize, quantization_of

import mlx.core as mx

STACK, QUERIES, VALUES = "switch_mlp", "embed_q", "unembed_out"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PARTS = ("weight", "scales", "biases")


def published_layout(config: ModelConfig, params: Params) -> Params:
    """Tensors as the family has them; what is not named as in mlx-lm stays as it is.

    Stacks are taken apart without a copy. The absorbed matrix comes out dense, since its first half
    is packed along the other axis.

    Raises:
        ParamsError: a stack of another number of experts.
    """
    if not any(f".{name}." in key for key in params for name in (STACK, QUERIES)):
        return params
    params = dict(params)
    for part in FAMILIES[config.model_type].network(config).walk():
        if isinstance(part, Experts) and not isinstance(part, StackedExperts):
            _take_apart(params, part)
        elif isinstance(part, LatentAttention):
            _join(params, part)
    return params


def _take_apart(params: Params, experts: Experts) -> None:
    stack = f"{experts.name.rpartition('.')[0]}.{STACK}"
    for theirs, ours in zip(_PROJECTIONS, experts.projections, strict=True):
        for piece in _PARTS:
            name = f"{stack}.{theirs}.{piece}"
            if name not in params:
                continue
            array = params.pop(name)
            if array.ndim != 3 or array.shape[0] != experts.count:
                raise ParamsError(
                    f"{name}: expected {experts.count} matrices, got shape {array.shape}"
                )
            for i in range(experts.count):
                params[f"{experts.name}.{i}.{ours}.{piece}"] = array[i]


def _join(params: Params, attention: LatentAttention) -> None:
    name = attention.up.name.rpartition(".")[0]
    queries, values = f"{name}.{QUERIES}", f"{name}.{VALUES}"
    if f"{queries}.weight" not in params or f"{values}.weight" not in params:
        return
    both = [
        _pop_dense(params, queries, attention.head_dim).swapaxes(-1, -2),  # [H,D,C]
        _pop_dense(params, values, attention.rank),  # [H,V,C]
    ]
    joined = mx.concatenate(both, axis=1)
    params[f"{attention.up.name}.weight"] = joined.reshape(-1, joined.shape[-1])


def _pop_dense(params: Params, name: str, inputs: int) -> mx.array:
    packing = quantization_of(params, name, inputs)
    pieces = {f"{name}.{piece}": params.pop(f"{name}.{piece}", None) for piece in _PARTS}
    found = {key: array for key, array in pieces.items() if array is not None}
    if packing is None:
        return found[f"{name}.weight"]
    return dequantize(found, name, packing).astype(found[f"{name}.scales"].dtype)
