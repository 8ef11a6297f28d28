"""Products of up to 16 rows with dense bfloat16 matrices on CUDA, with what is before and after.

A decode step of a small model is bound by the host, which needs 4 to 5 us for each node of a graph,
and more for products of several rows, which go to cuBLAS. One kernel does a norm, a product, and
what follows it (a gate, or adding to the residual stream), as fast as it can read the matrix.

A block has 16 or 32 outputs, and each of its warps a share of the inputs, 64 at a time, which it
copies to shared memory some steps ahead. The tensor cores multiply 16 outputs by 16 inputs by 8
rows. Which inputs those are is the same to a sum: every thread takes 8 that lie side by side. The
order in which sums are made depends on the matrix alone, so a row is bit for bit what it is alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from funcrt.ops import kernels
from funcrt.ops.heads import Waves

import mlx.core as mx

MOST_ROWS = 16
_TILE = 16  # outputs that a tensor core has at a time
_STEP = 64  # inputs that a warp copies at a time: 128 bytes, what DRAM and caches give at once
_MANY_TILES = 264  # two for each multiprocessor of an H100 or H200: enough for two in each block
_MOST_STAGES = 4
_TYPES = {mx.bfloat16: "bfloat", mx.float32: "float"}
_SHARED = 96 << 10  # bytes of shared memory that a block may have on every GPU, whoever exported

_HEADER = """
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
_SOURCE = """
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
_PLAIN = {
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
_HEADS = {
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
_FETCH = """
      if (lane < 8)
        copy(stages + to + (OUTPUTS + ROWS) * 8 + lane, norm + (warp * 8 + lane) * 8 + at);
"""
_NORM = """
      const uint4 g = stage[(OUTPUTS + ROWS) * 8 + half + quarter];
      #pragma unroll
      for (int c = 0; c < EIGHTS; ++c) {
        b[c].x = scaled(b[c].x, g.x, square[c]);
        b[c].y = scaled(b[c].y, g.y, square[c]);
        b[c].z = scaled(b[c].z, g.z, square[c]);
        b[c].w = scaled(b[c].w, g.w, square[c]);
      }
"""
_ADDED = {
    "bias": "value += (float)bias[first + o];",
    "residual": "value += (float)residual[place];",
}
_ADDED_TO_HEADS = {
    "bias": "value += (float)bias[first + at]; other += (float)bias[first + its];",
}


def supports(rows: mx.array, weight: mx.array) -> bool:
    """Whether the kernel is for these shapes and dtypes: `[B, I]` and `[O, I]`."""
    return (
        rows.ndim == weight.ndim == 2
        and rows.shape[0] <= MOST_ROWS
        and rows.dtype == weight.dtype == mx.bfloat16
        and weight.shape[0] % (2 * _TILE) == 0
        and rows.shape[1] == weight.shape[1]
        and weight.shape[1] % _STEP == 0
    )


def multiply(
    x: mx.array,
    weight: mx.array,
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    gated: bool = False,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """`residual + act(norm(x) @ weight.T) + bias` in one kernel. CUDA only, without a gradient.

    Args:
        x: `[B, I]`, like all others bfloat16 and in row order: what is not is copied at each call.
        weight: `[O, I]`.
        norm: `[I]`, weight of a root mean square norm (arXiv:1910.07467) of x; or None.
        eps: of the norm.
        gated: the first half of the outputs through SiLU, times the other (arXiv:2002.05202).
        bias: `[O]`, added; or None. Not together with `gated`.
        residual: `[B, O]`, added; or None. Not together with `gated`.

    Returns:
        `[B, O]`, or `[B, O / 2]` where it is gated.
    """
    kept = weight.shape[0] // 2 if gated else weight.shape[0]
    arrays = {"x": x, "w": weight, "norm": norm, "bias": bias, "residual": residual}
    tiles, warps = _choose_shape(weight.shape[0])
    return _run(
        "multiply", arrays, eps, {**_PLAIN, "ADD": _add(_ADDED, arrays)},
        {"TILES": 2 if gated else tiles, "WARPS": 4 if gated else warps, "GATED": gated},
        [((x.shape[0], kept), x.dtype)],
    )[0]  # fmt: skip


def supports_heads(width: int, waves: Waves) -> bool:
    """Whether `multiply_heads` is for heads of this width that turn like this."""
    return width % (2 * _TILE) == 0 and 2 * waves.cosines.shape[1] % (2 * _TILE) == 0


def multiply_heads(
    x: mx.array,
    weight: mx.array,
    heads: int,
    kv_heads: int,
    waves: Waves,
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`multiply`, then `ops.heads.split`, in one kernel. CUDA only, without a gradient.

    Args:
        x: `[B, I]`, see `multiply`.
        weight: `[(H + 2 K) D, I]`, for queries, keys and values.
        heads: H.
        kv_heads: K.
        waves: how queries and keys turn.
        norm: see `multiply`.
        eps: of the norm.
        bias: `[(H + 2 K) D]`, added before they turn; or None.

    Returns:
        Queries `[B, H, 1, D]` and keys `[B, K, 1, D]`, both turned, and values `[B, K, 1, D]`.
    """
    batch, width = x.shape[0], weight.shape[0] // (heads + 2 * kv_heads)
    arrays = {
        "x": x, "w": weight, "norm": norm, "bias": bias,
        "cosines": waves.cosines, "sines": waves.sines,
    }  # fmt: skip
    shape = (batch, kv_heads, 1, width)
    q, k, v = _run(
        "multiply_heads", arrays, eps, {**_HEADS, "ADD": _add(_ADDED_TO_HEADS, arrays)},
        {
            "TILES": 2, "WARPS": 4, "GATED": False,
            "H": heads, "K": kv_heads, "D": width, "R": 2 * waves.cosines.shape[1],
            "NEIGHBOURS": waves.interleaved,
        },
        [((batch, heads, 1, width), x.dtype), (shape, x.dtype), (shape, x.dtype)],
    )  # fmt: skip
    return q, k, v


def _run(
    name: str,
    arrays: Mapping[str, mx.array | None],
    eps: float,
    pieces: Mapping[str, str],
    constants: Mapping[str, int],
    outputs: Sequence[kernels.Output],
) -> list[mx.array]:
    """One of the two forms: arrays by their names in the source, its pieces and its constants."""
    given = {key: array for key, array in arrays.items() if array is not None}
    normed, (rows, inputs) = "norm" in given, given["x"].shape
    tiles, warps = constants["TILES"], constants["WARPS"]
    stage = 2 * _STEP * (tiles * _TILE + rows + normed) * warps  # bytes
    stages = min(_MOST_STAGES, _SHARED // stage)
    assert stages > 1, "one is copied while another is used"
    source = _SOURCE
    for word, text in {
        **pieces,
        "ARGUMENTS": ", ".join(
            f"const {_TYPES[array.dtype]}* {key}" for key, array in given.items()
        ),
        "FETCH": _FETCH if normed else "",
        "NORM\n": _NORM if normed else "\n",
    }.items():
        source = source.replace(word, text)
    return kernels.run(
        "_".join((name, *given)),
        _HEADER + source,
        {
            **constants, "STAGES": stages, "ROWS": rows, "NORMED": normed,
            "PAIRED": constants["GATED"] or "cosines" in given,
        },
        list(given.values()),
        [inputs, given["w"].shape[0], eps],
        outputs,
        blocks=(given["w"].shape[0] // (tiles * _TILE), 1, 1),
        threads=32 * warps,
        shared_memory=stage * stages,
    )  # fmt: skip


def _choose_shape(outputs: int) -> tuple[int, int]:
    """Tiles and warps of a block, whatever the rows are."""
    return (2, 4) if outputs // _TILE >= _MANY_TILES else (1, 8)


def _add(parts: Mapping[str, str], arrays: Mapping[str, mx.array | None]) -> str:
    return "\n".join(part for key, part in parts.items() if arrays[key] is not None)
