"""Random schedules: whatever joins, leaves or is cancelled around it, a text is as if alone."""

from __future__ import annotations

import random
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
    least_budget,
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
CUTS = [1, 9, 12, 17, 18, 23, 30, 40]
REPEATING = [5, 9, 5, 9, 5, 9, 5, 9, 5, 9]
NEEDED: dict[str, list[Any]] = {
    "max_tokens": [30, 1, 2, 9, 14, 100],
    "speculate": [None, "ngram", "exact", "near", "far"],
}
CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.0, 0.7, 1.5],
    "top_k": [0, 0, 5],
    "top_p": [1.0, 0.9],
    "min_p": [0.0, 0.1],
    "seed": [0, 1, 2],
    "repetition_penalty": [1.0, 1.3],
    "presence_penalty": [0.0, 0.6],
    "frequency_penalty": [0.0, 0.4],
    "logit_bias": [{3: 2.0, 7: -float("inf")}, {17: 4.0}],
    "allowed_tokens": [[1, 2, 3, 4, 5, 6, 9, 17]],
    "top_logprobs": [0, 3],
    "stop": ["%", "ab", write([9, 5])],
}
BLURS = {"exact": 0.0, "near": 0.1, "far": 3.0}
SHARES = [None, None, 3.0, 1.2]  # of the least memory that will do
PLACES = ["waiting", "prefilling", "running", "ended"]
COUNTS = [1, 2, 3, 4, 6, 10, 25]

Wish = tuple[list[int], dict[str, Any]]


class Schedule:
    """Requests come, go and are cancelled while the scheduler steps.

    Args:
        kind: of cache.
        plan: buckets.
        share: memory to spare; None has plenty.
        seen: counts what happens.
        ahead: as on a GPU, or as on a CPU.
    """

    def __init__(
        self, kind: str, plan: BucketPlan, share: float | None, seen: Counter[str], ahead: bool
    ) -> None:
        chosen = subject(kind)
        least = least_budget(kind, plan, guesses=plan.tokens != (1,))  # for the longest text alone
        budget = None if share is None else int(share * least)
        self.kind, self.plan, self.seen = kind, plan, seen
        self.engine = DirectEngine(chosen, plan, memory_budget=budget, ahead=ahead)
        self.is_tight = budget is not None
        self.asked: list[tuple[Handle, list[int], dict[str, Any]]] = []

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
            assert isinstance(given["speculate"], Subject)
            return
        self.asked.append((handle, prompt, given))

    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.round()
            self.engine.check()

    def cancel(self, place: str, which: int) -> None:
        """Cancel a request that is there, if there is one."""
        there = [h for h, _, _ in self.asked if self.engine.where(h) == place]
        if there:
            self.seen[f"cancelled while {place}"] += 1
            handle = there[which % len(there)]
            handle.cancel()
            assert handle.done()
            assert self.engine.where(handle) == "ended"
            self.engine.check()

    def end(self) -> None:
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
        """What happened, so that a test can tell that all of it did."""
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


# --- every run: hypothesis looks for a small schedule ---------------------------------------------

beginnings = st.builds(
    lambda base, cut, rest: [*BASES[base][:cut], *rest],
    st.sampled_from([0, 0, 1]),
    st.sampled_from(CUTS),
    st.lists(st.integers(0, 3), max_size=5),
)
prompts = st.one_of(beginnings, beginnings, beginnings, st.just(REPEATING))
needed = {name: st.sampled_from(values) for name, values in NEEDED.items()}
choices = {name: st.sampled_from(values) for name, values in CHOICES.items()}
options = st.one_of(st.fixed_dictionaries(needed), st.fixed_dictionaries(needed, optional=choices))


class Machine(RuleBasedStateMachine):
    """A schedule by hypothesis."""

    kind: str

    @initialize(share=st.sampled_from(SHARES), ahead=st.booleans())
    def begin(self, share: float | None, ahead: bool) -> None:
        self.schedule = Schedule(self.kind, PLAN, share, Counter(), ahead)

    @rule(wishes=st.lists(st.tuples(prompts, options), min_size=1, max_size=4))
    def submit(self, wishes: list[Wish]) -> None:
        for prompt, wish in wishes:
            self.schedule.ask(prompt, wish)

    @rule(count=st.sampled_from(COUNTS))
    def step(self, count: int) -> None:
        self.schedule.step(count)

    @rule(place=st.sampled_from(PLACES), which=st.integers(0, 5))
    def cancel(self, place: str, which: int) -> None:
        self.schedule.cancel(place, which)

    @invariant()
    def in_order(self) -> None:
        if hasattr(self, "schedule"):
            self.schedule.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            self.schedule.end()


@pytest.mark.parametrize("kind", CACHES)
def test_a_text_is_what_it_would_be_alone(kind):
    run_state_machine_as_test(
        type(f"Machine_{kind}", (Machine,), {"kind": kind}),
        settings=settings(
            max_examples=6,
            stateful_step_count=24,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


# --- long: random walks, in which everything happens ----------------------------------------------


def choose_wish(chosen: random.Random) -> Wish:
    """As the strategies above, without their liking for the first of everything."""
    prompt = BASES[chosen.choice([0, 0, 1])][: chosen.choice(CUTS)]
    prompt = [*prompt, *(chosen.randrange(4) for _ in range(chosen.randrange(6)))]
    wish = {name: chosen.choice(values) for name, values in NEEDED.items()}
    if chosen.random() < 0.5:
        names = chosen.sample(list(CHOICES), chosen.randrange(1, 7))
        wish |= {name: chosen.choice(CHOICES[name]) for name in names}
    return (REPEATING if chosen.random() < 0.2 else prompt), wish


def walk(kind: str, walks: int, plan: BucketPlan = PLAN) -> Counter[str]:
    """Count what happens on so many walks of fifty moves each."""
    seen: Counter[str] = Counter()
    for seed in range(walks):
        chosen = random.Random(seed)
        schedule = Schedule(kind, plan, SHARES[seed % len(SHARES)], seen, seed % 8 < 4)
        for _ in range(50):
            move = chosen.choices(["submit", "step", "cancel"], [3, 6, 2])[0]
            if move == "submit":
                for _ in range(chosen.choice([1, 1, 2, 4])):
                    schedule.ask(*choose_wish(chosen))
            elif move == "step":
                schedule.step(chosen.choice(COUNTS))
            else:
                schedule.cancel(chosen.choice(PLACES), chosen.randrange(6))
        schedule.end()
    return seen


@pytest.mark.long
@pytest.mark.parametrize("kind", CACHES)
def test_many_schedules(kind):
    seen = walk(kind, 16)
    happened = {
        "reused", "accepted", "rejected", "waited", "stop", "length", "batch grew", "batch shrank",
        "cancelled while waiting", "cancelled while prefilling", "cancelled while running",
        "cancelled while ended",
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
    walk(kind, 6, plan)
