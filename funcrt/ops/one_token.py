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

from funcrt.ops import kernels

import mlx.core as mx

_WIDTHS = (64, 128, 256)
_MOST_HEADS = 8  # of a block: what they add up is in registers
_WARPS = 8  # of a block: each thread may then have all the registers that there are
_SHARED = 8192  # float32 values of shared memory
# Turns of a block's loop: each waits 1.5 us for the memory, and a second kernel takes 5.
_FEWEST_TURNS = 8
_BLOCKS = 132  # of a row: one for each multiprocessor of an H100 or H200

_UNPACK = {
    mx.bfloat16: """
  x[2 * i] = __uint_as_float(word << 16);
  x[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
""",
    mx.float16: """
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(x[2 * i]), "=f"(x[2 * i + 1]) : "r"(word));
""",
}
_POWER = """
__device__ float power(float x) {  // 2 to the x: of `exp2f` without what it does for tiny results
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""
_HEADER = """
__device__ void unpack(uint4 v, float* x) {
  const unsigned words[] = {v.x, v.y, v.z, v.w};
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = words[i];
    UNPACK
  }
}
"""
_SOURCE = """
extern "C" __global__ void NAME(const T* q, const T* keys, const T* values, const bool* mask,
                                OUTPUTS, int capacity, int scaling) {
  const float scale = __int_as_float(scaling);  // of scores, times log2(e)
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
  const int size = (capacity + SHARES - 1) / SHARES;
  const int begin = share * size, end = min(capacity, begin + size);

  float query[G][8], sum[G][8], best[G], total[G];
  const T* q_at = q + (row * gridDim.x + head) * G * D + column;
  for (int g = 0; g < G; ++g) {
    best[g] = NOTHING;
    total[g] = 0.0f;
    unpack(*reinterpret_cast<const uint4*>(q_at + g * D), query[g]);
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      query[g][i] *= scale;
      sum[g][i] = 0.0f;
    }
  }
  const int key_head = head / SPLIT;
  const long long cached = (long long)(row * (gridDim.x / SPLIT) + key_head) * capacity * D;
  const T* k_at = keys + cached + column;
  const T* v_at = values + cached + column;
  const bool* shown = mask + (long long)row * capacity;

  for (int base = begin + warp * TOGETHER + group; base - group < end; base += STEP * AHEAD) {
    bool shows[AHEAD];
    bool any = false;
    #pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int slot = base + a * STEP;
      shows[a] = slot < end && shown[slot];
      any = any || shows[a];
    }
    if (!__any_sync(ALL, any)) continue;
    uint4 k[AHEAD], v[AHEAD];
    #pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      k[a] = v[a] = make_uint4(0, 0, 0, 0);
      if (shows[a]) {
        const long long slot = base + a * STEP;
        k[a] = *reinterpret_cast<const uint4*>(k_at + slot * D);
        v[a] = *reinterpret_cast<const uint4*>(v_at + slot * D);
      }
    }
    float score[AHEAD][G];
    #pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      float x[8];
      unpack(k[a], x);
      #pragma unroll
      for (int g = 0; g < G; ++g) {
        float dot = 0.0f;
        #pragma unroll
        for (int i = 0; i < 8; ++i) dot += query[g][i] * x[i];
        #pragma unroll
        for (int o = 1; o < LANES; o *= 2) dot += __shfl_xor_sync(ALL, dot, o);
        score[a][g] = shows[a] ? dot : NOTHING;
      }
    }
    float x[AHEAD][8];
    #pragma unroll
    for (int a = 0; a < AHEAD; ++a) unpack(v[a], x[a]);
    #pragma unroll
    for (int g = 0; g < G; ++g) {
      float top = best[g];
      #pragma unroll
      for (int a = 0; a < AHEAD; ++a) top = fmaxf(top, score[a][g]);
      const float old = power(best[g] - top);
      best[g] = top;
      total[g] *= old;
      #pragma unroll
      for (int i = 0; i < 8; ++i) sum[g][i] *= old;
      #pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const float weight = shows[a] ? power(score[a][g] - top) : 0.0f;
        total[g] += weight;
        #pragma unroll
        for (int i = 0; i < 8; ++i) sum[g][i] += weight * x[a][i];
      }
    }
  }

  #pragma unroll
  for (int g = 0; g < G; ++g) {
    #pragma unroll
    for (int o = LANES; o < 32; o *= 2) {
      const float other = __shfl_xor_sync(ALL, best[g], o);
      const float top = fmaxf(best[g], other);
      const float mine = power(best[g] - top), its = power(other - top);
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
      const float its = power(bests[w][g] - top);
      value += sums[w][g][d] * its;
      all += totals[w][g] * its;
    }
    FINISH
  }
}
"""
_WHOLE = "out[(row * gridDim.x + head) * G * D + n] = T(value / all);"
_SHARE = """const int place = (row * gridDim.x + head) * SHARES + share;
    sums_of[(place * G + g) * D + d] = value;
    if (d == 0) {
      stats[(place * G + g) * 2] = top;
      stats[(place * G + g) * 2 + 1] = all;
    }"""
_JOIN = """
extern "C" __global__ void NAME(const float* sums, const float* stats, T* out) {
  const int first = blockIdx.x * SHARES;
  for (int n = threadIdx.x; n < G * D; n += blockDim.x) {
    const int g = n / D;
    float top = -1e30f, value = 0.0f, all = 0.0f;
    for (int s = first; s < first + SHARES; ++s) top = fmaxf(top, stats[(s * G + g) * 2]);
    for (int s = first; s < first + SHARES; ++s) {
      const float its = power(stats[(s * G + g) * 2] - top);
      value += sums[s * G * D + n] * its;
      all += stats[(s * G + g) * 2 + 1] * its;
    }
    out[blockIdx.x * G * D + n] = T(value / all);
  }
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
    constants: dict[str, int | mx.Dtype]
    constants = {"T": q.dtype, "D": width, "G": each, "SHARES": shares}
    look = {
        **constants, "WARPS": warps, "AHEAD": _ahead(each), "SPLIT": blocks // groups,
    }  # fmt: skip
    arrays, scalars = [q, keys, values, mask], [capacity, scale * math.log2(math.e)]
    grid, out = (blocks, batch, shares), (q.shape, q.dtype)
    header = _POWER + _HEADER.replace("UNPACK", _UNPACK[q.dtype])
    if shares == 1:
        source = header + _SOURCE.replace("OUTPUTS", "T* out").replace("FINISH", _WHOLE)
        return kernels.run(
            "attend", source, look, arrays, scalars, [out], blocks=grid, threads=threads
        )[0]
    source = header + _SOURCE.replace("OUTPUTS", "float* sums_of, float* stats").replace(
        "FINISH", _SHARE
    )
    part = (batch, blocks, shares, each)
    parts = kernels.run(
        "attend_share", source, look, arrays, scalars,
        [((*part, width), mx.float32), ((*part, 2), mx.float32)], blocks=grid, threads=threads,
    )  # fmt: skip
    return kernels.run(
        "attend_join", _POWER + _JOIN, constants, parts, [], [out],
        blocks=(batch * blocks, 1, 1), threads=threads,
    )[0]  # fmt: skip


def _choose_heads(together: int) -> int:
    """Query heads of a block, of those that share a key head: two blocks find a key in the cache.

    With more of them than two there are registers for few threads, which then wait for memory.
    """
    return together if together % 2 else 2


def _ahead(each: int) -> int:
    """Slots that a group of lanes has in flight; of many heads there are too few registers."""
    return 2 if each > 4 else 4
