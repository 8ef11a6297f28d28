"""Models in 16 bits: a text is what it is alone, to the token, though ties are nearer there."""

from __future__ import annotations

from functools import cache as memo
from typing import Any

from tests.engine.harness import DirectEngine, Oracle, Subject, check_traces
from tests.helpers import make_model, random_tokens

import mlx.core as mx
import pytest

REPEATING = [7, 3, 9, 4] * 5
PROMPTS = [*(random_tokens(count, count) for count in (5, 1, 19, 8, 30, 12)), REPEATING]
SAMPLED: dict[str, Any] = {
    "temperature": 0.8, "seed": 5, "repetition_penalty": 1.1, "allowed_tokens": [3, 4, 7, 9, 20, 40]
}  # fmt: skip


@memo
def made(dtype: str) -> tuple[Subject, Oracle]:
    model = Subject(make_model(dtype))
    return model, Oracle(model)


@pytest.mark.parametrize("speculate", [None, "ngram"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_batch_says_what_each_says_alone(dtype, options, speculate):
    """No step is another one, not even where two tokens are nearly as likely."""
    model, known = made(dtype)
    # On a GPU so short texts would hardly be asked about.
    engine = DirectEngine(model, speculate=speculate, ahead=speculate is None)
    handles = [engine.submit(prompt, max_tokens=18, **options) for prompt in PROMPTS]
    engine.run()
    engine.check_idle()
    check_traces(engine.compiled)
    assert max(report.rows for report in engine.reports) == 3
    assert (engine.stats.accepted_tokens > 0) == (speculate is not None)
    eps = mx.finfo(getattr(mx, dtype)).eps
    others: list[tuple[int, int, float]] = []  # prompt, step, by how much its own token leads
    for index, (prompt, handle) in enumerate(zip(PROMPTS, handles, strict=True)):
        done = handle.result(0)
        assert len(done.tokens) == 18
        for step, (token, logprob) in enumerate(zip(done.tokens, done.logprobs, strict=True)):
            before = done.tokens[:step]
            if known.next(prompt, before, options) != token:
                others.append((index, step, known.gap(prompt, before, options)))
            expected = known.distribution([*prompt, *before])[token]
            assert abs(logprob - expected) <= eps * known.scale([*prompt, *before])
    assert others == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_after_the_other_as_all_at_once(dtype):
    model, _ = made(dtype)
    together, single = DirectEngine(model), DirectEngine(model)
    handles = [together.submit(prompt, max_tokens=12) for prompt in PROMPTS]
    together.run()
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        alone = single.submit(prompt, max_tokens=12)
        single.run()
        assert alone.result(0).tokens == handle.result(0).tokens
