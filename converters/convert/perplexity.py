"""How well a model predicts a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from converters.convert.report import Perplexity
from funcrt import masks
from funcrt.buckets import BucketPlan
from funcrt.errors import InputError, TextError
from funcrt.model import Model

import mlx.core as mx

WINDOW = 512  # tokens
_ROWS = 4


@dataclass(frozen=True)
class Measured:
    """The perplexity of one model."""

    value: float
    tokens: int
    window: int
    dtype: str

    def compared_with(self, after: Measured) -> Perplexity:
        """This one before, the other after."""
        return Perplexity(self.value, after.value, self.tokens, self.window, self.dtype)


def encode(model: Model, text: str) -> list[int]:
    """Ids of a text, with special tokens where the tokenizer adds them.

    Raises:
        TextError: a model without a tokenizer.
        InputError: a text of less than two tokens.
    """
    if model.tokenizer is None:
        raise TextError("perplexity needs a tokenizer.json, which this checkpoint has none of")
    ids = model.tokenizer.encode(text)
    if len(ids) < 2:
        raise InputError(f"perplexity needs a text of two tokens at least, got {len(ids)}")
    return ids


def measure_perplexity(model: Model, ids: Sequence[int], window: int = WINDOW) -> Measured:
    """The exponential of the mean negative log-likelihood of every token but the first.

    Windows of W = min(`window`, what the model takes, the text) tokens begin every W // 2 tokens;
    the last one ends with the text. Each starts with an empty cache. A token is predicted once, in
    the first window that has it and something before it: so in all windows but the first at least
    W // 2 tokens are seen before each. Logits are in the compute dtype of the model (float32 on
    CPU), log-softmax in float32, sums in float64. Some windows run together as rows of one compiled
    call.

    Args:
        model: any.
        ids: of the text, two at least.
        window: most tokens that one prediction may look back at, and one more.
    """
    width = min(window, model.config.max_positions, len(ids))
    starts = _starts(len(ids), width)
    rows = min(_ROWS, len(starts))
    plan = BucketPlan(batch=[rows], tokens=[width], capacity=[width + 1])
    compiled = model.compiled(plan)
    total, scored = 0.0, 1
    for first in range(0, len(starts), rows):
        group = starts[first : first + rows]
        tokens = [list(ids[start : start + width]) for start in group]
        tokens += [tokens[0]] * (rows - len(group))
        inputs = mx.array(tokens, dtype=mx.int32)
        state = compiled.init_cache(rows, width + 1)
        mask = masks.causal(mx.ones((rows, width)), state["lengths"], width + 1)
        logits, _ = compiled.forward(inputs, mask, state)
        losses = _losses(logits, inputs)  # [rows, width - 1]
        for row, start in enumerate(group):
            new = losses[row][max(scored - start, 1) - 1 :]
            total += math.fsum(new)
            scored = start + width
    return Measured(math.exp(total / (len(ids) - 1)), len(ids) - 1, width, model.config.dtype)


def _starts(count: int, width: int) -> list[int]:
    """Where windows begin."""
    starts = list(range(0, count - width, max(width // 2, 1)))
    return [*starts, count - width]


def _losses(logits: mx.array, tokens: mx.array) -> list[list[float]]:
    """`-log p` of every token but the first, row by row: no float32 copy of all logits."""
    losses = []
    for row in range(tokens.shape[0]):
        scores = logits[row, :-1].astype(mx.float32)
        chosen = mx.take_along_axis(scores, tokens[row, 1:, None], axis=-1)[:, 0]
        losses.append((mx.logsumexp(scores, axis=-1) - chosen).tolist())
    return losses  # type: ignore[return-value]
