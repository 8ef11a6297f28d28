"""What the Metal kernels of mlx-lm's Muse Spark compute, in operations that every device has.

Where a kernel rounds to the dtype of its input, so do these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    """Normed and scaled queries `[..., H, D]`, normed keys `[..., K, D]` of `[..., 2(H+K)D]`."""
    both = qkvg[..., : (n_heads + n_kv_heads) * head_dim]
    both = both.reshape(*qkvg.shape[:-1], n_heads + n_kv_heads, head_dim)
    normed = mx.fast.rms_norm(both, None, eps)
    queries = normed[..., :n_heads, :].astype(mx.float32) * query_scale
    return [queries.astype(qkvg.dtype), normed[..., n_heads:, :]]


def qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: int | mx.array, **norm: Any
) -> list[mx.array]:
    """The same, rotated in pairs of neighbours from position `offset` (of each row) on."""

    def rotate(x: mx.array) -> mx.array:
        turned = mx.fast.rope(
            x.swapaxes(1, 2), x.shape[-1], traditional=True, base=rope_base, scale=1.0,
            offset=offset,
        )  # fmt: skip
        return turned.swapaxes(1, 2)

    return [rotate(x) for x in qk_norm(qkvg, **norm)]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Heads `[B, H, T, D]` normed, gated by `[B, T, HD]` and put side by side `[B, T, HD]`."""
    normed = mx.fast.rms_norm(x.astype(mx.float32), None, eps).swapaxes(1, 2)
    gated = normed.reshape(gate.shape) * mx.sigmoid(gate.astype(mx.float32))
    return gated.astype(x.dtype)


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    """The experts with the largest biased scores, largest first, and their unbiased weights."""
    scores = mx.sigmoid(logits * multiplier)  # [..., X]
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    total = mx.sum(weights, axis=-1, keepdims=True)
    return [chosen, weights / (total + score_eps) * route_scale]


def pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    """The float32 stream, normed."""
    return mx.fast.rms_norm(stream, norm.weight.astype(mx.float32), norm.eps).astype(dtype)


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[mx.array, mx.array | None]:
    """The float32 stream with a normed branch added, and that normed for the next layer."""
    if post_weight is not None:
        branch = post_weight.astype(branch.dtype) * branch
    normed = mx.fast.rms_norm(branch, None, post_eps).astype(mx.float32)
    stream = alpha * stream + beta * normed
    if next_norm is None:
        return stream, None
    return stream, pre_norm(stream, next_norm, dtype=branch.dtype)


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    """The normed outputs of experts `[..., X, E]`, added by weight `[..., X]` in their order."""
    scaled = experts.astype(mx.float32) * norm_weight.astype(mx.float32)
    parts = mx.fast.rms_norm(scaled, None, eps)
    parts = parts * weights.astype(experts.dtype).astype(mx.float32)[..., None]
    total = mx.zeros_like(experts[..., 0, :])
    for i in range(experts.shape[-2]):
        total = (total.astype(mx.float32) + parts[..., i, :]).astype(experts.dtype)
    return total


KERNELS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        expert_routing, norm_add_norm, post_expert_norm_combine, pre_norm, qk_norm, qk_norm_rope,
        rms_norm_sigmoid_gate,
    )
}  # fmt: skip
