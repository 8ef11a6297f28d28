"""Queries, keys and values of one token of each row from their product, on CUDA, in one kernel.

Where `few_rows` does the product, it splits and turns, too.
"""

from __future__ import annotations

from typing import NamedTuple

from funcrt.ops import kernels
from funcrt.ops.rotary import Rotary

import mlx.core as mx

_THREADS = 128
# A thread has two values of a head: those that turn together, or two beyond what turns.
_SOURCE = """
extern "C" __global__ void NAME(const T* qkv, const float* cosines, const float* sines,
                                T* q, T* k, T* v) {
  const int pair = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  const int head = pair / (D / 2), i = pair % (D / 2);
  if (head >= H + 2 * K) return;
  const T* from = qkv + (row * (H + 2 * K) + head) * D;
  T* to = head < H ? q + (row * H + head) * D
    : head < H + K ? k + (row * K + head - H) * D : v + (row * K + head - H - K) * D;
  const bool turns = head < H + K && i < R / 2;
  const int a = turns && !NEIGHBOURS ? i : 2 * i;
  const int b = turns && !NEIGHBOURS ? i + R / 2 : 2 * i + 1;
  T x = from[a], y = from[b];
  if (turns) {
    const float c = cosines[row * (R / 2) + i], s = sines[row * (R / 2) + i];
    const float low = float(x), high = float(y);
    x = T(low * c - high * s);
    y = T(low * s + high * c);
  }
  to[a] = x;
  to[b] = y;
}
"""


class Waves(NamedTuple):
    """How heads turn, made once for all layers: cos and sin, float32 `[B, R/2]`."""

    cosines: mx.array
    sines: mx.array
    interleaved: bool


def make_waves(rotary: Rotary) -> Waves | None:
    """Of one token of each row; None where the kernel does not turn like that."""
    one_for_each = rotary.positions.ndim == 1 and rotary.dims % 2 == 0
    plain = rotary.past is None and rotary.factor == 1.0
    if rotary.periods is None or not one_for_each or not plain:
        return None
    angles = rotary.positions.astype(mx.float32)[:, None] * (1.0 / rotary.periods)
    return Waves(mx.cos(angles), mx.sin(angles), rotary.interleaved)


def split(
    qkv: mx.array,
    heads: int,
    kv_heads: int,
    waves: Waves,
) -> tuple[mx.array, mx.array, mx.array]:
    """Split and turn. CUDA only; it does not differentiate.

    Args:
        qkv: `[B, (H + 2 K) D]`, queries, keys and values side by side; D is even.
        heads: H.
        kv_heads: K.
        waves: see there.

    Returns:
        Queries `[B, H, 1, D]` and keys `[B, K, 1, D]`, both turned, and values `[B, K, 1, D]`.
    """
    batch, together = qkv.shape[0], heads + 2 * kv_heads
    width = qkv.shape[1] // together
    shape = (batch, kv_heads, 1, width)
    q, k, v = kernels.run(
        "split_heads",
        _SOURCE,
        {
            "T": qkv.dtype, "H": heads, "K": kv_heads, "D": width,
            "R": 2 * waves.cosines.shape[1], "NEIGHBOURS": waves.interleaved,
        },
        [qkv, waves.cosines, waves.sines],
        [],
        [((batch, heads, 1, width), qkv.dtype), (shape, qkv.dtype), (shape, qkv.dtype)],
        blocks=(-(-together * width // 2 // _THREADS), batch, 1),
        threads=_THREADS,
    )  # fmt: skip
    return q, k, v
