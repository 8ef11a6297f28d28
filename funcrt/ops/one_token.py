"""Attention of one token of each row on CUDA, as one kernel that reads only the slots that show.

MLX's own attention with a mask goes through cuDNN there: 15 to 20 us of the host's time a call, and
every slot of the cache is read. This kernel takes 4 us, and its work grows with what is held.
A block has some query heads of one key head, over one share of the slots; a second kernel puts the
shares of long caches together. (Clusters of blocks would do without it, but MLX's CUDA graphs are
updated wrongly where only some kernels have them.) 8 values make a load of 16 bytes, D / 8 lanes a
slot; each such group of lanes goes through slots of its own, and keeps its own softmax
(arXiv:1805.02867) until all are put together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from funcrt.ops.kernels import cuda_kernel

import mlx.core as mx

_SEEN = ("q", "keys", "values", "mask")
_WIDTHS = (64, 128, 256)
_MOST_HEADS = 8  # of a block: what they add up is in registers
_WARPS = 8  # of a block: each thread may then have all the registers that there are
_SHARED = 8192  # float32 values of shared memory
_FEWEST_TURNS = (
    8  # of a block's loop: each waits 1.5 us for the memory, and a second kernel takes 5
)
_BLOCKS = 132  # of a row: one for each multiprocessor of an H100 or H200

_SOURCE = """
  constexpr int LANES = D / 8;
  constexpr int TOGETHER = 32 / LANES;        // slots that a warp looks at together
  constexpr int STEP = WARPS * TOGETHER;      // ... and a block
  constexpr unsigned ALL = 0xffffffffu;
  constexpr float NOTHING = -1e30f;
  __shared__ float sums[WARPS][G][D];
  __shared__ float bests[WARPS][G];
  __shared__ float totals[WARPS][G];

  const int head = blockIdx.x, row = blockIdx.y, share = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = lane % LANES * 8, group = lane / LANES;
  const int capacity = keys_shape[2];
  const int size = (capacity + SHARES - 1) / SHARES;
  const int begin = share * size, end = min(capacity, begin + size);
  const float scale = __int_as_float(SCALE);  // of scores, times log2(e)

  float query[G][8], sum[G][8], best[G], total[G];
  const T* q_at = q + row * q_strides[0] + (long long)head * G * q_strides[1];
  for (int g = 0; g < G; ++g) {
    best[g] = NOTHING;
    total[g] = 0.0f;
    for (int i = 0; i < 8; ++i) {
      const T value = q_at[g * q_strides[1] + (column + i) * q_strides[3]];
      query[g][i] = static_cast<float>(value) * scale;
      sum[g][i] = 0.0f;
    }
  }
  const int key_head = head / SPLIT;
  const T* k_at = keys + row * keys_strides[0] + key_head * keys_strides[1] + column;
  const T* v_at = values + row * values_strides[0] + key_head * values_strides[1] + column;
  const bool* shown = mask + row * mask_strides[0];

  for (int base = begin + warp * TOGETHER + group; base - group < end; base += STEP * AHEAD) {
    bool shows[AHEAD];
    bool any = false;
    #pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int slot = base + a * STEP;
      shows[a] = slot < end && shown[slot * mask_strides[3]];
      any = any || shows[a];
    }
    if (!__any_sync(ALL, any)) continue;
    uint4 k[AHEAD], v[AHEAD];
    #pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      k[a] = v[a] = make_uint4(0, 0, 0, 0);
      if (shows[a]) {
        const long long slot = base + a * STEP;
        k[a] = *reinterpret_cast<const uint4*>(k_at + slot * keys_strides[2]);
        v[a] = *reinterpret_cast<const uint4*>(v_at + slot * values_strides[2]);
      }
    }
    float score[AHEAD][G];
    #pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const T* x = reinterpret_cast<const T*>(&k[a]);
      #pragma unroll
      for (int g = 0; g < G; ++g) {
        float dot = 0.0f;
        #pragma unroll
        for (int i = 0; i < 8; ++i) dot += query[g][i] * static_cast<float>(x[i]);
        #pragma unroll
        for (int o = 1; o < LANES; o *= 2) dot += __shfl_xor_sync(ALL, dot, o);
        score[a][g] = shows[a] ? dot : NOTHING;
      }
    }
    #pragma unroll
    for (int g = 0; g < G; ++g) {
      float top = best[g];
      #pragma unroll
      for (int a = 0; a < AHEAD; ++a) top = fmaxf(top, score[a][g]);
      const float old = exp2f(best[g] - top);
      best[g] = top;
      total[g] *= old;
      #pragma unroll
      for (int i = 0; i < 8; ++i) sum[g][i] *= old;
      #pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const T* x = reinterpret_cast<const T*>(&v[a]);
        const float weight = shows[a] ? exp2f(score[a][g] - top) : 0.0f;
        total[g] += weight;
        #pragma unroll
        for (int i = 0; i < 8; ++i) sum[g][i] += weight * static_cast<float>(x[i]);
      }
    }
  }

  #pragma unroll
  for (int g = 0; g < G; ++g) {
    #pragma unroll
    for (int o = LANES; o < 32; o *= 2) {
      const float other = __shfl_xor_sync(ALL, best[g], o);
      const float top = fmaxf(best[g], other);
      const float mine = exp2f(best[g] - top), its = exp2f(other - top);
      best[g] = top;
      total[g] = total[g] * mine + __shfl_xor_sync(ALL, total[g], o) * its;
      #pragma unroll
      for (int i = 0; i < 8; ++i)
        sum[g][i] = sum[g][i] * mine + __shfl_xor_sync(ALL, sum[g][i], o) * its;
    }
    if (group == 0) {
      for (int i = 0; i < 8; ++i) sums[warp][g][column + i] = sum[g][i];
      bests[warp][g] = best[g];
      totals[warp][g] = total[g];
    }
  }
  __syncthreads();
  for (int n = threadIdx.x; n < G * D; n += blockDim.x) {
    const int g = n / D, d = n % D;
    float top = NOTHING, value = 0.0f, all = 0.0f;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, bests[w][g]);
    for (int w = 0; w < WARPS; ++w) {
      const float its = exp2f(bests[w][g] - top);
      value += sums[w][g][d] * its;
      all += totals[w][g] * its;
    }
    FINISH
  }
"""
_WHOLE = "out[(row * gridDim.x + head) * G * D + n] = static_cast<T>(value / all);"
_SHARE = """const int place = (row * gridDim.x + head) * SHARES + share;
    sums_of[(place * G + g) * D + d] = value;
    if (d == 0) {
      stats[(place * G + g) * 2] = top;
      stats[(place * G + g) * 2 + 1] = all;
    }"""
_JOIN = """
  const int first = blockIdx.x * SHARES;
  for (int n = threadIdx.x; n < G * D; n += blockDim.x) {
    const int g = n / D;
    float top = -1e30f, value = 0.0f, all = 0.0f;
    for (int s = first; s < first + SHARES; ++s) top = fmaxf(top, stats[(s * G + g) * 2]);
    for (int s = first; s < first + SHARES; ++s) {
      const float its = exp2f(stats[(s * G + g) * 2] - top);
      value += sums[s * G * D + n] * its;
      all += stats[(s * G + g) * 2 + 1] * its;
    }
    out[blockIdx.x * G * D + n] = static_cast<T>(value / all);
  }
"""


def supports(q: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel is for these shapes and dtypes."""
    return (
        q.shape[2] == 1
        and _choose_heads(q.shape[1] // keys.shape[1]) <= _MOST_HEADS
        and q.shape[3] in _WIDTHS
        and values.shape == keys.shape
        and q.dtype in (mx.bfloat16, mx.float16)
        and q.dtype == keys.dtype == values.dtype
    )


def attend(q: mx.array, keys: mx.array, values: mx.array, mask: mx.array, scale: float) -> mx.array:
    """What one query of each row and head sees. CUDA only; it does not differentiate.

    Args:
        q: `[B, H, 1, D]`.
        keys: `[B, K, S, D]`, in row order.
        values: likewise.
        mask: bool `[B, 1, 1, S]`. Every row shows something.
        scale: of the scores.

    Returns:
        `[B, H, 1, D]`.
    """
    batch, heads, _, width = q.shape
    groups, capacity = keys.shape[1:3]
    each = _choose_heads(heads // groups)
    blocks = heads // each
    warps = min(_WARPS, _SHARED // (each * width))
    threads, turns = 32 * warps, capacity // (warps * 256 // width * _ahead(each))
    # Whatever the batch is: a row is bit for bit what it is alone.
    shares = max(1, min(_BLOCKS // blocks, turns // _FEWEST_TURNS))
    bits = struct.unpack("i", struct.pack("f", scale * math.log2(math.e)))[0]
    template = [("T", q.dtype), ("D", width), ("G", each), ("SHARES", shares)]
    look: dict[str, Any] = {
        "inputs": [q, keys, values, mask],
        "template": [
            *template,
            ("WARPS", warps),
            ("AHEAD", _ahead(each)),
            ("SCALE", bits),
            ("SPLIT", blocks // groups),
        ],
        "grid": (blocks * threads, batch, shares),
        "threadgroup": (threads, 1, 1),
    }
    whole: dict[str, Any] = {"output_shapes": [q.shape], "output_dtypes": [q.dtype]}
    if shares == 1:
        out: mx.array = _make_kernel("whole")(**look, **whole)[0]
        return out
    part = (batch, blocks, shares, each)
    parts = _make_kernel("share")(
        **look, output_shapes=[(*part, width), (*part, 2)], output_dtypes=[mx.float32, mx.float32]
    )
    joined: mx.array = _make_kernel("join")(
        inputs=parts,
        template=template,
        grid=(batch * blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        **whole,
    )[0]
    return joined


def _choose_heads(together: int) -> int:
    """Query heads of a block, of those that share a key head: two blocks find a key in the cache.

    With more of them than two there are registers for few threads, which then wait for memory.
    """
    return together if together % 2 else 2


def _ahead(each: int) -> int:
    """Slots that a group of lanes has in flight; of many heads there are too few registers."""
    return 2 if each > 4 else 4


def _make_kernel(name: str) -> Callable[..., Any]:
    inputs, outputs, source = {
        "whole": (_SEEN, ("out",), _SOURCE.replace("FINISH", _WHOLE)),
        "share": (_SEEN, ("sums_of", "stats"), _SOURCE.replace("FINISH", _SHARE)),
        "join": (("sums", "stats"), ("out",), _JOIN),
    }[name]
    return cuda_kernel(f"attend_{name}", inputs, outputs, source, ensure_row_contiguous=False)
