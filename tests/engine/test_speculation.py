"""Guesses make texts come sooner, and never another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from funcrt import BucketPlan, Engine
from funcrt.errors import InputError
from tests.engine.harness import (
    CACHES,
    PLAN,
    DirectEngine,
    Subject,
    check_traces,
    draft,
    make_tokenizer,
    oracle,
    subject,
    toys,
)
from tests.helpers import make_model, random_tokens

import pytest

PROMPTS = [random_tokens(count, count) for count in (5, 1, 19, 8, 30, 12)]
REPEATING = [7, 3, 9, 4] * 5
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.1, "seed": 5}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with toys():
        yield


def drafts(kind: str) -> list[Any]:
    kind = "full" if kind in ("toy_hybrid", "toy_recurrent") else kind
    return ["ngram", draft(kind, 0.0), draft(kind, 0.1), draft(kind, 3.0)]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_text_is_the_same_with_guesses(kind, options):
    """All of the drafters at once, one each, in one batch and alone."""
    chosen = [*drafts(kind), None]
    prompts = [*PROMPTS, REPEATING]
    expected = [oracle(kind).complete(prompt, 16, **options)[0] for prompt in prompts]
    engine = DirectEngine(subject(kind))
    handles = [
        (engine.submit(prompt, max_tokens=16, speculate=chosen[(i + j) % 5], **options), i)
        for j in range(5)
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    engine.check_idle()
    for handle, i in handles:
        assert handle.result(0).tokens == expected[i]
    assert engine.stats.guessed_tokens > engine.stats.accepted_tokens > 0


def test_a_model_guesses_itself_right():
    """Acceptance is all; fewer calls than tokens."""
    model = subject("full")
    for options in ({}, SAMPLED):
        engine = DirectEngine(model, speculate=model)
        handles = [engine.submit(p, max_tokens=16, **options) for p in PROMPTS[:3]]
        engine.run()
        stats = engine.stats
        assert stats.acceptance == 1
        calls = sum(report.function == "verify" for report in engine.reports)
        assert calls < 8
        assert [h.result(0).tokens for h in handles] == [
            oracle("full").complete(p, 16, **options)[0] for p in PROMPTS[:3]
        ]


def test_a_text_that_repeats_itself_is_guessed():
    """Forced to alternate, n-grams are right but for the first few."""
    forced: dict[str, Any] = {"allowed_tokens": [7], "max_tokens": 24, "speculate": "ngram"}
    engine = DirectEngine(subject("full"))
    handle = engine.submit([1, 2, 7, 7, 7], **forced)
    engine.run()
    assert handle.result(0).tokens == [7] * 24
    assert engine.stats.acceptance > 0.9
    assert len(engine.reports) < 10


def test_guesses_keep_within_the_limits():
    """At every distance to max_tokens and to the largest capacity."""
    model = subject("full")
    for guesser in ("ngram", model):
        engine = DirectEngine(model, speculate=guesser)
        wishes = [(PROMPTS[0], count) for count in range(1, 8)]
        wishes += [([*REPEATING, *REPEATING, *REPEATING][:length], 99) for length in range(40, 48)]
        handles = [engine.submit(prompt, max_tokens=count) for prompt, count in wishes]
        engine.run()
        engine.check_idle()
        for handle, (prompt, count) in zip(handles, wishes, strict=True):
            tokens, _, reason = oracle("full").complete(prompt, count)
            assert handle.result(0).tokens == tokens
            assert handle.result(0).finish_reason == reason
            assert len(tokens) <= 48 - len(prompt)


def test_a_draft_may_have_less_room_than_the_model():
    """Past the draft's capacity, and in more rows than it has, a text goes on without it."""
    model = subject("full")

    class Small(Subject):
        def compiled(self, plan: BucketPlan | None = None) -> Any:
            return super().compiled(BucketPlan(batch=2, tokens=(4, 8), capacity=24))

    engine = DirectEngine(model, speculate=Small(model.model))
    handles = [engine.submit(prompt, max_tokens=30) for prompt in PROMPTS]
    engine.run()
    engine.check_idle()
    assert engine.stats.accepted_tokens > 0
    for handle, prompt in zip(handles, PROMPTS, strict=True):
        assert handle.result(0).tokens == oracle("full").complete(prompt, 30)[0]


def test_a_draft_row_that_rests_is_kept_whole():
    """A long text that is hard to guess beside a short one that is easy."""
    model, hard = subject("full"), draft("full", 0.1)
    engine = DirectEngine(model, speculate=hard)
    for seed in range(4):
        longest = engine.submit(random_tokens(26, seed), max_tokens=20)
        others = [engine.submit(random_tokens(2, seed + i), max_tokens=15) for i in range(4)]
        engine.run()
        engine.check_idle()
        assert longest.result(0).tokens == oracle("full").complete(random_tokens(26, seed), 20)[0]
        for i, other in enumerate(others):
            expected = oracle("full").complete(random_tokens(2, seed + i), 15)[0]
            assert other.result(0).tokens == expected


def test_drafts_that_do_not_fit_are_refused():
    model = subject("full")
    with pytest.raises(InputError, match="draft model has 97 ids, the model 96"):
        Engine(model, PLAN, speculate=make_model(vocab_size=97))
    engine = DirectEngine(model)
    with pytest.raises(InputError, match="draft model has 64 ids"):
        engine.submit([1, 2], speculate=make_model(vocab_size=64))
    for kind in ("toy_hybrid", "toy_recurrent"):
        with pytest.raises(InputError, match="recurrent layers cannot take guesses back"):
            engine.submit([1, 2], speculate=subject(kind))
    other = Subject(model.model)
    other.tokenizer = make_tokenizer(shift=1)
    with pytest.raises(InputError, match="another tokenizer"):
        engine.submit([1, 2], speculate=other)
    assert not engine.busy


@pytest.mark.parametrize("guesser", ["ngram", "near"])
def test_distributions_are_those_of_the_model(guesser):
    """Chi-square of the first three new tokens over many seeds, with three ids allowed."""
    model = subject("full")
    allowed, prompt = [3, 5, 8], [3, 3, 5, 5, 8, 8, 3, 8, 5, 3]  # every pair stands in it
    speculate = draft("full", 0.1) if guesser == "near" else guesser
    engine = DirectEngine(model, BucketPlan(batch=2, tokens=(4, 16), capacity=24))
    count = 400 if guesser == "ngram" else 240
    options: dict[str, Any] = {"temperature": 1.5, "allowed_tokens": allowed}
    handles = [
        engine.submit(prompt, max_tokens=3, seed=seed, speculate=speculate, **options)
        for seed in range(count)
    ]
    engine.run(20_000)
    assert engine.stats.accepted_tokens > count / 10
    found = Counter(tuple(handle.result(0).tokens) for handle in handles)
    known = oracle("full")

    def chances(tokens: Sequence[int]) -> dict[int, float]:
        logits = known.logits([*prompt, *tokens]).tolist()[0]
        weights = {i: 2.718281828459045 ** (logits[i] / 1.5) for i in allowed}
        return {i: weight / sum(weights.values()) for i, weight in weights.items()}

    expected = {
        (a, b, c): count * p * q * r
        for a, p in chances([]).items()
        for b, q in chances([a]).items()
        for c, r in chances([a, b]).items()
    }
    likely = {tokens: number for tokens, number in expected.items() if number >= 5}
    chi = sum((found[tokens] - number) ** 2 / number for tokens, number in likely.items())
    rest = count - sum(likely.values())
    if rest >= 5:
        chi += (count - sum(found[tokens] for tokens in likely) - rest) ** 2 / rest
    assert len(likely) > 8
    assert chi < 62  # the 0.9999 quantile for 26 degrees of freedom
    assert sum(found.values()) == count
    check_traces(engine.compiled)
