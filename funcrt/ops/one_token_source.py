"""CUDA of `ops.one_token`, in pieces: words in capitals are replaced, or are constants."""

from __future__ import annotations

import mlx.core as mx

TYPES = {mx.bfloat16: "bf16", mx.float16: "f16"}
UNPACK = {
    mx.bfloat16: """
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
""",
    mx.float16: """
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high) : "r"(word));
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
__device__ void unpack(unsigned word, float& low, float& high) {
  UNPACK
}
__device__ unsigned pack(float low, float high) {
  unsigned word;
  asm("cvt.rn.TYPEx2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ void multiply(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}
"""
# Lane 4 g + t of a warp has head g, and of 16 slots as keys two, g and 8 + g, as values four: 2 t,
# 2 t + 1, 8 + 2 t and 9 + 2 t. Which of the D elements tensor cores call the first is the same to a
# sum, and of the outputs a matter of where they are written: so lanes take 8 that lie side by side.
SOURCE = """
extern "C" __global__ void __launch_bounds__(WARPS * 32)
NAME(INPUTS, OUTPUTS, int capacity, int scaling) {
  const float scale = __int_as_float(scaling);  // of scores, times log2(e)
  constexpr int TOGETHER = 16;                  // slots that a warp looks at together
  constexpr int STEP = WARPS * TOGETHER;        // ... and a block
  constexpr bool EARLY = D <= 128;              // there are registers for what comes next
  constexpr unsigned ALL = 0xffffffffu;
  constexpr float NOTHING = -1e30f;
  __shared__ float sums[WARPS][G][D];
  __shared__ float bests[WARPS][G];
  __shared__ float totals[WARPS][G];

  const int head = blockIdx.x, row = blockIdx.y, share = blockIdx.z;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int key_head = head / SPLIT;
  BEGIN
  const int size = (slots + SHARES * TOGETHER - 1) / (SHARES * TOGETHER) * TOGETHER;
  const int begin = share * size, end = min(slots, begin + size);

  uint4 query[D / 32];
  float sum[D / 64][8][4], best = NOTHING, total = 0.0f;
  #pragma unroll
  for (int c = 0; c < D / 32; ++c) {
    const T* at = q + ((row * gridDim.x + head) * G + g) * D + c * 32 + t * 8;
    query[c] = g < G ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
  }
  #pragma unroll
  for (int n = 0; n < D / 64 * 32; ++n) sum[n / 32][n / 4 % 8][n % 4] = 0.0f;
  const long long line = (long long)(row * (gridDim.x / SPLIT) + key_head) * capacity + first;
  const T* k_at = keys + line * D + t * 8;
  const T* v_at = values + line * D + g * 8;

  uint4 k[2][D / 32], v[4][D / 64];
  bool shows[4];
  auto fetch = [&](int base) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = base + i / 2 * 8 + 2 * t + i % 2;
      shows[i] = slot < end && SHOWN;
      #pragma unroll
      for (int c = 0; c < D / 64; ++c) {
        v[i][c] = make_uint4(0, 0, 0, 0);
        if (shows[i])
          v[i][c] = *reinterpret_cast<const uint4*>(v_at + (long long)slot * D + c * 64);
      }
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = base + i * 8 + g;
      #pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        k[i][c] = make_uint4(0, 0, 0, 0);
        if (slot < end)
          k[i][c] = *reinterpret_cast<const uint4*>(k_at + (long long)slot * D + c * 32);
      }
    }
  };
  int base = begin + warp * TOGETHER;
  if (EARLY) fetch(base);
  for (; base < end; base += STEP) {
    if (!EARLY) fetch(base);
    float score[4];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      float c4[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      #pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        multiply(c4, query[c].x, 0, query[c].y, 0, make_uint2(k[i][c].x, k[i][c].y));
        multiply(c4, query[c].z, 0, query[c].w, 0, make_uint2(k[i][c].z, k[i][c].w));
      }
      score[2 * i] = c4[0] * scale;
      score[2 * i + 1] = c4[1] * scale;
    }
    uint4 value[4][D / 64];
    bool counts[4];
    float top = best;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      counts[i] = shows[i];
      if (counts[i]) top = fmaxf(top, score[i]);
      #pragma unroll
      for (int c = 0; c < D / 64; ++c) value[i][c] = v[i][c];
    }
    if (EARLY) fetch(base + STEP);
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
    const float old = power(best - top);
    best = top;
    total *= old;
    // What 16 bits leave of a weight stands in rows of its own.
    unsigned weight[2], rest[2];
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float low = counts[i] ? power(score[i] - top) : 0.0f;
      const float high = counts[i + 1] ? power(score[i + 1] - top) : 0.0f;
      float x, y;
      total += low + high;
      weight[i / 2] = pack(low, high);
      unpack(weight[i / 2], x, y);
      rest[i / 2] = pack(low - x, high - y);
    }
    #pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      unsigned words[4][4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i][0] = value[i][c].x;
        words[i][1] = value[i][c].y;
        words[i][2] = value[i][c].z;
        words[i][3] = value[i][c].w;
      }
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int half = j % 2 ? 0x7632 : 0x5410;
        #pragma unroll
        for (int i = 0; i < 4; ++i) sum[c][j][i] *= old;
        multiply(sum[c][j], weight[0], rest[0], weight[1], rest[1],
                 make_uint2(__byte_perm(words[0][j / 2], words[1][j / 2], half),
                            __byte_perm(words[2][j / 2], words[3][j / 2], half)));
      }
    }
  }

  total += __shfl_xor_sync(ALL, total, 1);
  total += __shfl_xor_sync(ALL, total, 2);
  if (g < G) {
    #pragma unroll
    for (int n = 0; n < D / 64 * 16; ++n) {
      const float* s = sum[n / 16][n % 8];
      const int which = n / 8 % 2;
      sums[warp][g][n / 16 * 64 + t * 16 + n % 16] = s[which] + s[which + 2];
    }
    if (t == 0) {
      bests[warp][g] = best;
      totals[warp][g] = total;
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
