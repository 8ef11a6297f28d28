"""Every prompt of a batch gets what it would get alone, whatever happens to its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from funcrt import BucketPlan, Engine
from funcrt.model import Model
from tests.engine.harness import PLAN
from tests.helpers import TINY, generate_plain, make_model, make_params, random_tokens, run_plain

import mlx.core as mx
import numpy as np
import pytest

PROMPTS = [random_tokens(count, count) for count in (5, 1, 19, 8, 30, 2, 9, 12)]
MODEL = make_model()
alone = partial(generate_plain, MODEL)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, PLAN) as made:
        yield made


def test_more_prompts_than_rows(engine):
    limits = [7, 3, 6, 1, 9, 12, 2, 5]
    completions = engine.generate(PROMPTS, max_tokens=limits)
    for prompt, limit, completion in zip(PROMPTS, limits, completions, strict=True):
        assert completion.tokens == alone(prompt, limit)
        assert completion.finish_reason == "length"
        assert completion.prompt_tokens == len(prompt)
        assert completion.text == ""
        for n, (token, logprob) in enumerate(
            zip(completion.tokens, completion.logprobs, strict=True)
        ):
            logits = run_plain(engine.model, [*prompt, *completion.tokens[:n]])[0][-1]
            expected = logits[token] - np.log(np.exp(logits).sum())
            assert logprob == pytest.approx(expected, abs=1e-4)


SETTINGS = {
    "temperature": [0.0, 1.0, 0.7, 1.3, 1.0, 0.0, 2.0, 1.0],
    "top_k": [0, 0, 5, 3, 0, 2, 0, 0],
    "top_p": [1.0, 0.9, 1.0, 0.8, 1.0, 1.0, 0.5, 1.0],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.1],
    "seed": [1, 2, 3, 4, 5, 6, 7, 2**32 - 1],
}


def test_rows_with_other_settings(engine):
    completions = engine.generate(PROMPTS, max_tokens=6, **SETTINGS)
    for i, prompt in enumerate(PROMPTS):
        settings = {name: values[i] for name, values in SETTINGS.items()}
        assert completions[i].tokens == alone(prompt, 6, **settings)
    # Other neighbours, another order and no neighbours at all: the same draws.
    order = [3, 7, 1, 0, 5, 2, 6, 4]
    moved = {name: [values[i] for i in order] for name, values in SETTINGS.items()}
    again = engine.generate([PROMPTS[i] for i in order], max_tokens=6, **moved)
    assert [c.tokens for c in again] == [completions[i].tokens for i in order]
    settings = {name: values[2] for name, values in SETTINGS.items()}
    assert engine.generate(PROMPTS[2], max_tokens=6, **settings)[0].tokens == completions[2].tokens


def test_seeds_decide_and_nothing_else_does(engine):
    def draw(seed: int) -> list[int]:
        return engine.generate(PROMPTS[0], max_tokens=12, temperature=1.5, seed=seed)[0].tokens

    first = draw(1)
    assert draw(1) == first
    assert draw(2) != first
    assert len({tuple(draw(seed)) for seed in range(5)}) == 5


def test_nothing_retraces(engine):
    engine.generate(PROMPTS, max_tokens=4)
    engine.generate(PROMPTS[:1], max_tokens=[2], temperature=0.3)
    assert engine.compiled.traces
    assert set(engine.compiled.traces.values()) == {1}
    names = {name.partition("_b")[0] for name in engine.compiled.traces}
    assert names <= {"prefill", "decode", "decode_greedy", "sample"}


def test_one_prompt_alone_and_none(engine):
    expected = alone(PROMPTS[0], 3)
    for prompts in (PROMPTS[0], tuple(PROMPTS[0]), [PROMPTS[0]], [tuple(PROMPTS[0])]):
        (completion,) = engine.generate(prompts, max_tokens=3)
        assert completion.tokens == expected
    assert engine.generate([]) == []
    assert list(engine.stream([])) == []
    assert len(engine.generate([1], max_tokens=5)[0].tokens) == 5


def test_a_full_capacity_ends_a_completion(engine):
    for length, room in [(40, 8), (46, 2), (47, 1)]:
        prompt = random_tokens(length)
        with_neighbour = engine.generate([prompt, [3]], max_tokens=[1000, 4])
        assert with_neighbour[0].finish_reason == "length"
        assert with_neighbour[0].tokens == alone(prompt, room)
        assert with_neighbour[1].tokens == alone([3], 4)
    assert len(engine.generate([5], max_tokens=10**9)[0].tokens) == 47
    assert len(engine.generate([5])[0].tokens) == 47


def test_the_default_limit_is_128():
    engine = Engine(MODEL, BucketPlan(batch=1, tokens=8, capacity=256))
    assert len(engine.generate([5])[0].tokens) == 128


# --- rows that break ------------------------------------------------------------------------------


def break_id(token: int) -> Model:
    """A model that gives NaN for everything once it has read `token`."""
    params = make_params(TINY)
    embedding = params["model.embed_tokens.weight"]
    params["model.embed_tokens.weight"] = mx.where(
        mx.arange(TINY.vocab_size)[:, None] == token, mx.nan, embedding
    )
    return Model(TINY, params)


def test_a_row_that_breaks_harms_nobody():
    """It reads the id in its prompt, early or late; its row is used again."""
    expected = {i: alone(prompt, 5) for i, prompt in enumerate(PROMPTS)}
    used = {token for tokens in [*PROMPTS, *expected.values()] for token in tokens}
    bad = next(token for token in range(TINY.vocab_size) if token not in used)
    engine = Engine(break_id(bad), PLAN)
    for position in (0, 3, 17):
        broken = random_tokens(18, 3)
        broken[position] = bad
        mixed = [PROMPTS[0], broken, PROMPTS[1], broken, broken, *PROMPTS[2:], broken, PROMPTS[3]]
        completions = engine.generate(mixed, max_tokens=5)
        for prompt, completion in zip(mixed, completions, strict=True):
            if prompt is broken:
                assert (completion.finish_reason, completion.tokens) == ("error", [])
            else:
                assert completion.tokens == expected[PROMPTS.index(prompt)]
                assert completion.finish_reason == "length"
        sampled = engine.generate([broken, PROMPTS[0]], max_tokens=5, temperature=[1.0, 0.0])
        assert [c.finish_reason for c in sampled] == ["error", "length"]
        assert sampled[1].tokens == expected[0]


def test_a_row_may_break_while_it_generates():
    prompt, others = PROMPTS[0], [PROMPTS[3], PROMPTS[5], PROMPTS[6], PROMPTS[2]]
    tokens = alone(prompt, 8)
    elsewhere = {t for other in others for t in [*other, *alone(other, 8)]} | set(prompt)
    step = next(n for n, token in enumerate(tokens) if token not in elsewhere | set(tokens[:n]))
    engine = Engine(break_id(tokens[step]), PLAN)
    completions = engine.generate([others[0], prompt, others[1], *others[2:]], max_tokens=8)
    assert completions[1].finish_reason == "error"
    assert completions[1].tokens == tokens[: step + 1]
    assert len(completions[1].logprobs) == step + 1
    del completions[1]
    assert [c.tokens for c in completions] == [alone(other, 8) for other in others]


def test_the_filler_of_padding_may_be_broken():
    prompts = [[t or 1 for t in prompt] for prompt in PROMPTS]
    expected = [alone(prompt, 4) for prompt in prompts]
    assert all(0 not in tokens[:-1] for tokens in expected)
    completions = Engine(break_id(0), PLAN).generate(prompts, max_tokens=4)
    assert [c.tokens for c in completions] == expected


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_is_the_same_in_pieces(engine):
    completions = engine.generate(PROMPTS, max_tokens=[3, 1, 4, 2, 5, 6, 1, 2])
    chunks = list(engine.stream(PROMPTS, max_tokens=[3, 1, 4, 2, 5, 6, 1, 2]))
    for i, completion in enumerate(completions):
        mine = [chunk for chunk in chunks if chunk.index == i]
        assert [chunk.token for chunk in mine] == completion.tokens
        assert [chunk.finish_reason for chunk in mine] == ["", *[""] * 9, "length"][-len(mine) :]
    assert [chunk.index for chunk in chunks] != sorted(chunk.index for chunk in chunks)


def test_a_stream_comes_as_it_is_made(engine):
    before = engine.stats.generated_tokens
    stream = engine.stream(PROMPTS[:2], max_tokens=5)
    assert engine.stats.generated_tokens == before
    next(stream)
    assert engine.stats.generated_tokens - before < 4


def test_streams_may_be_closed_early_and_interleaved(engine):
    stream = engine.stream(PROMPTS, max_tokens=6)
    for _ in range(5):
        next(stream)
    stream.close()
    first, second = (engine.stream(PROMPTS[i], max_tokens=6) for i in (0, 2))
    pairs = [(a.token, b.token) for a, b in zip(first, second, strict=True)]
    assert [a for a, _ in pairs] == alone(PROMPTS[0], 6)
    assert [b for _, b in pairs] == alone(PROMPTS[2], 6)


def test_stats_count_tokens():
    engine = Engine(MODEL, PLAN)
    engine.generate(PROMPTS[:4], max_tokens=[1, 2, 3, 4])
    stats = engine.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.decode_tokens) == (33, 10, 6)
    assert stats.prompt_seconds > 0
    assert stats.prompt_rate == stats.prompt_tokens / stats.prompt_seconds
    assert stats.decode_rate == stats.decode_tokens / stats.decode_seconds
    assert Engine(MODEL, PLAN).stats.decode_rate == 0
