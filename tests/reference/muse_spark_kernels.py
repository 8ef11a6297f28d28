"""Muse Spark's Metal kernels in numpy, in double precision: what they are to compute, row by row.

Read off the kernels' own source, for a device that has no Metal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

Array = Any


def _wide(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def _narrow(x: Array, dtype: mx.Dtype) -> mx.array:
    return mx.array(x.astype(np.float32)).astype(dtype)


def _rms(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + eps)


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    x, split = _wide(qkvg), n_heads * head_dim
    q = x[..., :split].reshape(*x.shape[:-1], n_heads, head_dim)
    k = x[..., split : split + n_kv_heads * head_dim].reshape(*x.shape[:-1], n_kv_heads, head_dim)
    return [_narrow(_rms(q, eps) * query_scale, qkvg.dtype), _narrow(_rms(k, eps), qkvg.dtype)]


def qk_norm_rope(qkvg: mx.array, *, rope_base: float, offset: int, **norm: Any) -> list[mx.array]:
    def rotate(x: mx.array) -> mx.array:
        pairs = _wide(x)[..., 0::2] + 1j * _wide(x)[..., 1::2]  # [B,T,H,D/2]
        count = pairs.shape[-1]
        place = np.arange(offset, offset + pairs.shape[1])[:, None]
        angle = place * rope_base ** (-np.arange(count) / count)
        pairs = pairs * np.exp(1j * angle)[:, None]
        return _narrow(np.stack([pairs.real, pairs.imag], -1).reshape(x.shape), x.dtype)

    return [rotate(x) for x in qk_norm(qkvg, **norm)]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    heads = np.moveaxis(_rms(_wide(x), eps), 1, 2)
    return _narrow(heads.reshape(gate.shape) / (1 + np.exp(-_wide(gate))), x.dtype)


def expert_routing(
    logits: mx.array, expert_bias: mx.array, *, top_k: int, multiplier: float, score_eps: float,
    route_scale: float,
) -> list[mx.array]:  # fmt: skip
    scores = 1 / (1 + np.exp(-_wide(logits) * multiplier))
    biased = scores + _wide(expert_bias)
    index = np.zeros((*scores.shape[:-1], top_k), np.uint32)
    weights = np.zeros(index.shape)
    for row in np.ndindex(*scores.shape[:-1]):
        best = sorted(range(scores.shape[-1]), key=lambda i: (-biased[row][i], i))[:top_k]
        index[row], weights[row] = best, scores[row][best]
        weights[row] *= route_scale / (weights[row].sum() + score_eps)
    return [mx.array(index), _narrow(weights, mx.float32)]


def pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    return _narrow(_rms(_wide(stream), norm.eps) * _wide(norm.weight), dtype)


def norm_add_norm(
    branch: mx.array, stream: mx.array, *, alpha: mx.array, beta: mx.array,
    post_weight: mx.array | None, post_eps: float, next_norm: Any,
) -> tuple[mx.array, mx.array | None]:  # fmt: skip
    x = _wide(branch) * (1 if post_weight is None else _wide(post_weight))
    total = _wide(alpha) * _wide(stream) + _wide(beta) * _rms(x, post_eps)
    new = _narrow(total, mx.float32)
    return new, None if next_norm is None else pre_norm(new, next_norm, dtype=branch.dtype)


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    normed = _rms(_wide(experts) * _wide(norm_weight), eps)
    return _narrow((normed * _wide(weights)[..., None]).sum(-2), experts.dtype)


def of_zeros(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same for shapes and dtypes only: nothing that it is given is computed."""

    def empty(x: Any) -> Any:
        return mx.zeros(x.shape, x.dtype) if isinstance(x, mx.array) else x

    def run(*args: Any, **options: Any) -> Any:
        return kernel(*map(empty, args), **{key: empty(value) for key, value in options.items()})

    return run


KERNELS = (
    expert_routing, norm_add_norm, post_expert_norm_combine, pre_norm, qk_norm, qk_norm_rope,
    rms_norm_sigmoid_gate,
)  # fmt: skip
