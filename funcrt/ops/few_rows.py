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
from funcrt.ops.few_rows_source import (
    ADDED,
    ADDED_TO_HEADS,
    FETCH,
    HEADER,
    HEADS,
    NORM,
    PLAIN,
    SOURCE,
)
from funcrt.ops.heads import Waves

import mlx.core as mx

MOST_ROWS = 16
_TILE = 16  # outputs that a tensor core has at a time
_STEP = 64  # inputs that a warp copies at a time: 128 bytes, what DRAM and caches give at once
_MANY_TILES = 264  # two for each multiprocessor of an H100 or H200: enough for two in each block
_PAIRS = (2, 4)  # tiles and warps of a block whose outputs need those of another tile
_MOST_STAGES = 4
_TYPES = {mx.bfloat16: "bfloat", mx.float32: "float"}
_SHARED = 96 << 10  # bytes of shared memory that a block may have on every GPU, whoever exported


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
    tiles, warps = _PAIRS if gated else _choose_shape(weight.shape[0])
    return _run(
        "multiply", arrays, eps, {**PLAIN, "ADD": _add(ADDED, arrays)},
        {"TILES": tiles, "WARPS": warps, "GATED": gated},
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
    tiles, warps = _PAIRS
    arrays = {
        "x": x, "w": weight, "norm": norm, "bias": bias,
        "cosines": waves.cosines, "sines": waves.sines,
    }  # fmt: skip
    shape = (batch, kv_heads, 1, width)
    q, k, v = _run(
        "multiply_heads", arrays, eps, {**HEADS, "ADD": _add(ADDED_TO_HEADS, arrays)},
        {
            "TILES": tiles, "WARPS": warps, "GATED": False,
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
    source = SOURCE
    for word, text in {
        **pieces,
        "ARGUMENTS": ", ".join(
            f"const {_TYPES[array.dtype]}* {key}" for key, array in given.items()
        ),
        "FETCH": FETCH if normed else "",
        "NORM\n": NORM if normed else "\n",
    }.items():
        source = source.replace(word, text)
    return kernels.run(
        "_".join((name, *given)),
        HEADER + source,
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
