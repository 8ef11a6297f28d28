"""Random schedules: whatever joins, leaves or is cancelled around it, a text is as if alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from funcrt import BucketPlan
from funcrt.engine.handle import Handle
from funcrt.errors import CapacityError
from tests.engine.harness import (
    CACHES,
    PLAN,
    DirectEngine,
    Subject,
    check_completion,
    draft,
    subject,
    toys,
    write,
)
from tests.helpers import random_tokens

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

BASES = [random_tokens(40, seed) for seed in range(2)]
REPEATING = [5, 9, 5, 9, 5, 9, 5, 9, 5, 9]

beginnings = st.builds(
    lambda base, cut, rest: [*BASES[base][:cut], *rest],
    st.sampled_from([0, 0, 1]),
    st.sampled_from([1, 9, 12, 17, 18, 23, 30, 40]),
    st.lists(st.integers(0, 3), max_size=5),
)
prompts = st.one_of(beginnings, beginnings, beginnings, st.just(REPEATING))
choices: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    "top_k": st.sampled_from([0, 0, 5]),
    "top_p": st.sampled_from([1.0, 0.9]),
    "min_p": st.sampled_from([0.0, 0.1]),
    "seed": st.integers(0, 2),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "presence_penalty": st.sampled_from([0.0, 0.6]),
    "frequency_penalty": st.sampled_from([0.0, 0.4]),
    "logit_bias": st.sampled_from([{3: 2.0, 7: -float("inf")}, {17: 4.0}]),
    "allowed_tokens": st.sampled_from([[1, 2, 3, 4, 5, 6, 9, 17]]),
    "top_logprobs": st.sampled_from([0, 3]),
    "stop": st.sampled_from(["%", "ab", write([9, 5])]),
}
needed: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.sampled_from([30, 1, 2, 9, 14, 100]),
    "speculate": st.sampled_from([None, "ngram", "exact", "near", "far"]),
}
options = st.one_of(st.fixed_dictionaries(needed), st.fixed_dictionaries(needed, optional=choices))
BLURS = {"exact": 0.0, "near": 0.1, "far": 3.0}


class Schedule(RuleBasedStateMachine):
    """Requests come, go and are cancelled while the scheduler steps."""

    kind: str
    plan: BucketPlan
    seen: Counter[str]

    @initialize(share=st.sampled_from([None, None, 3.0, 1.2]))
    def begin(self, share: float | None) -> None:
        """An engine, with or without much memory to spare."""
        chosen = subject(self.kind)
        budget = None if share is None else int(share * self.least(chosen))
        self.engine = DirectEngine(chosen, self.plan, memory_budget=budget)
        self.is_tight = budget is not None
        self.asked: list[tuple[Handle, list[int], dict[str, Any]]] = []

    def least(self, chosen: Any) -> int:
        """Memory in which the longest text fits alone."""
        return DirectEngine(chosen, self.plan)._admission._needs(1, 47)

    @rule(wishes=st.lists(st.tuples(prompts, options), min_size=1, max_size=4))
    def submit(self, wishes: list[tuple[list[int], dict[str, Any]]]) -> None:
        for prompt, wish in wishes:
            self.ask(prompt, wish)

    def ask(self, prompt: list[int], wish: dict[str, Any]) -> None:
        given = dict(wish)
        if self.plan.tokens == (1,):
            given["speculate"] = None
        if given["speculate"] in BLURS:
            # Recurrent drafts are refused, tested elsewhere.
            kind = "full" if self.kind in ("toy_hybrid", "toy_recurrent") else self.kind
            given["speculate"] = draft(kind, BLURS[given["speculate"]])
        try:
            handle = self.engine.submit(prompt, **given)
        except CapacityError:  # a draft model takes memory, too
            assert self.is_tight
            assert any(isinstance(d, Subject) for d in self.engine._drafters)
            return
        self.asked.append((handle, prompt, given))

    @rule(count=st.sampled_from([1, 2, 3, 4, 6, 10, 25]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.round()
            self.engine.check()

    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        if self.asked:
            handle = self.asked[which % len(self.asked)][0]
            self.seen[f"cancelled while {self.engine.where(handle)}"] += 1
            handle.cancel()
            assert handle.done()

    @invariant()
    def in_order(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        self.engine.check_idle()
        self.count()
        for handle, prompt, given in self.asked:
            completion = handle.result(0)
            check_completion(self.kind, prompt, given, completion)
            chunks = [chunk for chunk in handle if chunk.token >= 0]
            assert [chunk.token for chunk in chunks] == completion.tokens
            assert [chunk.logprob for chunk in chunks] == completion.logprobs
            assert "".join(chunk.text for chunk in handle) == completion.text
            reasons = [chunk.finish_reason for chunk in handle]
            assert reasons == [""] * (len(reasons) - 1) + [completion.finish_reason]
            assert completion.reused_tokens == 0 or completion.reused_tokens >= 8

    def count(self) -> None:
        """What happened, so that the test can tell that all of it did."""
        stats, seen = self.engine.stats, self.seen
        completions = [handle.completion for handle, _, _ in self.asked]
        assert stats.generated_tokens == sum(len(c.tokens) for c in completions)
        assert stats.generated_tokens == sum(r.new_tokens for r in self.engine.reports)
        assert stats.steps == len(self.engine.reports)
        if not any(c.finish_reason == "cancelled" for c in completions):
            prompts = sum(c.prompt_tokens for c in completions)
            assert stats.prompt_tokens + stats.reused_tokens == prompts
            assert stats.reused_tokens == sum(c.reused_tokens for c in completions)
        seen["reused"] += stats.reused_tokens
        seen["accepted"] += stats.accepted_tokens
        seen["rejected"] += stats.guessed_tokens - stats.accepted_tokens
        for completion in completions:
            seen[completion.finish_reason] += 1
        buckets = [r.bucket for r in self.engine.reports if r.function != "prefill"]
        for before, after in pairwise(buckets):
            for name in ("batch", "capacity"):
                old, new = getattr(before, name), getattr(after, name)
                seen[f"{name} grew"] += new > old
                seen[f"{name} shrank"] += new < old
        seen["waited"] += sum(r.waiting > 0 and r.running < 3 for r in self.engine.reports)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with toys():
        yield


def run(kind: str, examples: int, plan: BucketPlan = PLAN) -> Counter[str]:
    machine = type(f"Schedule_{kind}", (Schedule,), {"kind": kind, "plan": plan, "seen": Counter()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=24,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.seen


@pytest.mark.parametrize("kind", CACHES)
def test_a_text_is_what_it_would_be_alone(kind):
    run(kind, 6)


@pytest.mark.long
@pytest.mark.parametrize("kind", CACHES)
def test_many_schedules(kind):
    seen = run(kind, 60)
    happened = {
        "reused", "accepted", "rejected", "waited", "stop", "length", "batch grew", "batch shrank",
        "cancelled while waiting", "cancelled while prefilling", "cancelled while running",
    }  # fmt: skip
    if kind != "toy_recurrent":  # it has no slots
        happened |= {"capacity grew", "capacity shrank"}
    assert {name for name in happened if not seen[name]} == set()


PLANS = [
    BucketPlan(batch=(2, 5), tokens=2, capacity=(16, 17, 48)),
    BucketPlan(batch=1, tokens=(1, 3, 16), capacity=48),
    BucketPlan(batch=(1, 2, 4), tokens=1, capacity=(8, 48)),
]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "ring", "toy_hybrid"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_schedules_in_odd_buckets(kind, plan):
    run(kind, 20, plan)
