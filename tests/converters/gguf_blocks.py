"""Blocks of every GGUF tensor type, with random integers and scales that give sensible values.

The `gguf` package quantizes to few types, so blocks are drawn, and it says what they stand for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES

Array = np.ndarray[Any, Any]

# Type -> where float16 scales lie in a block.
_SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,),
    "IQ3_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (),
}  # fmt: skip
KINDS = tuple(_SCALES)
SPREAD = 0.05  # of the values


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Bytes `[..., bytes in a row]` of a tensor of this type."""
    values, size = GGML_QUANT_SIZES[Kind[kind]]
    *rows, columns = shape
    count = int(np.prod(rows)) * columns // values
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    _set_scales(kind, blocks, np.full(count, 1.0))
    with np.errstate(all="ignore"):
        spread = quants.dequantize(blocks, Kind[kind]).std()
    _set_scales(kind, blocks, SPREAD / spread * rng.uniform(0.5, 1.5, count))
    return blocks.reshape(*rows, -1)


def expand(kind: str, blocks: Array) -> Array:
    """What they stand for, float32."""
    values: Array = quants.dequantize(blocks, Kind[kind])
    return values


def _set_scales(kind: str, blocks: Array, scales: Array) -> None:
    halves = scales.astype(np.float16).view(np.uint16)
    for at in _SCALES[kind]:
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    if kind == "IQ1_M":  # four bits of it at the top of each of the last four 16-bit numbers
        for i in range(4):
            part = (halves >> (4 * i) & 15).astype(np.uint8) << 4
            at = 48 + 2 * i + 1
            blocks[:, at] = blocks[:, at] & 15 | part
    if kind == "MXFP4":
        blocks[:, 0] = np.round(np.log2(scales)).astype(int) + 127
