"""What goes wrong ends whom it concerns, with the reason, and nobody else."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache as memo
from typing import Any

from funcrt import BucketPlan, Engine, cache
from funcrt.compiled import Compiled
from funcrt.engine import Chunk, Handle, StepReport
from funcrt.errors import CapacityError, EngineError, FuncrtError, InputError
from funcrt.model import Model
from tests.engine.harness import (
    PLAN,
    DirectEngine,
    draft,
    make_tokenizer,
    subject,
    toys,
    write,
)
from tests.helpers import TINY, generate_plain, make_model, make_params, random_tokens

import mlx.core as mx
import pytest

MODEL = make_model()
PROMPTS = [random_tokens(count, count) for count in (5, 1, 19, 8, 30, 12)]


@memo
def alone(index: int, count: int) -> list[int]:
    return generate_plain(MODEL, PROMPTS[index], count)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with toys():
        yield


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(Model(MODEL.config, MODEL.params, make_tokenizer()), PLAN) as made:
        yield made


def broken(token: int) -> Model:
    """A model that gives NaN for everything once it has read `token`."""
    params = make_params(TINY)
    name = "model.embed_tokens.weight"
    is_bad = mx.arange(TINY.vocab_size)[:, None] == token
    return Model(TINY, {**params, name: mx.where(is_bad, mx.nan, params[name])})


# --- logits that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("speculate", [None, "ngram", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_breaks_harms_nobody(speculate, temperature):
    """Nor what comes after it: its row is used again, and is no prefix for others."""
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 9}
    settings = {} if not temperature else {"temperature": temperature, "seed": 3}
    expected = [generate_plain(MODEL, prompt, 9, **settings) for prompt in PROMPTS]
    used = {token for tokens in [*PROMPTS, *expected] for token in tokens}
    bad = next(token for token in range(TINY.vocab_size) if token not in used)
    options["speculate"] = MODEL if speculate == "draft" else speculate
    with Engine(broken(bad), PLAN) as made:
        for place in (0, 11, 17):
            victim = [*PROMPTS[2][:place], bad, *PROMPTS[2][place:]]
            mixed = [PROMPTS[2], victim, *PROMPTS, victim, PROMPTS[2]]
            for prompt, done in zip(mixed, made.generate(mixed, **options), strict=True):
                if prompt is victim:
                    assert (done.finish_reason, done.tokens, done.logprobs) == ("error", [], [])
                else:
                    assert done.tokens == expected[PROMPTS.index(prompt)]
                    assert done.finish_reason == "length"
            assert made.generate(victim, **options)[0].finish_reason == "error"


def test_a_row_may_break_while_it_generates():
    prompt, others = PROMPTS[0], [PROMPTS[3], PROMPTS[1], PROMPTS[5], PROMPTS[2]]
    tokens = generate_plain(MODEL, prompt, 8)
    elsewhere = {t for other in others for t in [*other, *generate_plain(MODEL, other, 8)]} | set(
        prompt
    )
    step = next(n for n, token in enumerate(tokens) if token not in elsewhere | set(tokens[:n]))
    engine = Engine(broken(tokens[step]), PLAN)
    completions = engine.generate([others[0], prompt, others[1], *others[2:]], max_tokens=8)
    assert completions[1].finish_reason == "error"
    assert completions[1].tokens == tokens[: step + 1]
    assert len(completions[1].logprobs) == step + 1
    del completions[1]
    assert [c.tokens for c in completions] == [generate_plain(MODEL, other, 8) for other in others]


def test_the_filler_of_padding_may_be_broken():
    prompts = [[t or 1 for t in prompt] for prompt in PROMPTS]
    expected = [generate_plain(MODEL, prompt, 4) for prompt in prompts]
    assert all(0 not in tokens[:-1] for tokens in expected)
    completions = Engine(broken(0), PLAN).generate(prompts, max_tokens=4)
    assert [c.tokens for c in completions] == expected


# --- callbacks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("speculate", [None, "exact"])
def test_a_callback_that_raises_ends_its_request_only(engine, at, speculate):
    seen: list[Chunk] = []

    def fail(chunk: Chunk) -> None:
        seen.append(chunk)
        if len(seen) == at:
            raise KeyError("mine")

    before = engine.stats.requests
    draft_model = MODEL if speculate else None
    handle = engine.submit(PROMPTS[0], max_tokens=12, on_chunk=fail, speculate=draft_model)
    other = engine.submit(PROMPTS[3], max_tokens=9)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            handle.result(60)
    assert other.result(60).tokens == alone(3, 9)
    assert handle.done()
    assert len(seen) == at  # it is not called again
    assert engine.stats.requests - before == 2
    tokens: list[int] = []
    with pytest.raises(KeyError, match="mine"):
        tokens.extend(chunk.token for chunk in handle)
    assert handle.completion.finish_reason == "error"
    assert engine.generate(PROMPTS[0], max_tokens=3)[0].tokens == alone(0, 3)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_even_a_callback_that_leaves(engine, error):
    def leave(chunk: Chunk) -> None:
        raise error("mine")

    handle = engine.submit(PROMPTS[0], max_tokens=12, on_chunk=leave)
    with pytest.raises((error, FuncrtError), match="mine"):
        handle.result(60)
    assert engine.generate(PROMPTS[0], max_tokens=3)[0].tokens == alone(0, 3)


def test_a_step_callback_that_raises_is_not_called_again(caplog):
    reports: list[StepReport] = []

    def fail(report: StepReport) -> None:
        reports.append(report)
        raise KeyError("mine")

    with caplog.at_level(logging.ERROR), Engine(MODEL, PLAN, on_step=fail) as made:
        assert made.generate(PROMPTS[0], max_tokens=5)[0].tokens == alone(0, 5)
    assert len(reports) == 1
    assert len(caplog.records) == 1
    assert "not called again" in caplog.text
    assert "mine" in caplog.text


def test_a_callback_may_submit_and_cancel(engine):
    """It runs in the engine's thread, and must not wait there."""
    more: list[Handle] = []
    known = threading.Event()

    def follow(chunk: Chunk) -> None:
        assert known.wait(60)
        if not more:
            more.append(engine.submit(PROMPTS[3], max_tokens=4))
            handle.cancel()

    handle = engine.submit(PROMPTS[0], max_tokens=40, on_chunk=follow)
    known.set()
    done = handle.result(60)
    assert done.finish_reason == "cancelled"
    assert 1 <= len(done.tokens) < 40
    assert done.tokens == alone(0, 40)[: len(done.tokens)]
    assert more[0].result(60).tokens == alone(3, 4)


# --- a model that fails ---------------------------------------------------------------------------


class FaultError(RuntimeError):
    """What a device says that has no memory left, say."""


def failing(compiled: Compiled, at: int) -> Callable[[], int]:
    """Let the call number `at` raise; returns how many there were."""
    calls = 0
    run = compiled._call

    def call(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise FaultError("no memory")
        return run(*arguments)

    compiled._call = call  # type: ignore[method-assign]
    return lambda: calls


@pytest.mark.parametrize("where", ["model", "draft"])
def test_a_model_that_fails_once(where):
    """At every call in turn: who waits gets the reason, then all goes on as if nothing was.

    A draft model is no reason to end anything: its texts go on without guesses.
    """
    model, helper = subject("full"), draft("full", 0.1)
    wishes = [
        (PROMPTS[5], {"max_tokens": 9, "speculate": helper}),
        (PROMPTS[4], {"max_tokens": 3}),
        (PROMPTS[0], {"max_tokens": 6, "temperature": 1.0, "seed": 1, "top_logprobs": 2}),
        ([5, 9] * 5, {"max_tokens": 5, "speculate": "ngram"}),
    ]
    expected: list[list[int]] | None = None
    at, failures = 10**9, 0
    while True:
        engine = DirectEngine(model)
        for wanted in [helper] if where == "draft" else []:
            engine._choose_drafter(wanted)
        (drafter,) = engine._drafters.values() or [None]
        target = engine.compiled if drafter is None else drafter.compiled
        count = failing(target, at)
        handles = [engine.submit(prompt, **options) for prompt, options in wishes]
        try:
            failures += drive(engine)
            assert all(handle.done() for handle in handles)
            engine.check_idle()
            failed = [handle for handle in handles if handle.completion.finish_reason == "error"]
            assert bool(failed) == (at < 10**9 and where == "model")
            for handle in failed:
                with pytest.raises(FuncrtError, match="no memory"):
                    handle.result(0)
            kept = [handle.result(0).tokens for handle in handles if handle not in failed]
            again = [engine.submit(prompt, **options) for prompt, options in wishes]
            engine.run()
            tokens = [handle.result(0).tokens for handle in again]
            expected = expected or tokens
            assert tokens == expected
            assert kept == [e for e, h in zip(expected, handles, strict=True) if h not in failed]
            if at == 10**9:
                calls, at = count() // 2, -1
        finally:
            del target._call
        at += 1
        if at == calls:
            break
    assert failures == (calls if where == "model" else 0)
    assert calls > 3


def drive(engine: DirectEngine) -> int:
    """To the end, as the engine's thread does when rounds fail; how many did."""
    failures = 0
    while engine.busy:
        try:
            engine.round()
        except FaultError as error:
            failures += 1
            engine.fail(error)
    return failures


@pytest.mark.parametrize("name", ["insert", "select", "join", "grow", "shrink", "trim"])
def test_moves_of_rows_that_fail(monkeypatch, name):
    """Memory runs out while rows move: nobody waits for ever, and the engine goes on."""
    real, calls = getattr(cache, name), 0
    with Engine(MODEL, PLAN) as made:

        def work() -> list[Handle]:
            return [
                made.submit(PROMPTS[0], max_tokens=30, speculate=MODEL),
                made.submit(PROMPTS[3], max_tokens=3),
                made.submit(PROMPTS[4], max_tokens=2),
                made.submit([*PROMPTS[4][:20], 1, 2], max_tokens=4),
            ]

        def fail(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in at:
                raise FaultError("no memory")
            return real(*arguments)

        monkeypatch.setattr(cache, name, fail)
        at = {1, 2, 4, 7}
        ends: list[str] = []
        for _ in range(4):
            for handle in work():
                try:
                    ends.append(handle.result(60).finish_reason)
                except FuncrtError as error:
                    ends.append(str(error))
        monkeypatch.undo()
        expected = [alone(0, 30), alone(3, 3), alone(4, 2)]
        assert [h.result(60).tokens for h in work()[:3]] == expected
        assert all(end == "length" or "no memory" in end for end in ends)
        assert any("no memory" in end for end in ends) or not calls


# --- limits ---------------------------------------------------------------------------------------


def test_a_stop_string_that_never_comes(engine):
    text = write(alone(0, 20))
    stop = text[-1] + "~~~~"
    (done,) = engine.generate(PROMPTS[0], max_tokens=20, stop=[stop, "never", text[5] + "\x00"])
    assert (done.text, done.tokens, done.finish_reason) == (text, alone(0, 20), "length")
    chunks = list(engine.stream(PROMPTS[0], max_tokens=20, stop=stop))
    assert "".join(chunk.text for chunk in chunks) == text


def test_callbacks_that_are_none(engine):
    with pytest.raises(InputError, match="on_chunk: expected a function, got 3"):
        engine.submit(PROMPTS[0], on_chunk=3)
    with pytest.raises(InputError, match="on_step: expected a function, got 3"):
        Engine(MODEL, PLAN, on_step=3)


def test_options_that_are_no_plan_or_budget():
    for budget in (0, -1, 1.5, "1GB", True):
        with pytest.raises(InputError, match="memory_budget"):
            Engine(MODEL, PLAN, memory_budget=budget)
    with pytest.raises(InputError, match="speculate"):
        Engine(MODEL, BucketPlan(batch=1, tokens=32, capacity=48), speculate="ngram")
    with pytest.raises(InputError, match="speculate"):
        Engine(MODEL, PLAN, speculate="words")


def test_huge_limits_mean_as_much_as_there_is_room_for(engine):
    for huge in (48, 2**31, 10**30, sys.maxsize):
        (done,) = engine.generate(PROMPTS[4], max_tokens=huge)
        assert (len(done.tokens), done.finish_reason) == (18, "length")
    assert done.tokens == alone(4, 18)


def test_a_prompt_larger_than_the_largest_bucket(engine):
    before = engine.stats
    for length in (48, 49, 5000):
        with pytest.raises(CapacityError, match=f"{length} tokens, largest capacity is 47"):
            engine.submit([1] * length)
    with pytest.raises(CapacityError, match="48 tokens"):
        engine.generate([PROMPTS[0], [1] * 48], max_tokens=2)
    assert engine.stats == before
    assert len(engine.generate([1] * 47)[0].tokens) == 1


def test_a_callback_that_would_wait_for_itself_is_told(engine):
    """In the engine's own thread nothing that waits for the engine can ever return."""
    first = engine.submit(PROMPTS[0], max_tokens=4)
    for wait in (
        lambda: engine.submit(PROMPTS[1], max_tokens=2).result(),
        lambda: list(engine.submit(PROMPTS[1], max_tokens=2)),
        lambda: engine.generate(PROMPTS[1], max_tokens=2),
    ):
        handle = engine.submit(PROMPTS[3], max_tokens=4, on_chunk=lambda chunk, wait=wait: wait())
        with pytest.raises(EngineError, match="would wait for itself"):
            handle.result(60)
    assert first.result(60).tokens == alone(0, 4)


def test_every_close_waits_for_the_end():
    engine = Engine(MODEL, PLAN)
    handles = [engine.submit(PROMPTS[i], max_tokens=40) for i in (0, 3)]
    threads = [threading.Thread(target=engine.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert all(handle.done() for handle in handles)
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1])
