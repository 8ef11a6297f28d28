"""Exponentials in the form that the device is fast at. Traceable; they differentiate.

MLX's own take 10 to 15 ns a value on x86-64, where its build for CPUs calls the C library for every
step of a polynomial: a fifth of a decode step of 8 rows, more of a prompt. A power of two is one
such call, and takes 3 to 5 ns unless it underflows. Rounding `x log2(e)` makes the result less
exact the larger x is: 1e-6 of it at exp(-20).
"""

from __future__ import annotations

import math

import mlx.core as mx

_LARGEST = 100.0  # its power of two is finite, and what second derivatives divide by
_LEAST = -126.0  # powers of two below are not normal numbers, and slow


def exp(x: mx.array) -> mx.array:
    """`exp(x)`, any shape, in the dtype of x."""
    return mx.power(2.0, x * math.log2(math.e)) if _has_slow_exp(x) else mx.exp(x)


def silu(x: mx.array) -> mx.array:
    """`x sigmoid(x)` (arXiv:1702.03118), any shape, in the dtype of x."""
    if not _has_slow_exp(x):
        return x * mx.sigmoid(x)
    # What is infinite has no gradient. Of x so low that the bound on powers counts, -1000 is next
    # to nothing, too, and lower ones need not be.
    return mx.maximum(x, -1e3) / (1 + mx.power(2.0, mx.minimum(x * -math.log2(math.e), _LARGEST)))


def softmax(x: mx.array, scale: float = 1.0, *, in_place: bool = False) -> mx.array:
    """Softmax of `scale x` over the last axis, accumulated in float32, in the dtype of x.

    Args:
        x: any shape.
        scale: positive.
        in_place: take no more memory than x, where it may be dropped: powers take several times
            that.
    """
    if in_place or not _has_slow_exp(x):
        return mx.softmax(x if scale == 1.0 else x * scale, axis=-1, precise=True)
    top = mx.stop_gradient(mx.max(x, axis=-1, keepdims=True))
    powers = (x - top) * (scale * math.log2(math.e))
    # Of hidden slots, which may be most: what underflows takes the C library longer than `exp`.
    weights = mx.where(powers < _LEAST, 0.0, mx.power(2.0, mx.maximum(powers, _LEAST)))
    return weights / mx.sum(weights, axis=-1, keepdims=True)


def logsumexp(x: mx.array) -> mx.array:
    """`log(sum(exp(x)))` over the last axis, which is kept.

    Not finite if any of x is NaN or +inf, or all are -inf; other -inf add nothing.
    """
    if not _has_slow_exp(x):
        return mx.logsumexp(x, axis=-1, keepdims=True)
    top = mx.stop_gradient(mx.max(x, axis=-1, keepdims=True))
    return top + mx.log(mx.sum(exp(x - top), axis=-1, keepdims=True))


def _has_slow_exp(x: mx.array) -> bool:
    """Not by the processor: what is exported for CPUs is the same on all of them."""
    return x.dtype == mx.float32 and mx.default_device().type == mx.DeviceType.cpu
