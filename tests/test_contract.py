"""The rules of `f(params, tokens, mask, cache_state)`, in every bucket, dtype and form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from funcrt import BucketPlan, masks
from funcrt.cache import CacheState
from funcrt.compiled import Compiled
from funcrt.config import RopeConfig
from funcrt.model import Model
from tests.helpers import (
    KINDS,
    ROUNDING,
    TINY,
    TOLERANCE,
    Array,
    expand,
    filled,
    ids,
    make_model,
    oracle,
    poison,
    random_tokens,
    relative_error,
    run_plain,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

Line = Sequence[int | None]  # one row of a call; None is padding
Round = Sequence[Line]
Forward = Callable[[mx.array, mx.array, CacheState], tuple[mx.array, CacheState]]

PLAN = BucketPlan(batch=(1, 3), tokens=(1, 8), capacity=(24, 40))
PATTERNS = ["left", "hole", "idle", "right", "full"]  # together at most 23 tokens
CASES = [
    *(("eager", kind, bucket) for kind in KINDS for bucket in PLAN),
    *(("compiled", kind, bucket) for kind in ("float32", "affine") for bucket in PLAN),
    # Kernels are compiled for each dtype, a second or so each: one bucket shows what they do.
    *(("compiled", kind, list(PLAN)[-1]) for kind in ("float16", "bfloat16")),
]
model_of = cache(make_model)


@cache
def compiled_of(kind: str) -> Compiled:
    return model_of(kind).compiled(PLAN)


def lay_out(pattern: str, tokens: list[int], width: int) -> Line:
    """Take the first of `tokens` as one row of a call."""
    if width == 1:
        return [None if pattern == "idle" else tokens.pop(0)]
    real = {
        "left": [i >= 3 for i in range(width)],
        "hole": [i % 2 == 0 for i in range(width)],
        "idle": [False] * width,
        "right": [i < 5 for i in range(width)],
        "full": [True] * width,
    }[pattern]
    return [tokens.pop(0) if is_real else None for is_real in real]


def make_rounds(batch: int, width: int) -> tuple[list[Round], list[list[int]]]:
    """Five calls in which every row meets every pattern, and what each row is fed in all."""
    left = [random_tokens(23, row) for row in range(batch)]
    rounds = [
        [lay_out(PATTERNS[(row + n) % 5], left[row], width) for row in range(batch)]
        for n in range(5)
    ]
    fed = [
        [token for calls in rounds for token in calls[row] if token is not None]
        for row in range(batch)
    ]
    return rounds, fed


def play(
    forward: Forward, state: CacheState, rounds: Sequence[Round], *, dirty: bool = False
) -> tuple[list[Array], CacheState]:
    """Logits [N, V] of the N tokens that each row was fed, and the last state.

    `dirty` puts arbitrary ids, out of range too, under the padding and poisons unused slots.
    """
    capacity = state["layers.0.keys"].shape[2]
    logits: list[list[Array]] = [[] for _ in rounds[0]]
    for lines in rounds:
        valid = mx.array([[token is not None for token in line] for line in lines])
        filler = [(-1, 7, TINY.vocab_size, 2**31 - 1)[i % 4] if dirty else 0 for i in range(8)]
        tokens = ids(
            *([f if t is None else t for t, f in zip(line, filler, strict=False)] for line in lines)
        )
        state = poison(state) if dirty else state
        mask = masks.causal(valid, state["lengths"], capacity)
        result, state = forward(tokens, mask, state)
        for row, line in enumerate(lines):
            real = [i for i, token in enumerate(line) if token is not None]
            logits[row].append(to_numpy(result[row])[real])
    return [np.concatenate(parts) for parts in logits], state


def only(rounds: Sequence[Round], row: int) -> list[Round]:
    """The same calls with every other row idle."""
    return [
        [line if r == row else [None] * len(line) for r, line in enumerate(lines)]
        for lines in rounds
    ]


def aligned(rounds: Sequence[Round], side: str) -> list[Round]:
    """The same calls with the padding of every row moved to one side."""
    key: Callable[[int | None], bool] = lambda t: (t is None) == (side == "right")  # noqa: E731
    return [[sorted(line, key=key) for line in lines] for lines in rounds]


def forward_of(form: str, kind: str) -> Forward:
    model = model_of(kind)
    return partial(model.forward, model.params) if form == "eager" else compiled_of(kind).forward


@pytest.mark.parametrize(("form", "kind", "bucket"), CASES, ids=lambda value: str(value))
def test_a_row_depends_on_nothing_but_its_tokens(form, kind, bucket):
    forward, model = forward_of(form, kind), model_of(kind)
    rounds, fed = make_rounds(bucket.batch, bucket.tokens)
    empty = model.init_cache(bucket.batch, bucket.capacity)
    logits, state = play(forward, empty, rounds)
    assert state["lengths"].tolist() == [len(tokens) for tokens in fed]
    others = [
        *((play(forward, empty, only(rounds, r), dirty=True), [r]) for r in range(bucket.batch)),
        (play(forward, empty, rounds, dirty=True), range(bucket.batch)),
        (play(forward, empty, aligned(rounds, "left")), range(bucket.batch)),
        (play(forward, empty, aligned(rounds, "right"), dirty=True), range(bucket.batch)),
    ]
    for (other_logits, other_state), rows in others:
        for row in rows:
            np.testing.assert_array_equal(other_logits[row], logits[row])
            assert other_state["lengths"][row].item() == len(fed[row])
            for ours, theirs in zip(filled(other_state, row), filled(state, row), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    if form == "compiled":
        assert compiled_of(kind).traces[f"forward_{bucket}"] == 1
    check_accuracy(model, kind, logits, fed)


def check_accuracy(model: Model, kind: str, logits: list[Array], fed: list[list[int]]) -> None:
    """Against the reference: float32, eager, uncached, one row at a time."""
    plain = [run_plain(model, tokens)[0] for tokens in fed]
    if kind == "float32":
        assert relative_error(np.concatenate(logits), np.concatenate(plain)) <= TOLERANCE
        return
    exact = Model(replace(model.config, dtype="float32"), model.params)
    reference = np.concatenate([run_plain(exact, tokens)[0] for tokens in fed])
    allowed = ROUNDING * relative_error(np.concatenate(plain), reference)
    assert relative_error(np.concatenate(logits), reference) <= max(allowed, TOLERANCE)


# --- the reference itself -------------------------------------------------------------------------

VARIANTS = {
    "grouped": {},
    "multi-head": {"num_kv_heads": 4},
    "multi-query": {"num_kv_heads": 1},
    "wide heads": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "another base": {"rope": RopeConfig(theta=500.0)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["float32", "affine"])
def test_plain_run_agrees_with_numpy(kind, variant):
    model = make_model(kind, **VARIANTS[variant])
    tokens = random_tokens(40)
    expected = oracle(model.config, expand(model), tokens)
    assert relative_error(run_plain(model, tokens)[0], expected) <= TOLERANCE


def test_attention_is_far_from_uniform():
    """Otherwise masks and positions could be wrong and no logit would say so."""
    weights = expand(model_of("float32"))
    blind = {name: 0 * array if "q_proj" in name else array for name, array in weights.items()}
    tokens = random_tokens(40)
    expected = oracle(TINY, weights, tokens)
    assert relative_error(oracle(TINY, blind, tokens), expected) > 0.3
    shifted = oracle(TINY, weights, tokens, positions=[2 * i for i in range(40)])
    assert relative_error(shifted, expected) > 0.1


@pytest.mark.parametrize("widths", [[601], [256] * 3, [64] * 10, [7, 1, 300, 1, 1, 291]], ids=str)
def test_a_long_prompt_in_any_chunks(widths):
    model, tokens, start = model_of("float32"), random_tokens(601), 0
    state, parts = model.init_cache(1, 640), []
    for width in widths:
        chunk = tokens[start : start + width]
        padding = width - len(chunk)  # the last chunk is padded on the left
        valid = mx.arange(width)[None] >= padding
        mask = masks.causal(valid, state["lengths"], 640)
        logits, state = model.forward(model.params, ids([0] * padding + chunk), mask, state)
        parts.append(to_numpy(logits[0])[padding:])
        start += len(chunk)
    assert state["lengths"].tolist() == [601]
    expected = oracle(model.config, expand(model), tokens)
    assert relative_error(np.concatenate(parts), expected) <= TOLERANCE
