"""Choosing the next token: pure functions from logits and per-row settings to tokens.

Everything here compiles and exports: no Python branch looks at a value, no hidden random state.
Settings are arrays with one entry per row, so rows with different settings share one trace;
`settings` makes them on the host.

First `adjust` changes the logits; what it does is off by default. Then `sample` applies, in the
order Hugging Face uses (temperature, top-k, top-p, min-p), filters that each keep a prefix of the
tokens ranked by probability. Together they keep the `count` most likely tokens, so one sort that
only has to yield `count` is enough: no permutation, no gather back.

Exact meaning of each setting, per row, in the order in which they act:

- bias: added to the logits; -inf is "never". `logit_bias` and `allowed_tokens` both end here.
- repetition_penalty: the logit of every token in the prompt or the text so far is divided by it
  where it is positive and multiplied where it is negative, once however often the token stands
  there; 1 is off. (Keskar et al., "CTRL", 2019, section 4.1; negative logits as Hugging Face.)
- presence_penalty, frequency_penalty: taken off the logit of each token generated so far, the
  first once, the second as often as it was generated; 0 is off. (OpenAI's API reference.)
- temperature: logits are divided by it; 0 takes the best adjusted token and ignores the filters.
- top_k: the k most likely tokens, never more; among equal logits the lowest ids stay; 0 is off.
- top_p: the fewest tokens whose share of what top-k left reaches p; the token that crosses p
  stays; 1 is off. (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019.)
- min_p: tokens at least min_p times as likely as the most likely one; 0 is off.
  (Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.)
- seed: with the position it is the whole random key, so a draw depends on nothing else.

A logit of -inf means "never this token" and is legitimate. A row whose logits hold NaN or +inf, or
that leaves no token to choose, is reported as not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from funcrt.ops import exponentials
from funcrt.settings import (
    OPTION_NAMES,
    SETTING_INPUTS,
    SETTING_NAMES,
    History,
    check_settings,
    is_plain_greedy,
    make_history,
    make_settings,
    split_settings,
    stack_settings,
    uses_history,
)

import mlx.core as mx

__all__ = [
    "ALTERNATIVES",
    "OPTION_NAMES",
    "SETTING_INPUTS",
    "SETTING_NAMES",
    "History",
    "Sampled",
    "adjust",
    "check_settings",
    "choose",
    "greedy",
    "is_plain_greedy",
    "make_history",
    "make_settings",
    "record",
    "sample",
    "split_settings",
    "stack_settings",
    "top",
    "uses_history",
]

ALTERNATIVES = 20
"""How many of the most likely tokens `top` gives."""


class Sampled(NamedTuple):
    """What was chosen.

    Attributes:
        tokens: int32 `[B]`, or `[B, T]` where every place of a call is answered.
        logprobs: float32 like `tokens`, of the model's own distribution: before bias, penalties,
            temperature and filters.
        finite: bool like `tokens`. Where it is false the token is 0 and the logprob NaN.
        logits: the raw logits, where a call computed them: `[..., V]`.
        history: int32 `[B, V]`, the settings' own with the new tokens counted.
        accepted: int32 `[B]`, how many guesses were right, where there were any.
    """

    tokens: mx.array
    logprobs: mx.array
    finite: mx.array
    logits: mx.array | None = None
    history: mx.array | None = None
    accepted: mx.array | None = None


def greedy(logits: mx.array) -> Sampled:
    """Take the most likely token of each row, the lowest id among equals.

    Args:
        logits: `[..., V]`, any float type.
    """
    logits = logits.astype(mx.float32)
    return _report(logits, mx.argmax(logits, axis=-1))


def sample(
    logits: mx.array,
    settings: Mapping[str, mx.array],
    positions: mx.array,
    active: mx.array | None = None,
) -> Sampled:
    """Draw one token per row with that row's settings, and count it.

    Args:
        logits: `[B, V]`, any float type; the arithmetic is float32.
        settings: as `make_settings` returns them.
        positions: int32 `[B]`, a number for each draw that its row's seed makes only once, such as
            the place of the token in its sequence.
        active: bool `[B]`, rows whose history counts the new token; None counts it in all. A row
            that is not finite counts none.
    """
    chosen = choose(logits, settings, positions)
    counted = chosen.finite if active is None else chosen.finite & active
    history = record(settings["history"], chosen.tokens[:, None], counted[:, None])
    return chosen._replace(history=history)


def choose(logits: mx.array, settings: Mapping[str, mx.array], positions: mx.array) -> Sampled:
    """`sample` without the counting, for any number of leading axes that settings broadcast to.

    The draw is argmax(logits / temperature + Gumbel noise) over the tokens that the filters keep,
    which has the distribution of a categorical draw (Gumbel 1954; Maddison et al., "A* Sampling",
    2014). Noise belongs to (seed, position, token id): neither other rows nor filters move it.
    """
    logits = logits.astype(mx.float32)
    adjusted = adjust(logits, settings)
    is_greedy = settings["temperature"] == 0
    temperature = mx.where(is_greedy, 1.0, settings["temperature"])[..., None]  # [B, 1]
    ranked = sort_ascending(adjusted)  # [B, V]
    best = ranked[..., -1:]  # [B, 1]
    count = mx.where(is_greedy, 1, count_kept(ranked, temperature, settings))
    keep = mask_most_likely(adjusted, ranked, count)  # [B, V]
    noise = make_noise(settings["seed"], positions, logits.shape[-1])  # [B, V]
    # Subtracting the best first keeps the noise from drowning in a large logits / temperature.
    scores = (adjusted - best) / temperature + noise
    tokens = mx.argmax(mx.where(keep, scores, -mx.inf), axis=-1)
    return _report(logits, tokens, best[..., 0] > -mx.inf)


def adjust(logits: mx.array, settings: Mapping[str, mx.array]) -> mx.array:
    """Float32 logits `[..., V]` with bias and penalties; unchanged where these are off."""
    repetition, presence, frequency = (
        settings[f"{name}_penalty"][..., None] for name in ("repetition", "presence", "frequency")
    )
    history = settings["history"]
    generated = (history >> 1).astype(mx.float32)
    biased = logits + settings["bias"]
    factor = mx.where(history > 0, repetition, 1.0)
    penalized = mx.where(biased < 0, biased * factor, biased / factor)
    return penalized - (frequency * generated + mx.where(generated > 0, presence, 0.0))


def record(history: mx.array, tokens: mx.array, counted: mx.array) -> mx.array:
    """Count generated tokens `[B, N]`, those where `counted` holds, in a history `[B, V]`."""
    rows = mx.arange(tokens.shape[0])[:, None]
    return history.at[rows, tokens].add(2 * counted.astype(mx.int32))


def top(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The most likely tokens of each row, most likely first, the lowest id among equals.

    Args:
        logits: `[B, V]`, any float type.

    Returns:
        ids int32 and log-probabilities float32 of the raw distribution, both `[B, N]`, N the
        smaller of `ALTERNATIVES` and V.
    """
    logits = logits.astype(mx.float32)
    vocab = logits.shape[-1]
    # Unique keys, ordered by logit and then by falling id, make the result exact.
    bits = _flip_negative(mx.view(logits + 0.0, mx.int32)).astype(mx.int64)
    keys = (bits << 32) | mx.arange(vocab - 1, -1, -1).astype(mx.int64)
    keys = mx.sort(mx.topk(keys, min(ALTERNATIVES, vocab), axis=-1), axis=-1)[:, ::-1]
    ids = (vocab - 1 - (keys & 0xFFFFFFFF)).astype(mx.int32)
    return ids, mx.take_along_axis(logits, ids, axis=-1) - exponentials.logsumexp(logits)


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
    top_k, top_p, min_p = (settings[name][..., None] for name in ("top_k", "top_p", "min_p"))
    in_top_k = (mx.arange(vocab, 0, -1) <= top_k) | (top_k == 0)  # [B, V]
    # Probability over that of the best.
    weights = exponentials.exp((ranked - ranked[..., -1:]) / temperature)
    left = mx.where(in_top_k, weights, 0.0)
    above = mx.cumsum(left, axis=-1, reverse=True, inclusive=False)  # mass of likelier tokens
    in_top_p = (above < top_p * (above + left)[..., :1]) | (top_p >= 1)
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
    threshold = mx.take_along_axis(ranked, vocab - count[..., None], axis=-1)  # [B, 1]
    above = logits > threshold
    equal = logits == threshold
    room = count[..., None] - above.astype(mx.int32).sum(axis=-1, keepdims=True)
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
    seed = mx.broadcast_to(seed, positions.shape)
    keys = mx.stack([seed, positions.astype(mx.uint32)], axis=-1).reshape(-1, 2)
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(vocab,), key=key))(keys)
    uniform = uniform.reshape(*positions.shape, vocab)
    return -mx.log(-mx.log1p(-mx.maximum(uniform, 2.0**-33)))


def _flip_negative(bits: mx.array) -> mx.array:
    """Map float bits to integers of the same order, and back: flip all but the sign if negative."""
    return bits ^ mx.where(bits < 0, 0x7FFFFFFF, 0)


def _report(logits: mx.array, tokens: mx.array, has_choice: mx.array | None = None) -> Sampled:
    """Complete the result for the tokens `[...]` chosen from float32 logits `[..., V]`."""
    log_total = exponentials.logsumexp(logits)[..., 0]  # finite exactly if the row is usable
    finite = mx.isfinite(log_total)
    if has_choice is not None:
        finite = finite & has_choice
    tokens = mx.where(finite, tokens.astype(mx.int32), 0)
    chosen = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return Sampled(tokens, mx.where(finite, chosen - log_total, mx.nan), finite)
