"""Perplexity of the committed text, as tests/reference/trained.py defines it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from funcrt.model import Model

import mlx.core as mx
import numpy as np
import pytest

TEXT = (Path(__file__).parent / "reference" / "text.txt").read_text("utf-8")
ALLOWED = 1e-3  # as a share
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


def check_perplexity(model: Model, expected: Mapping[str, float]) -> None:
    """The perplexity of the text, whole and uncached, is `expected` of a golden file."""
    assert model.tokenizer is not None
    tokens = list(model.tokenizer.encode(TEXT))
    assert len(tokens) == expected["tokens"]
    logits, _ = model([tokens])
    found = measure_perplexity(logits[0], tokens)
    assert found == pytest.approx(expected["perplexity"], rel=ALLOWED)
