"""CUDA of `ops.one_token`, in pieces: words in capitals are replaced, or are constants."""

from __future__ import annotations

import mlx.core as mx

UNPACK = {
    mx.bfloat16: """
  x[2 * i] = __uint_as_float(word << 16);
  x[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
""",
    mx.float16: """
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(x[2 * i]), "=f"(x[2 * i + 1]) : "r"(word));
""",
}
POWER = """
__device__ float power(float x) {  // 2 to the x: of `exp2f` without what it does for tiny results
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""
HEADER = """
__device__ void unpack(uint4 v, float* x) {
  const unsigned words[] = {v.x, v.y, v.z, v.w};
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = words[i];
    UNPACK
  }
}
"""
SOURCE = """
extern "C" __global__ void NAME(INPUTS, OUTPUTS, int capacity, int scaling) {
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
  const int key_head = head / SPLIT;
  BEGIN
  const int size = (slots + SHARES - 1) / SHARES;
  const int begin = share * size, end = min(slots, begin + size);

  const T* q_at = q + (row * gridDim.x + head) * G * D + column;
  float query[G][8], sum[G][8], best[G], total[G];
  #pragma unroll
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
  const long long line = (long long)(row * (gridDim.x / SPLIT) + key_head) * capacity + first;
  const T* k_at = keys + line * D + column;
  const T* v_at = values + line * D + column;

  for (int base = begin + warp * TOGETHER + group; base - group < end; base += STEP * AHEAD) {
    bool shows[AHEAD];
    bool any = false;
    #pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int slot = base + a * STEP;
      shows[a] = slot < end && SHOWN;
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
MASKED = {
    "INPUTS": "const T* q, const T* keys, const T* values, const bool* mask",
    "BEGIN": """
  const int first = 0, slots = capacity;
  const bool* shown = mask + (long long)row * capacity;
""",
    "SHOWN": "shown[slot]",
}
COUNTED = {
    "INPUTS": "const T* q, const T* keys, const T* values, const int* writes, const int* sees",
    # Who sees nothing sees what it has written.
    "BEGIN": """
  const int seen = sees[row], first = seen > 0 ? 0 : writes[row], slots = seen > 0 ? seen : 1;
""",
    "SHOWN": "true",
}
WHOLE = {
    "OUTPUTS": "T* out",
    "FINISH": "out[(row * gridDim.x + head) * G * D + n] = T(value / all);",
}
SHARE = {
    "OUTPUTS": "float* sums_of, float* stats",
    "FINISH": """
    const int place = (row * gridDim.x + head) * SHARES + share;
    sums_of[(place * G + g) * D + d] = value;
    if (d == 0) {
      stats[(place * G + g) * 2] = top;
      stats[(place * G + g) * 2 + 1] = all;
    }
""",
}
JOIN = """
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
