"""Every prompt of a batch gets what it would get alone, whatever happens to its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from funcrt import BucketPlan, Engine
from tests.engine.gates import Gate
from tests.engine.harness import PLAN
from tests.helpers import generate_plain, make_model, random_tokens, run_plain

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


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_is_the_same_in_pieces(engine):
    completions = engine.generate(PROMPTS, max_tokens=[3, 1, 4, 2, 5, 6, 1, 2])
    chunks = list(engine.stream(PROMPTS, max_tokens=[3, 1, 4, 2, 5, 6, 1, 2]))
    for i, completion in enumerate(completions):
        mine = [chunk for chunk in chunks if chunk.index == i]
        assert [chunk.token for chunk in mine] == completion.tokens
        assert [chunk.finish_reason for chunk in mine] == ["", *[""] * 9, "length"][-len(mine) :]
    assert [chunk.index for chunk in chunks] != sorted(chunk.index for chunk in chunks)


def test_a_stream_comes_as_it_is_made():
    """The engine stands still at a step; what came before that has been handed out."""
    with Gate(after=3) as gate, Engine(MODEL, PLAN, on_step=gate) as engine:
        stream = engine.stream(PROMPTS[:2], max_tokens=9)
        assert engine.stats.steps == 0  # it begins with the first chunk that is asked for
        chunks = [next(stream)]
        assert gate.reached.wait(60)
        assert 0 < engine.stats.generated_tokens < 18
        gate.__exit__()
        chunks += stream
    for index in (0, 1):
        tokens = [chunk.token for chunk in chunks if chunk.index == index]
        assert tokens == alone(PROMPTS[index], 9)


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
