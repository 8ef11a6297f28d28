"""The operations that models are made of. Pure; every one traces and exports.

All differentiate, but for those that are CUDA kernels: `few_rows`, `heads`, `one_token`.

Shape key: B batch, T tokens this call, S capacity, E model width, F MLP width, H query heads,
K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from funcrt import low_rank
from funcrt.ops.exponentials import silu, softmax
from funcrt.ops.products import packed_product
from funcrt.packing import PARTS, dequantize, quantization_of
from funcrt.params import Params

import mlx.core as mx


def embed(params: Params, name: str, tokens: mx.array, width: int, dtype: mx.Dtype) -> mx.array:
    """Rows of the (possibly packed) matrix `name`: `[B, T]` -> `[B, T, E]`.

    Ids are clipped to the vocabulary, since MLX reads past the end of the table without a check;
    hosts refuse such ids before they come here.
    """
    tokens = mx.clip(tokens, 0, params[f"{name}.weight"].shape[0] - 1)
    packing = quantization_of(params, name, width)
    if packing is None:
        rows = params[f"{name}.weight"][tokens]
    else:
        parts = [f"{name}.{part}" for part in PARTS if f"{name}.{part}" in params]
        rows = dequantize({part: params[part][tokens] for part in parts}, name, packing)
    return low_rank.add_rows(params, name, tokens, rows.astype(dtype))


def linear(params: Params, name: str, x: mx.array) -> mx.array:
    """`x [..., I]` -> `[..., O]` by the dense or packed matrix `name`, its change and its bias."""
    packing = quantization_of(params, name, x.shape[-1])
    if packing is None:
        y = x @ params[f"{name}.weight"].astype(x.dtype).T
    else:
        y = packed_product(params, name, x, packing)
    y = low_rank.add(params, name, x, y)
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias.astype(x.dtype)


def fused_linear(params: Params, fused: str, members: tuple[str, ...], x: mx.array) -> mx.array:
    """The outputs of several linears side by side: one product if `prepare` stacked them."""
    if f"{fused}.weight" in params:
        return linear(params, fused, x)
    return mx.concatenate([linear(params, member, x) for member in members], axis=-1)


def rms_norm(params: Params, name: str, x: mx.array, eps: float, offset: float = 0.0) -> mx.array:
    """Root mean square norm (arXiv:1910.07467) in float32, scaled by weight + offset."""
    weight = params[f"{name}.weight"]
    if not offset:
        return mx.fast.rms_norm(x, weight.astype(x.dtype), eps)
    # Near the offset, 16 bits would lose most of the weight: a fifth more error in all of Gemma.
    return mx.fast.rms_norm(x, weight.astype(mx.float32) + offset, eps).astype(x.dtype)


def layer_norm(params: Params, name: str, x: mx.array, eps: float) -> mx.array:
    """Layer norm (arXiv:1607.06450), accumulated in float32, with its bias if it has one."""
    weight, bias = params[f"{name}.weight"].astype(x.dtype), params.get(f"{name}.bias")
    return mx.fast.layer_norm(x, weight, None if bias is None else bias.astype(x.dtype), eps)


def soft_cap(x: mx.array, cap: float) -> mx.array:
    """Squeeze x smoothly into (-cap, cap) (Gemma 2, arXiv:2408.00118 §2)."""
    return mx.tanh(x / cap) * cap


def masked_softmax(
    scores: mx.array,
    mask: mx.array,
    sinks: mx.array | None = None,
    scale: float = 1.0,
    *,
    in_place: bool = True,
) -> mx.array:
    """Softmax over the last axis of what a bool `mask` shows, accumulated in float32.

    Args:
        scores: `[..., T, S]`.
        mask: likewise, or broadcast to it.
        sinks: `[..., 1, 1]`, scores of a key that takes a share and gives no value
            (arXiv:2309.17453); or None.
        scale: of the scores, positive; not of sinks.
        in_place: see `exponentials.softmax`.
    """
    lowest = mx.finfo(scores.dtype).min / max(scale, 1.0)  # still finite when it is scaled
    scores = mx.where(mask, scores, lowest)
    if sinks is None:
        return softmax(scores, scale, in_place=in_place)
    scores = scores if scale == 1.0 else scores * scale
    column = mx.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
    scores = mx.concatenate([scores, column], axis=-1)
    return softmax(scores, in_place=in_place)[..., :-1]


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": silu,
    "gelu": lambda x: x * 0.5 * (1 + mx.erf(x / math.sqrt(2))),
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "relu": lambda x: mx.maximum(x, 0),
}
