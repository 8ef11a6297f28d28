"""Queries, keys and values of one token of each row from their product, on CUDA, in one kernel.

What follows it, up to the product of attention's output, leaves the memory idle: small kernels that
wait for each other. So the same kernel asks for the matrix of that product, which is in the cache
of the GPU when it is needed.
"""

from __future__ import annotations

from funcrt.ops.kernels import cuda_kernel
from funcrt.ops.rotary import Rotary

import mlx.core as mx

_THREADS = 128
_MOST_LINES = 1 << 17  # 16 MiB: a third of the cache of an H100 or H200
# A thread has two values of a head: those that turn together, or two beyond what turns. The turn
# is that of MLX's own kernel, operation for operation.
_SOURCE = """
  const int pair = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  FETCH
  constexpr int HALF = D / 2;
  const int head = pair / HALF, i = pair % HALF;
  if (head >= H + 2 * K) return;
  const T* from = qkv + ((long long)row * (H + 2 * K) + head) * D;
  const bool turns = head < H + K && i < R / 2;
  const int a = turns && !NEIGHBOURS ? i : 2 * i;
  const int b = turns && !NEIGHBOURS ? i + R / 2 : 2 * i + 1;
  T* to = head < H ? q + ((long long)row * H + head) * D
    : head < H + K ? k + ((long long)row * K + head - H) * D
    : v + ((long long)row * K + head - H - K) * D;
  if (!turns) {
    to[a] = from[a];
    to[b] = from[b];
    return;
  }
  const float frequency = 1.0 / periods[i];
  const float angle = static_cast<float>(offset[row]) * frequency;
  const float c = cos(angle), s = sin(angle);
  const float x = static_cast<float>(from[a]), y = static_cast<float>(from[b]);
  to[a] = static_cast<T>(x * c - y * s);
  to[b] = static_cast<T>(x * s + y * c);
"""
_FETCH = """
  if (row == gridDim.y - 1) {
    for (int line = pair; line < LINES; line += gridDim.x * blockDim.x)
      asm volatile("prefetch.global.L2 [%0];"
                   :: "l"(reinterpret_cast<const char*>(next) + line * 128));
    return;
  }
"""


def supports(qkv: mx.array, rotary: Rotary, width: int) -> bool:
    """Whether the kernel is for these activations `[B, N D]` and this embedding."""
    return (
        qkv.ndim == 2
        and width % 2 == rotary.dims % 2 == 0
        and rotary.periods is not None
        and rotary.past is None
        and rotary.factor == 1.0
        and rotary.positions.ndim == 1
    )


def split(
    qkv: mx.array,
    heads: int,
    kv_heads: int,
    width: int,
    rotary: Rotary,
    upcoming: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Split and turn. CUDA only; it does not differentiate.

    Args:
        qkv: `[B, (H + 2 K) D]`, queries, keys and values side by side.
        heads: H.
        kv_heads: K.
        width: D.
        rotary: that `supports` says yes to.
        upcoming: a matrix that is multiplied with soon; or None.

    Returns:
        Queries `[B, H, 1, D]` and keys `[B, K, 1, D]`, both turned, and values `[B, K, 1, D]`.
    """
    batch = qkv.shape[0]
    shape = (batch, kv_heads, 1, width)
    blocks = -(-(heads + 2 * kv_heads) * width // 2 // _THREADS)
    inputs, lines = [qkv, rotary.positions, rotary.periods], 0
    if upcoming is not None:
        inputs.append(upcoming)
        lines = min(_MOST_LINES, upcoming.nbytes // 128)
    kernel = cuda_kernel(
        "split_heads",
        ("qkv", "offset", "periods", *["next"] * (upcoming is not None)),
        ("q", "k", "v"),
        _SOURCE.replace("FETCH", "" if upcoming is None else _FETCH),
    )
    q, k, v = kernel(
        inputs=inputs,
        template=[
            ("T", qkv.dtype), ("H", heads), ("K", kv_heads), ("D", width), ("R", rotary.dims),
            ("NEIGHBOURS", rotary.interleaved), ("LINES", lines),
        ],
        grid=(blocks * _THREADS, batch + (upcoming is not None), 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(batch, heads, 1, width), shape, shape],
        output_dtypes=[qkv.dtype] * 3,
    )  # fmt: skip
    return q, k, v
