"""Everything that can happen to a request and to the batch, once on purpose, for every cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from funcrt.engine import Handle, StepReport
from tests.engine.harness import (
    CACHES,
    EOS,
    DirectEngine,
    check_completion,
    least_budget,
    oracle,
    subject,
    toys,
    write,
)
from tests.helpers import random_tokens

import pytest

ENDLESS = {17: -float("inf"), EOS: -float("inf")}  # no text ends before its limit
kinds = pytest.mark.parametrize("kind", CACHES)
slotted = pytest.mark.parametrize("kind", [kind for kind in CACHES if kind != "toy_recurrent"])


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with toys():
        yield


class Scene:
    """An engine, what it was asked, and what it should have said.

    Args:
        kind: of cache.
        memory_budget: of the engine.
    """

    def __init__(self, kind: str, memory_budget: int | None = None) -> None:
        self.kind = kind
        self.engine = DirectEngine(subject(kind), memory_budget=memory_budget)
        self._asked: list[tuple[Handle, list[int], dict[str, Any]]] = []

    def ask(self, prompt: list[int], max_tokens: int, **options: Any) -> Handle:
        options = {"max_tokens": max_tokens, "logit_bias": ENDLESS, **options}
        handle = self.engine.submit(prompt, **options)
        self._asked.append((handle, prompt, options))
        return handle

    def until(self, handle: Handle, place: str) -> None:
        """Go on until a request is there."""
        for _ in range(100):
            if self.engine.where(handle) == place:
                return
            self.engine.round()
            self.engine.check()
        raise AssertionError(f"it is never {place}")

    def end(self) -> None:
        while self.engine.busy:
            self.engine.round()
            self.engine.check()
        self.engine.check_idle()
        for handle, prompt, options in self._asked:
            check_completion(self.kind, prompt, options, handle.result(0))

    @property
    def steps(self) -> list[StepReport]:
        return [report for report in self.engine.reports if report.function != "prefill"]

    def sizes(self, name: str) -> list[int]:
        """The batches or capacities of the running state, one after the other."""
        return [size for size, _ in groupby(getattr(r.bucket, name) for r in self.steps)]


# --- cancelled ------------------------------------------------------------------------------------


@kinds
def test_cancelled_while_waiting(kind):
    scene = Scene(kind)
    running = [scene.ask([seed, 2, 3], 12) for seed in range(3)]
    waiting, behind = scene.ask([4, 5], 9), scene.ask([6, 7], 9)
    for handle in running:
        scene.until(handle, "running")
    assert scene.engine.where(waiting) == "waiting"
    waiting.cancel()
    assert scene.engine.where(behind) == "waiting"
    scene.end()
    assert waiting.result(0).finish_reason == "cancelled"
    assert waiting.result(0).tokens == []
    assert scene.engine.stats.prompt_tokens == 3 * 3 + 2
    assert {h.result(0).finish_reason for h in (*running, behind)} == {"length"}


@kinds
def test_cancelled_while_prefilling(kind):
    """It is not computed any further, before its first chunk and after it."""
    scene = Scene(kind)
    running = scene.ask([1, 2, 3], 15)
    scene.until(running, "running")
    for chunks in (0, 1, 2):
        prompt = random_tokens(40, chunks)
        handle = scene.ask(prompt, 5)
        if not chunks:
            scene.engine.scheduler._admit()
        for _ in range(chunks):
            scene.engine.round()
        assert scene.engine.where(handle) == "prefilling"
        computed = scene.engine.stats.prompt_tokens
        handle.cancel()
        assert scene.engine.prefilling == []
        for _ in range(2):
            scene.engine.round()
            scene.engine.check()
        assert scene.engine.stats.prompt_tokens == computed
        assert (handle.result(0).finish_reason, handle.result(0).tokens) == ("cancelled", [])
    later = scene.ask(random_tokens(40, 1), 3)
    scene.end()
    assert [h.result(0).finish_reason for h in (running, later)] == ["length"] * 2


@kinds
def test_cancelled_while_running(kind):
    """Others go on, and its row is used again."""
    scene = Scene(kind)
    handles = [scene.ask([seed, 2, 3], 15) for seed in range(3)]
    behind = scene.ask([7, 8], 4)
    for handle in handles:
        scene.until(handle, "running")
    scene.engine.round()
    given = len(handles[1].completion.tokens)
    assert 0 < given < 15
    assert scene.engine.where(behind) == "waiting"
    handles[1].cancel()
    assert scene.engine.where(handles[1]) == "ended"
    scene.until(behind, "running")
    scene.end()
    reasons = [handle.result(0).finish_reason for handle in (*handles, behind)]
    assert reasons == ["length", "cancelled", "length", "length"]
    assert len(handles[1].result(0).tokens) == given


# --- buckets --------------------------------------------------------------------------------------


@kinds
def test_a_batch_grows_and_shrinks_with_patience(kind):
    """In one capacity, so that nothing else moves rows."""
    scene = Scene(kind)
    longest = scene.ask([1, 2], 22)
    scene.until(longest, "running")
    others = [scene.ask([3, seed], 3) for seed in range(2)]
    for handle in others:
        scene.until(handle, "ended")
    alone = len(scene.steps)
    scene.end()
    assert scene.sizes("batch") == [1, 3, 1]
    assert len(scene.sizes("capacity")) == 1
    batches = [report.bucket.batch for report in scene.steps[alone:]]
    assert batches == [3] * 15 + [1] * (len(batches) - 15)


@slotted
def test_a_capacity_grows_at_once(kind):
    scene = Scene(kind)
    scene.ask(random_tokens(20, 1), 12)
    scene.ask([1, 2, 3], 12)
    scene.end()
    assert scene.sizes("capacity") == [24, 48]
    filled = [r.bucket.capacity for r in scene.steps]
    assert filled.index(48) > 0


@slotted
def test_a_capacity_shrinks_with_patience(kind):
    """While the batch stays as it is."""
    scene = Scene(kind)
    short = [scene.ask([seed], 23) for seed in range(2)]
    for handle in short:
        scene.until(handle, "running")
    long = scene.ask(random_tokens(26, 1), 2)
    scene.until(long, "ended")
    alone = len(scene.steps)
    scene.end()
    assert scene.sizes("capacity")[-2:] == [48, 24]
    assert {report.bucket.batch for report in scene.steps[alone:]} == {3}


# --- prefixes -------------------------------------------------------------------------------------


@kinds
def test_a_prefix_of_a_running_row(kind):
    scene = Scene(kind)
    first = scene.ask(random_tokens(11, 1), 14)
    scene.until(first, "running")
    scene.engine.round()
    (request,) = scene.engine.running.values()
    held = request.cached
    assert 11 < held < 24
    second = scene.ask([*request.sequence[:held], 4, 5, 6], 5)
    scene.until(second, "running")
    assert scene.engine.where(first) == "running"
    scene.end()
    assert second.result(0).reused_tokens == held
    assert scene.engine.stats.reused_tokens == held


@kinds
def test_a_prefix_of_a_row_that_has_ended(kind):
    scene = Scene(kind)
    prompt = random_tokens(11, 1)
    first = scene.ask(prompt, 6)
    scene.end()
    held = [*prompt, *first.result(0).tokens[:-1]]  # the last one is never put in
    second = scene.ask([*held, 4, 5, 6], 5)
    scene.end()
    assert second.result(0).reused_tokens == len(held) == 16


@kinds
def test_the_longest_of_several_prefixes(kind):
    """Each of them is at one time the only one that is best."""
    scene = Scene(kind)
    base = random_tokens(8, 2)
    ended = []
    for seed in range(4):
        prompt = [*base, 20 + seed, *random_tokens(4, seed)]
        done = scene.ask(prompt, 3)
        scene.end()
        ended.append([*prompt, *done.result(0).tokens[:-1]])
    later = [scene.ask([*held, 3], 1) for held in ended]
    scene.end()
    assert [handle.result(0).reused_tokens for handle in later] == [len(held) for held in ended]


# --- ends and waits -------------------------------------------------------------------------------


@kinds
def test_stopped(kind):
    """By a token and by a string, beside one that goes on."""
    scene, known = Scene(kind), oracle(kind)
    ending: dict[str, Any] = {"logit_bias": {17: 4.0, EOS: 4.0}, "temperature": 2.0}
    seed = next(
        n for n in range(99) if 2 < len(known.complete([1, 2], 12, **ending, seed=n)[0]) < 9
    )
    varied: dict[str, Any] = {"logit_bias": ENDLESS, "temperature": 20.0, "seed": 1}
    expected, _, _ = known.complete([1, 3], 12, **varied)
    place = next(n for n in range(4, 12) if expected[n] not in expected[:n])
    goes_on = scene.ask([1, 2, 3], 12)
    by_token = scene.ask([1, 2], 12, **ending, seed=seed)
    by_string = scene.ask([1, 3], 12, **varied, stop=write(expected[place - 1 : place + 1]))
    behind = scene.ask([1, 2, 6], 3)
    scene.end()
    ends = [goes_on, by_token, by_string, behind]
    assert [h.result(0).finish_reason for h in ends] == ["length", "stop", "stop", "length"]
    assert by_token.result(0).tokens[-1] in (17, EOS)
    assert by_string.result(0).tokens == expected[: place + 1]
    assert by_string.result(0).text == write(expected[: place - 1])


@kinds
def test_waited_for_memory(kind):
    """Room for one at a time, though there are rows for three."""
    scene = Scene(kind, least_budget(kind, guesses=False))
    handles = [scene.ask(random_tokens(20, seed), 12) for seed in range(3)]
    scene.until(handles[0], "running")
    assert [scene.engine.where(handle) for handle in handles[1:]] == ["waiting"] * 2
    scene.until(handles[1], "running")
    assert [scene.engine.where(handle) for handle in handles] == ["ended", "running", "waiting"]
    scene.end()
    assert any(report.waiting and report.running == 1 for report in scene.engine.reports)
    assert all(report.rows == 1 for report in scene.engine.reports)
