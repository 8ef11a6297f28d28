"""Judging guesses: what plain decoding would have chosen at every place, and how far it agrees.

A call holds, per row, the last accepted token and then a guess for each following place. The token
that plain decoding chooses at a place depends on the tokens before it and, when it is drawn, on
(seed, position). So as long as the guesses are those tokens, every place is answered as plain
decoding would answer it, and the first wrong guess is replaced by the right token. Output is equal
token for token whatever is guessed, which is simpler than, and implies, the rejection scheme of
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2022.
"""

from __future__ import annotations

from collections.abc import Mapping

from funcrt import sampling
from funcrt.sampling import Sampled

import mlx.core as mx


def judge_greedy(logits: mx.array, tokens: mx.array, valid: mx.array) -> tuple[Sampled, mx.array]:
    """`judge` of rows that all take the most likely token; no history."""
    chosen = sampling.greedy(logits)
    emitted = find_emitted(tokens, valid, chosen)
    return chosen._replace(accepted=count_accepted(emitted)), emitted


def judge(
    logits: mx.array,
    tokens: mx.array,
    valid: mx.array,
    settings: Mapping[str, mx.array],
    lengths: mx.array,
) -> tuple[Sampled, mx.array]:
    """Choose a token at every place and count the guesses that are right.

    Args:
        logits: `[B, T, V]` of a call with `tokens`.
        tokens: int32 `[B, T]`: at the real places the last accepted token, then guesses.
        valid: bool `[B, T]`, real places; padding may stand anywhere.
        settings: as `make_settings` returns them.
        lengths: int32 `[B]`, lengths before the call.

    Returns:
        tokens, logprobs and finite `[B, T]`, what comes after each place; `accepted` and `history`
        with the emitted tokens counted. Also the emitted places, bool `[B, T]`: the first
        `accepted + 1` real ones. What the other places say is of no use.
    """
    by_place = {name: settings[name][:, None] for name in sampling.SETTING_INPUTS}
    by_place["history"] = follow(settings["history"], tokens, valid)
    positions = lengths[:, None] + mx.cumsum(valid.astype(mx.int32), axis=1)
    chosen = sampling.choose(logits, by_place, positions)
    emitted = find_emitted(tokens, valid, chosen)
    history = sampling.record(settings["history"], chosen.tokens, emitted & chosen.finite)
    return chosen._replace(history=history, accepted=count_accepted(emitted)), emitted


def follow(history: mx.array, tokens: mx.array, valid: mx.array) -> mx.array:
    """The history at every place, int32 `[B, T, V]`: the guesses up to it count as generated.

    The first real token does not: it was counted when it was chosen, or stands in the prompt.
    """
    batch, count = tokens.shape
    rank = mx.cumsum(valid.astype(mx.int32), axis=1)
    is_guess = valid & (rank > 1)
    step = mx.arange(count)
    added = is_guess[:, None, :] & (step <= step[:, None])  # [B, T, T]: place, guess
    rows = mx.arange(batch)[:, None, None]
    guesses = mx.where(valid, tokens, 0)  # padding may hold anything
    every = mx.broadcast_to(history[:, None], (batch, count, history.shape[-1]))
    return every.at[rows, step[:, None], guesses[:, None, :]].add(2 * added.astype(mx.int32))


def find_emitted(tokens: mx.array, valid: mx.array, chosen: Sampled) -> mx.array:
    """The places whose chosen token is part of the text, bool `[B, T]`.

    These are the first real place and every one whose guess, and all guesses before it, are the
    tokens that were chosen. A place that is not finite is followed by nothing.
    """
    step = mx.arange(tokens.shape[1], dtype=mx.int32)
    last = mx.cummax(mx.where(valid, step, -1), axis=1)  # the last real place up to each
    before = mx.concatenate([mx.full((tokens.shape[0], 1), -1, mx.int32), last[:, :-1]], axis=1)
    there = mx.maximum(before, 0)
    expected = mx.take_along_axis(chosen.tokens, there, axis=1)
    finite = mx.take_along_axis(chosen.finite, there, axis=1)
    right = ((tokens == expected) & finite) | (before < 0)
    wrong = valid & mx.logical_not(right)
    return valid & (mx.cumsum(wrong.astype(mx.int32), axis=1) == 0)


def count_accepted(emitted: mx.array) -> mx.array:
    """How many guesses are right, int32 `[B]`; 0 for a row without real places."""
    return mx.maximum(mx.sum(emitted.astype(mx.int32), axis=1) - 1, 0)
