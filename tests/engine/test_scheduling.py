"""Who gets the next call: nobody waits long, and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from funcrt.buckets import Bucket, BucketPlan
from funcrt.cache import CacheLayout, init_cache, state_size
from funcrt.engine.rows import Rows
from funcrt.errors import EngineError
from tests.cache_kinds import model_of
from tests.engine.harness import CACHES, DirectEngine, oracle, subject, toys
from tests.helpers import random_tokens

import mlx.core as mx
import pytest


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with toys():
        yield


def test_running_rows_never_wait_longer_than_one_chunk():
    engine = DirectEngine(subject("full"))
    engine.submit([1, 2], max_tokens=40)
    engine.round()
    for seed in range(4):
        engine.submit(random_tokens(40, seed), max_tokens=3)
    engine.run()
    for before, after in pairwise(engine.reports):
        assert (before.function, after.function) != ("prefill", "prefill") or not before.running
    prefills = [report for report in engine.reports if report.function == "prefill"]
    assert all(report.bucket.tokens <= 8 for report in prefills)
    assert len(prefills) >= 8


def test_prompts_share_calls():
    engine = DirectEngine(subject("full"))
    for seed in range(3):
        engine.submit(random_tokens(4, seed), max_tokens=2)
    engine.round()
    assert engine.reports[0].rows == 3
    assert engine.reports[0].tokens == 12
    engine.run()


def test_a_long_prompt_is_not_overtaken_for_ever(monkeypatch):
    """Where a call costs nothing but its places, short prompts are cheapest alone and go first.

    A prompt gains a chunk of eight for every call that it waits: after five of them its forty
    tokens are no longer behind.
    """
    monkeypatch.setattr("funcrt.engine.prompts.choose_overhead", lambda: 0)
    engine = DirectEngine(subject("full"))
    prompt = random_tokens(40)
    longest = engine.submit(prompt, max_tokens=1)
    first: int | None = None
    for rounds in range(1, 40):
        while len(engine.waiting) < 2:
            engine.submit([rounds, 5, 6, 7], max_tokens=1)
        engine.round()
        (request,) = [r for r in engine._owner.requests.values() if r.handle is longest]
        if first is None and request.cached:
            first = rounds
        if longest.done():
            break
    assert longest.result(0).tokens == oracle("full").complete(prompt, 1)[0]
    assert first is not None
    assert 3 < first < 8
    engine.run()


@pytest.mark.parametrize("kind", CACHES)
def test_beginnings_are_forked_from_running_and_from_ended_rows(kind):
    prompt = random_tokens(20, 3)
    engine = DirectEngine(subject(kind))
    first = engine.submit(prompt, max_tokens=12)
    while engine.where(first) != "running":
        engine.round()
    if kind == "toy_recurrent":
        first.cancel()  # its state is what it has seen, all of it
    known = oracle(kind)
    begun = [*prompt, *first.completion.tokens]
    other = begun[20] + 1  # than what follows the prompt
    beside = engine.submit([*prompt, other, 7], max_tokens=3)
    engine.run()
    after = engine.submit([*begun[:18], 9], max_tokens=3)
    engine.run()
    same = engine.submit([*prompt, *first.completion.tokens, 4, 4], max_tokens=3)
    engine.run()
    engine.check_idle()
    reused = [handle.result(0).reused_tokens for handle in (beside, after, same)]
    recurrent = kind in ("toy_recurrent", "toy_hybrid")
    if kind in ("full", "kv8", "toy_latent"):
        assert reused[:2] == [20, 18]
    elif recurrent:
        assert reused[:2] == [0, 0]
    assert reused[2] >= len(prompt) + len(first.completion.tokens) - 1
    for handle, text, count in [
        (beside, [*prompt, other, 7], 3),
        (after, [*begun[:18], 9], 3),
        (same, [*prompt, *first.completion.tokens, 4, 4], 3),
    ]:
        assert handle.result(0).tokens == known.complete(text, count)[0]


def test_whoever_ends_with_its_first_token_needs_no_place():
    engine = DirectEngine(subject("full"))
    engine.submit([1, 2], max_tokens=9)
    engine.round()
    single = engine.submit([3, 4], max_tokens=1)
    engine.round()
    assert single.done()
    assert single.result(0).tokens == oracle("full").complete([3, 4], 1)[0]
    engine.run()
    assert {r.bucket.batch for r in engine.reports if r.function == "decode"} == {1}


def test_first_tokens_are_theirs_even_if_rows_cannot_join(monkeypatch):
    engine = DirectEngine(subject("full"))
    engine.submit([1, 2], max_tokens=9)
    engine.round()
    ending, going_on = (engine.submit([3, 4 + i], max_tokens=1 + i) for i in range(2))
    broken = RuntimeError("no memory")

    def fail(*arguments: Any) -> None:
        raise broken

    monkeypatch.setattr("funcrt.engine.rows.cache.insert", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.round()
    engine.fail(broken)
    engine.scheduler.deliver()
    assert ending.result(0).tokens == oracle("full").complete([3, 4], 1)[0]
    with pytest.raises(EngineError, match="no memory"):
        going_on.result(0)
    assert len(going_on.completion.tokens) == 1


def test_a_prompt_waits_for_one_like_it_that_has_begun():
    """It forks nearly all of that, not what there is of it so far."""
    engine = DirectEngine(subject("full"))
    prompt = random_tokens(30, 3)
    first = engine.submit(prompt, max_tokens=2)
    engine.round()
    assert engine.where(first) == "prefilling"
    second = engine.submit([*prompt[:25], 1, 2], max_tokens=2)
    engine.run()
    assert second.result(0).reused_tokens == 24  # three calls; for one token more it does not wait


def test_nothing_is_held_of_those_who_never_sat():
    engine = DirectEngine(subject("full"))
    for seed in range(3):
        engine.submit(random_tokens(9, seed), max_tokens=1)
        engine.run()
    assert engine.stats.requests == 3
    assert not engine.scheduler._running._readers


def test_short_prompts_do_not_share_a_call_with_long_ones(monkeypatch):
    """All in one call would be one overhead less, and more padding than that."""
    monkeypatch.setattr("funcrt.engine.prompts.choose_overhead", lambda: 10)
    plan = BucketPlan(batch=(1, 2, 4), tokens=(2, 8), capacity=(64,))
    engine = DirectEngine(subject("full"), plan)
    for seed, length in enumerate((7, 1, 8, 2)):
        engine.submit(random_tokens(length, seed), max_tokens=2)
    engine.run()
    shapes = [r.bucket for r in engine.reports if r.function == "prefill"]
    assert [(b.batch, b.tokens) for b in shapes] == [(2, 2), (2, 8)]


def test_equal_prompts_are_computed_once():
    engine = DirectEngine(subject("full"))
    prompt = random_tokens(33, 2)
    handles = [engine.submit(prompt, max_tokens=4, seed=seed, temperature=1.0) for seed in range(3)]
    engine.run()
    assert engine.stats.prompt_tokens == 33 + 2
    assert engine.stats.reused_tokens == 2 * 32
    for seed, handle in enumerate(handles):
        expected = oracle("full").complete(prompt, 4, seed=seed, temperature=1.0)[0]
        assert handle.result(0).tokens == expected


def test_buckets_grow_at_once_and_shrink_with_patience():
    engine = DirectEngine(subject("full"))
    engine.submit([1, 2], max_tokens=46)
    engine.round()
    others = [engine.submit([3, seed], max_tokens=4) for seed in range(2)]
    engine.run()
    batches = [report.bucket.batch for report in engine.reports if report.function == "decode"]
    capacities = [r.bucket.capacity for r in engine.reports if r.function == "decode"]
    assert [a for a, b in pairwise([*batches, 0]) if a != b] == [1, 3, 1]
    assert [a for a, b in pairwise([*capacities, 0]) if a != b] == [24, 48]
    assert all(other.done() for other in others)


@pytest.mark.parametrize("write", [lambda r: r.take(), lambda r: r.fit(2, 3)], ids=["take", "fit"])
def test_a_state_is_written_when_its_readers_have_ended(write):
    spec = model_of("full").cache_spec(CacheLayout())
    rows = Rows(spec, BucketPlan(batch=(1, 2), tokens=(4,), capacity=(16,)))
    rows.adopt(init_cache(spec, 1, 16), [object()])
    copy = mx.zeros((1000, 1000)) + 1
    rows.let_read([copy])
    before = mx.get_active_memory()
    write(rows)
    assert mx.get_active_memory() - before > copy.nbytes / 2  # the state may be gone


def test_options_may_differ_between_prompts():
    engine = DirectEngine(subject("full"))
    prompts = [random_tokens(5, seed) for seed in range(3)]
    options = {
        "max_tokens": [3, 4, 5],
        "temperature": [0.0, 1.0, 1.0],
        "seed": [0, 1, 2],
        "logit_bias": [None, {5: 3.0}, None],
        "allowed_tokens": [None, None, [1, 2, 3]],
        "repetition_penalty": [1.0, 1.2, 1.0],
        "speculate": ["ngram", None, subject("full")],
    }
    single = [{name: values[i] for name, values in options.items()} for i in range(3)]
    handles = [
        engine._submit(i, wish) for i, wish in enumerate(engine._read(prompts, None, dict(options)))
    ]
    engine.run()
    for prompt, handle, own in zip(prompts, handles, single, strict=True):
        del own["speculate"]
        assert handle.result(0).tokens == oracle("full").complete(prompt, **own)[0]


def test_reports_add_up_to_the_stats():
    engine = DirectEngine(subject("full"), speculate="ngram")
    for seed in range(5):
        prompt = [*random_tokens(8 * seed + 2, seed), 5, 9, 5, 9]
        engine.submit(prompt, max_tokens=6, top_logprobs=seed, allowed_tokens=[5 + 4 * seed])
    engine.run()
    stats, reports = engine.stats, engine.reports
    prefills = [r for r in reports if r.function == "prefill"]
    steps = [r for r in reports if r.function != "prefill"]
    assert {r.function for r in steps} == {"decode", "verify"}
    assert stats.prompt_tokens == sum(r.tokens for r in prefills)
    assert stats.generated_tokens == sum(r.new_tokens for r in reports)
    assert stats.decode_tokens == sum(r.new_tokens for r in steps)
    assert stats.row_places == sum(r.bucket.batch for r in steps)
    assert stats.row_real == sum(r.rows for r in steps)
    assert stats.slot_places == sum(r.bucket.batch * r.bucket.capacity for r in steps)
    assert stats.slot_real == sum(r.slots for r in steps)
    for report in reports:
        assert 0 < report.occupancy <= 1
        assert 0 <= report.token_waste < 1
        assert 0 <= report.slot_waste < 1
        assert report.seconds > 0
        assert report.memory > 0
    assert reports[-1].running == reports[-1].waiting == reports[-1].prefilling == 0
    assert [r.traces for r in reports] == sorted(r.traces for r in reports)
    for waste in (stats.row_waste, stats.token_waste, stats.slot_waste):
        assert 0 < waste < 1


@pytest.mark.parametrize(("width", "slots"), [(8, 64), (32, 256)])
def test_first_chunks_have_the_slots_of_the_batch_where_they_look_at_none(width, slots):
    """Then they need not grow to join it; a call that looks at slots has no more than it fills."""
    plan = BucketPlan(batch=(1, 2), tokens=(width,), capacity=(64, 256))
    engine = DirectEngine(subject("full"), plan)
    engine.submit(random_tokens(100, 1), max_tokens=30)
    while not engine.running:
        engine.round()
    engine.submit(random_tokens(width, 2), max_tokens=3)
    engine.run()
    (call,) = [r for r in engine.reports if r.function == "prefill" and r.running == 2]
    assert call.bucket == Bucket(1, width, slots)


def test_what_a_prompt_holds_between_its_chunks_has_no_more_slots_than_it_fills():
    """However many the batch has, or the prompts beside it."""
    engine = DirectEngine(
        subject("full"), BucketPlan(batch=(1, 2), tokens=(32,), capacity=(64, 256))
    )
    engine.submit(random_tokens(100, 1), max_tokens=30)
    while not engine.running:
        engine.round()
    prompt = random_tokens(40, 2)
    handle = engine.submit(prompt, max_tokens=3)
    engine.round()
    (request,) = engine.prefilling
    assert state_size(request.row)[1] == 64
    engine.run()
    assert handle.result(0).tokens == oracle("full").complete(prompt, 3)[0]
