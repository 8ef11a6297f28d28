"""Perplexity of the committed text, as tests/reference/trained.py defines it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

TEXT = (Path(__file__).parent / "reference" / "text.txt").read_text("utf-8")
_ROWS = 64  # taken to float64 at a time


def measure_perplexity(logits: mx.array, tokens: list[int]) -> float:
    """exp of the mean negative log likelihood of all tokens but the first, in float64.

    `mx.logsumexp` sums so many numbers in float32 that it moves the result by 1e-4.

    Args:
        logits: `[T, V]` or its first T - 1 rows, of one call over all tokens.
        tokens: ids of length T.
    """
    total = 0.0
    for start in range(0, len(tokens) - 1, _ROWS):
        targets = tokens[start + 1 : start + 1 + _ROWS]
        rows = np.array(logits[start : start + len(targets)]).astype(np.float64)
        shift = rows.max(axis=-1)
        sums = np.log(np.exp(rows - shift[:, None]).sum(axis=-1)) + shift
        total += float((sums - rows[np.arange(len(targets)), targets]).sum())
    return float(np.exp(total / (len(tokens) - 1)))
