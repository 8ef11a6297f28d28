"""Mixtures of experts (arXiv:1701.06538): each token goes through those that a router chose.

No expert has a capacity: no token, padding or not, takes another's place. Rows are computed one by
one, so none changes another, bit for bit.

Shape key, besides that of `funcrt.ops`: X experts, k of them for each token, N = B T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from funcrt.errors import ParamsError
from funcrt.ops.products import scaling
from funcrt.packing import PARTS, quantization_of
from funcrt.params import Params

import mlx.core as mx

_PARTS = (*PARTS, "bias")
# From so many rows for each expert on, they are brought in the order of their experts, whose
# weights are then read once. Measured: twice as fast on a CPU from about 4 on, and on an H200
# slower below 16, 6 times as fast at 500.
_SORT_FROM = {mx.DeviceType.cpu: 2, mx.DeviceType.gpu: 16}


class Pick(NamedTuple):
    """Which expert each of the rows before a product goes to.

    Attributes:
        experts: `[N, k]`, or `[N k]` in order.
        ordered: whether they are in order.
    """

    experts: mx.array
    ordered: bool


def dispatch(
    x: mx.array,
    *,
    chosen: mx.array,
    weights: mx.array,
    experts: Callable[[mx.array, Pick], mx.array],
    total: int,
) -> mx.array:
    """Each token's experts, added up by weight in float32.

    Args:
        x: `[..., E]`.
        chosen: `[..., k]`, each below X.
        weights: `[..., k]`.
        experts: from rows `[..., 1, E]` and where each goes to `[..., 1, E]`: some `expert_linear`
            and an activation.
        total: X, by which it is decided whether sorting pays off.

    Returns:
        `[..., E]` in the dtype of x.
    """
    count = chosen.shape[-1]
    rows, picked = x.reshape(-1, x.shape[-1]), mx.stop_gradient(chosen.reshape(-1, count))
    if picked.size < total * _SORT_FROM[mx.default_device().type]:
        out = experts(rows[:, None, None], Pick(picked, ordered=False))  # [N,k,1,E]
    else:
        flat = picked.reshape(-1)
        order = mx.argsort(flat)
        # The axis comes before the rows are taken: of rows with a new axis, MLX's ordered product
        # on CUDA reads the wrong ones.
        out = experts(rows[:, None][order // count], Pick(flat[order], ordered=True))
        out = out[mx.argsort(order)]  # [N k,1,E]
    out = out.reshape(*chosen.shape, -1).astype(mx.float32)
    return mx.sum(out * weights[..., None].astype(mx.float32), axis=-2).astype(x.dtype)


def expert_linear(params: Params, name: str, x: mx.array, pick: Pick) -> mx.array:
    """`x [..., 1, I]` -> `[..., 1, O]`, each row by its expert of `name`: see `expert_weights`."""
    packing = quantization_of(params, name, x.shape[-1])
    if packing is None:
        y = _product(x, params[f"{name}.weight"], pick)
    else:
        y = mx.gather_qmm(
            x,
            params[f"{name}.weight"],
            *scaling(params, name, packing, x.dtype),
            rhs_indices=pick.experts,
            transpose=True,
            sorted_indices=pick.ordered,
            **packing._asdict(),
        )
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias[pick.experts][..., None, :].astype(x.dtype)


def _product(x: mx.array, weight: mx.array, pick: Pick) -> mx.array:
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    dtype = mx.float32 if on_cpu else x.dtype  # MLX's gathered products on a CPU take no other
    experts = pick.experts
    if weight.dtype != dtype and experts.size < weight.shape[0]:
        weight = weight[experts.reshape(-1)]  # cast those alone
        experts = mx.arange(experts.size, dtype=mx.uint32).reshape(experts.shape)
    y = mx.gather_mm(
        x.astype(dtype),
        weight.astype(dtype).swapaxes(-1, -2),
        rhs_indices=experts,
        sorted_indices=pick.ordered,
    )
    return y.astype(x.dtype)


def expert_weights(params: Params, fused: str, members: tuple[str, ...], experts: int) -> Params:
    """The matrices of all experts as one stack `[X, O, I]`, dense or packed, and biases `[X, O]`.

    Args:
        params: holds `fused` `[X O, I]` if `prepare` stacked it, else each of `members`.
        fused: its name, and that of the result.
        members: every expert's matrices in order; two each (gate and up, say) come out of
            `expert_linear` side by side.
        experts: X.

    Raises:
        ParamsError: members that are packed differently, or of which some only have a bias.
    """
    names = (fused,) if f"{fused}.weight" in params else members
    stacked: Params = {}
    for part in _PARTS:
        arrays = [params[f"{name}.{part}"] for name in names if f"{name}.{part}" in params]
        if len(arrays) not in (0, len(names)) or len({a.shape[1:] for a in arrays}) > 1:
            raise ParamsError(
                f"{fused}: expected all experts to be packed alike, but {part} of {names[0]} and "
                f"others differ in shape, or some have none; quantize all of them the same way"
            )
        if arrays:
            joined = mx.concatenate(arrays, axis=0) if len(arrays) > 1 else arrays[0]
            stacked[f"{fused}.{part}"] = joined.reshape(experts, -1, *joined.shape[1:])
    return stacked


def stored_stack(params: Params, name: str, *, transposed: bool = False) -> Params:
    """A stack that is stored as one, as `expert_linear` takes it, without biases.

    Args:
        params: hold the tensor `name`, or its packed parts `name.weight [X, O, ...]` and so on.
        name: of the stack.
        transposed: whether the dense one is `[X, I, O]`.
    """
    if name in params:
        dense = params[name]
        return {f"{name}.weight": dense.swapaxes(-1, -2) if transposed else dense}
    parts = [f"{name}.{part}" for part in PARTS]
    return {part: params[part] for part in parts if part in params}
