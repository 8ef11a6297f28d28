"""CUDA of `ops.few_rows`, in pieces: words in capitals are replaced, or are constants."""

from __future__ import annotations

HEADER = """
__device__ void copy(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ void multiply(float* sum, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                         unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ unsigned scaled(unsigned two, unsigned by, float& squares) {
  const float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000u);
  squares += low * low + high * high;
  unsigned product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(two), "r"(by), "r"(0x80008000u));
  return product;
}
"""
# Shared memory has for each warp and stage 8 pieces of 16 bytes of each line: those of the matrix,
# of the rows, of the norm. Odd lines have their halves swapped, so that the eight threads that
# read two lines together find them in different banks. Loops are unrolled only where it is faster:
# see `kernels` for why the text is kept short.
SOURCE = """
extern "C" __global__ void NAME(ARGUMENTS, RESULTS, int inputs, int outputs, int eps) {
  constexpr int OUTPUTS = TILES * 16, EIGHTS = (ROWS + 7) / 8, WIDE = EIGHTS * 8;
  constexpr int KEPT = GATED ? 16 : OUTPUTS;  // outputs that the block writes
  constexpr int LINES = OUTPUTS + ROWS + NORMED;
  extern __shared__ uint4 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int line = lane / 4, quarter = lane % 4;
  PLACE
  const int steps = (inputs / 64 - warp + WARPS - 1) / WARPS;
  uint4* stages = memory + warp * STAGES * LINES * 8;

  const int copied = lane / 8, piece = lane % 8;
  const bfloat* w_at = w + (first + copied) * inputs + warp * 64 + piece * 8;
  const bfloat* x_at = x + copied * inputs + warp * 64 + piece * 8;
  uint4* target = stages + copied * 8 + (piece ^ (copied & 1) * 4);
  auto fetch = [&](int step) {
    if (step < steps) {
      const int to = step % STAGES * LINES * 8, at = step * WARPS * 64;
      #pragma unroll
      for (int i = 0; i < OUTPUTS; i += 4)
        copy(target + to + i * 8, w_at + at + (long long)(i / 16 * apart + i % 16) * inputs);
      #pragma unroll
      for (int i = 0; i < ROWS; i += 4)
        if (i + copied < ROWS) copy(target + to + (OUTPUTS + i) * 8, x_at + at + i * inputs);
      FETCH
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float sum[TILES][EIGHTS][4] = {}, square[EIGHTS] = {};
  #pragma unroll 1
  for (int step = 1 - STAGES; step < steps; ++step) {
    if (step >= 0) {
      asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
      __syncwarp();
    }
    fetch(step + STAGES - 1);
    if (step < 0) continue;
    const uint4* stage = stages + step % STAGES * LINES * 8;
    #pragma unroll
    for (int half = 0; half < 8; half += 4) {
      uint4 b[EIGHTS];
      #pragma unroll
      for (int c = 0; c < EIGHTS; ++c) {
        const int row = min(c * 8 + line, ROWS - 1);
        b[c] = stage[(OUTPUTS + row) * 8 + (half + quarter ^ (row & 1) * 4)];
      }
      NORM
      const uint4* at = stage + line * 8 + (half + quarter ^ (line & 1) * 4);
      #pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const uint4 p = at[t * 128], q = at[t * 128 + 64];
        #pragma unroll
        for (int c = 0; c < EIGHTS; ++c) {
          multiply(sum[t][c], p.x, q.x, p.y, q.y, b[c].x, b[c].y);
          multiply(sum[t][c], p.z, q.z, p.w, q.w, b[c].z, b[c].w);
        }
      }
    }
  }

  __syncthreads();  // the same memory serves again
  float* sums = reinterpret_cast<float*>(memory);  // [WARPS][OUTPUTS][WIDE]
  float* squares = sums + WARPS * OUTPUTS * WIDE;  // [WARPS][WIDE]
  float* mine = sums + (warp * OUTPUTS + line) * WIDE + quarter * 2;
  #pragma unroll
  for (int c = 0; c < EIGHTS; ++c) {
    #pragma unroll
    for (int t = 0; t < TILES; ++t)
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        mine[(t * 16 + i / 2 * 8) * WIDE + c * 8 + i % 2] = sum[t][c][i];
    if (NORMED) {
      float all = square[c];
      all += __shfl_xor_sync(0xffffffffu, all, 1);
      all += __shfl_xor_sync(0xffffffffu, all, 2);
      if (quarter == 0) squares[warp * WIDE + c * 8 + line] = all;
    }
  }
  __syncthreads();
  #pragma unroll 1
  for (int n = threadIdx.x; n < KEPT * ROWS; n += WARPS * 32) {
    const int o = n % KEPT, r = n / KEPT;
    const int partner = PARTNER;
    float value = 0.0f, other = 0.0f, all = 0.0f;
    #pragma unroll 4
    for (int i = 0; i < WARPS; ++i) {
      const float* from = sums + (i * OUTPUTS + o) * WIDE + r;
      value += from[0];
      if (PAIRED) other += from[(partner - o) * WIDE];
      if (NORMED) all += squares[i * WIDE + r];
    }
    const float scale = NORMED ? rsqrtf(all / inputs + __int_as_float(eps)) : 1.0f;
    value *= scale;
    other *= scale;
    FINISH
  }
}
"""
# Where the outputs of a block are in the matrix, `apart` from one tile to the next, and what
# becomes of each, perhaps with another one of them, its partner.
PLAIN = {
    "RESULTS": "bfloat* out",
    "PLACE": """
  const long long first = blockIdx.x * KEPT;
  const int apart = GATED ? outputs / 2 : 16;  // a gate and what it is multiplied by
""",
    "PARTNER": "o + 16",
    "FINISH": """
    const long long place = (long long)r * (GATED ? outputs / 2 : outputs) + first + o;
    if (GATED) value = value / (1.0f + __expf(-value)) * other;
    ADD
    out[place] = bfloat(value);
""",
}
# Two tiles of one head each: those that turn together, or side by side. Products are rounded before
# they turn, as everywhere.
HEADS = {
    "RESULTS": "bfloat* q, bfloat* k, bfloat* v",
    "PLACE": """
  const int head = blockIdx.x / (D / 32), part = blockIdx.x % (D / 32);
  const bool turns = head < H + K && part < R / 32, halves = turns && !NEIGHBOURS;
  const int start = part * (halves ? 16 : 32), apart = halves ? R / 2 : 16;
  const long long first = head * D + start;
""",
    "PARTNER": "NEIGHBOURS ? o ^ 1 : o ^ 16",
    "FINISH": """
    const int at = o / 16 * apart + o % 16, its = partner / 16 * apart + partner % 16;
    ADD
    value = float(bfloat(value));
    if (turns) {
      other = float(bfloat(other));
      const bool low = o < partner;
      const int column = start + at, i = NEIGHBOURS ? column / 2 : low ? column : column - R / 2;
      const float c = cosines[r * (R / 2) + i], s = sines[r * (R / 2) + i];
      value = low ? value * c - other * s : other * s + value * c;
    }
    bfloat* to = head < H ? q + (r * H + head) * D
      : head < H + K ? k + (r * K + head - H) * D : v + (r * K + head - H - K) * D;
    to[start + at] = bfloat(value);
""",
}
FETCH = """
      if (lane < 8)
        copy(stages + to + (OUTPUTS + ROWS) * 8 + lane, norm + (warp * 8 + lane) * 8 + at);
"""
NORM = """
      const uint4 g = stage[(OUTPUTS + ROWS) * 8 + half + quarter];
      #pragma unroll
      for (int c = 0; c < EIGHTS; ++c) {
        b[c].x = scaled(b[c].x, g.x, square[c]);
        b[c].y = scaled(b[c].y, g.y, square[c]);
        b[c].z = scaled(b[c].z, g.z, square[c]);
        b[c].w = scaled(b[c].w, g.w, square[c]);
      }
"""
ADDED = {
    "bias": "value += (float)bias[first + o];",
    "residual": "value += (float)residual[place];",
}
ADDED_TO_HEADS = {
    "bias": "value += (float)bias[first + at]; other += (float)bias[first + its];",
}
