"""Choosing the next token: pure functions from logits and per-row settings to tokens.

Everything traced here compiles and exports: no Python branch looks at a value, no hidden random
state. Settings are arrays with one entry per row, so rows with different settings share one trace.

`sample` applies, in the order Hugging Face uses (temperature, top-k, top-p, min-p), filters that
each keep a prefix of the tokens ranked by probability. Together they keep the `count` most likely
tokens, so one sort that only has to yield `count` is enough: no permutation, no gather back.

Exact meaning of each setting, per row:

- temperature: logits are divided by it; 0 takes the most likely token and ignores the filters.
- top_k: the k most likely tokens, never more; among equal logits the lowest ids stay; 0 is off.
- top_p: the fewest tokens whose share of what top-k left reaches p; the token that crosses p
  stays; 1 is off. (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019.)
- min_p: tokens at least min_p times as likely as the most likely one; 0 is off.
  (Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.)
- seed: with the position it is the whole random key, so a draw depends on nothing else.

A logit of -inf means "never this token" and is legitimate. A row that holds NaN or +inf, or
nothing but -inf, is reported as not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeAlias

from funcrt.errors import InputError

import mlx.core as mx

SETTING_NAMES = ("temperature", "top_k", "top_p", "min_p", "seed")
"""The keys of a settings dict, in the order in which exported functions take them."""

_FLOAT32_TINY = 2.0**-126  # the smallest normal float32: smaller ones may be flushed to 0
_FLOAT32_MAX = float(mx.finfo(mx.float32).max)
_WANTED = {
    "temperature": "a finite number of at least 0 (0 is greedy)",
    "top_k": "a whole number from 0 (off) to 2**31 - 1",
    "top_p": "a number above 0 and at most 1 (1 is off)",
    "min_p": "a number from 0 (off) to 1",
    "seed": "a whole number from 0 to 2**32 - 1",
}

Sampled: TypeAlias = tuple[mx.array, mx.array, mx.array]
"""(tokens int32 [B], logprobs float32 [B], finite bool [B])."""


def make_settings(
    batch: int,
    *,
    temperature: float | Iterable[float] = 0.0,
    top_k: int | Iterable[int] = 0,
    top_p: float | Iterable[float] = 1.0,
    min_p: float | Iterable[float] = 0.0,
    seed: int | Iterable[int] = 0,
) -> dict[str, mx.array]:
    """Build the settings of `batch` rows on the host; the defaults are greedy with no filter.

    Each argument is one number for all rows or one per row; the top of this file says what it
    means. Seeds have 32 bits because the random key holds 64 and the position takes the other half.

    Returns:
        One array [B] under each of `SETTING_NAMES`: top_k int32, seed uint32, the others float32.

    Raises:
        InputError: a value outside its range, NaN, a wrong type or a wrong number of rows.
    """
    above_0 = math.ulp(0.0)  # the smallest float there is
    temperatures = _check_rows("temperature", temperature, batch, Real, 0, _FLOAT32_MAX)
    top_ps = _check_rows("top_p", top_p, batch, Real, above_0, 1)
    min_ps = _check_rows("min_p", min_p, batch, Real, 0, 1)
    top_ks = _check_rows("top_k", top_k, batch, Integral, 0, 2**31 - 1)
    seeds = _check_rows("seed", seed, batch, Integral, 0, 2**32 - 1)
    return {
        "temperature": _make_floats(temperatures),
        "top_k": mx.array([int(row) for row in top_ks], dtype=mx.int32),
        "top_p": _make_floats(top_ps),
        "min_p": _make_floats(min_ps),
        "seed": mx.array([int(row) for row in seeds], dtype=mx.uint32),
    }


def greedy(logits: mx.array) -> Sampled:
    """Take the most likely token of each row, the lowest id among equals.

    Args:
        logits: [B, V], any float type.

    Returns:
        tokens int32 [B], logprobs float32 [B], finite bool [B], as `sample`.
    """
    logits = logits.astype(mx.float32)
    return _report(logits, mx.argmax(logits, axis=-1))


def sample(logits: mx.array, settings: Mapping[str, mx.array], positions: mx.array) -> Sampled:
    """Draw one token per row with that row's settings.

    The draw is argmax(logits / temperature + Gumbel noise) over the tokens that the filters keep,
    which has the distribution of a categorical draw (Gumbel 1954; Maddison et al., "A* Sampling",
    2014). Noise belongs to (seed, position, token id): neither other rows nor filters move it.

    Args:
        logits: [B, V], any float type; the arithmetic is float32.
        settings: as `make_settings` returns them.
        positions: int32 [B], a number for each draw that its row's seed makes only once, such as
            the place of the token in its sequence.

    Returns:
        tokens: int32 [B].
        logprobs: float32 [B], of the token under softmax(logits): before temperature and filters.
        finite: bool [B]. A row that is not finite gets token 0 and logprob NaN.
    """
    logits = logits.astype(mx.float32)
    is_greedy = settings["temperature"] == 0
    temperature = mx.where(is_greedy, 1.0, settings["temperature"])[:, None]  # [B, 1]
    ranked = sort_ascending(logits)  # [B, V]
    best = ranked[:, -1:]  # [B, 1]
    count = mx.where(is_greedy, 1, count_kept(ranked, temperature, settings))
    keep = mask_most_likely(logits, ranked, count)  # [B, V]
    noise = make_noise(settings["seed"], positions, logits.shape[-1])  # [B, V]
    # Subtracting the best first keeps the noise from drowning in a large logits / temperature.
    scores = (logits - best) / temperature + noise
    return _report(logits, mx.argmax(mx.where(keep, scores, -mx.inf), axis=-1))


def sort_ascending(logits: mx.array) -> mx.array:
    """Sort float32 [B, V] along its last axis, as integers, which the CPU does 1.5 times faster."""
    keys = mx.sort(_flip_negative(mx.view(logits, mx.int32)), axis=-1)
    return mx.view(_flip_negative(keys), mx.float32)


def count_kept(
    ranked: mx.array, temperature: mx.array, settings: Mapping[str, mx.array]
) -> mx.array:
    """How many of the most likely tokens top-k, top-p and min-p leave: int32 [B], at least 1.

    Args:
        ranked: logits sorted ascending, float32 [B, V].
        temperature: float32 [B, 1], not 0.
        settings: as `make_settings` returns them.
    """
    vocab = ranked.shape[-1]
    top_k, top_p, min_p = (settings[name][:, None] for name in ("top_k", "top_p", "min_p"))
    in_top_k = (mx.arange(vocab, 0, -1) <= top_k) | (top_k == 0)  # [B, V]
    weights = mx.exp((ranked - ranked[:, -1:]) / temperature)  # probability over that of the best
    left = mx.where(in_top_k, weights, 0.0)
    above = mx.cumsum(left, axis=-1, reverse=True, inclusive=False)  # mass of likelier tokens
    in_top_p = (above < top_p * (above + left)[:, :1]) | (top_p >= 1)
    kept = in_top_k & in_top_p & (weights >= min_p)
    return mx.maximum(kept.astype(mx.int32).sum(axis=-1), 1)


def mask_most_likely(logits: mx.array, ranked: mx.array, count: mx.array) -> mx.array:
    """Mark the `count` largest logits of each row, the lowest ids among equals: bool [B, V].

    Args:
        logits: float32 [B, V].
        ranked: the same, sorted ascending.
        count: int32 [B], 1 to V.
    """
    vocab = logits.shape[-1]
    threshold = mx.take_along_axis(ranked, vocab - count[:, None], axis=-1)  # [B, 1]
    above = logits > threshold
    equal = logits == threshold
    room = count[:, None] - above.astype(mx.int32).sum(axis=-1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))


def make_noise(seed: mx.array, positions: mx.array, vocab: int) -> mx.array:
    """Standard Gumbel noise float32 [B, vocab], a function of each row's (seed, position) alone.

    Always finite. Unlike in the usual -log(-log(u)), large values come from u near 0, where float32
    is dense: near 1 it has so few values that flat distributions over a large vocabulary would
    often tie, and the lowest ids would be drawn too often.

    Args:
        seed: uint32 [B].
        positions: int32 [B].
        vocab: V.
    """
    keys = mx.stack([seed, positions.astype(mx.uint32)], axis=-1)  # [B, 2]
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(vocab,), key=key))(keys)
    return -mx.log(-mx.log1p(-mx.maximum(uniform, 2.0**-33)))


def _flip_negative(bits: mx.array) -> mx.array:
    """Map float bits to integers of the same order, and back: flip all but the sign if negative."""
    return bits ^ mx.where(bits < 0, 0x7FFFFFFF, 0)


def _report(logits: mx.array, tokens: mx.array) -> Sampled:
    """Complete the result for the chosen tokens [B] of float32 logits [B, V]."""
    log_total = mx.logsumexp(logits, axis=-1)  # finite exactly if the row is usable
    finite = mx.isfinite(log_total)
    tokens = mx.where(finite, tokens.astype(mx.int32), 0)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, mx.where(finite, chosen - log_total, mx.nan), finite


def _check_rows(
    name: str, value: object, batch: int, kind: type[Any], low: float, high: float
) -> list[Any]:
    """Spread one value over the rows, or take one per row; check each against [low, high]."""
    rows: list[Any] = [value] * batch
    if isinstance(value, Iterable) and not isinstance(value, str):
        rows = list(value)
    if len(rows) != batch:
        raise InputError(
            f"{name}: expected one value or {batch}, one per row, got {len(rows)}: "
            "pass as many values as there are rows"
        )
    for row in rows:
        if not isinstance(row, kind) or not low <= row <= high:
            raise InputError(f"{name} must be {_WANTED[name]}, got {row!r}: correct that value")
    return rows


def _make_floats(rows: list[Any]) -> mx.array:
    """Build float32 [B] in which what was not 0 is not 0 either."""
    return mx.array([max(float(row), _FLOAT32_TINY) if row > 0 else 0.0 for row in rows])
