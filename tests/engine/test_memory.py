"""Memory is planned: what cannot fit waits, what never fits is refused, and nothing piles up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from funcrt import BucketPlan, Engine, cache
from funcrt.engine.admission import Admission
from funcrt.engine.prefixes import PrefixPool, Rewind
from funcrt.errors import CapacityError
from funcrt.footprint import Footprint
from tests.engine.harness import PLAN, DirectEngine, check_traces, draft, oracle, subject, toys
from tests.helpers import make_model, random_tokens

import mlx.core as mx
import pytest

GIB = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with toys():
        yield


def least(plan: BucketPlan = PLAN, longest: int = 40) -> int:
    """The smallest budget with which a text of so many tokens is taken."""
    low, high = 1, GIB
    while low < high:
        budget = (low + high) // 2
        try:
            DirectEngine(subject("full"), plan, memory_budget=budget).submit(
                [1] * longest, max_tokens=1
            )
            high = budget
        except CapacityError:
            low = budget + 1
    return low


def test_what_never_fits_is_refused_with_the_reason():
    model = subject("full")
    needed = least()
    engine = DirectEngine(model, memory_budget=needed - 1)
    with pytest.raises(CapacityError, match=r"a text of 40 tokens needs .* MB .*memory_budget"):
        engine.submit([1] * 20, max_tokens=21)
    engine.submit([1] * 20, max_tokens=3)  # the smaller bucket
    engine.run()
    footprint = Footprint.of(model, engine.compiled.cache_spec)
    assert needed > footprint.weights + footprint.state(1, 48)
    with pytest.raises(CapacityError, match=r"memory budget is 0\.0 MB"):
        DirectEngine(model, memory_budget=1).submit([1], max_tokens=1)


def test_what_is_known_is_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may wait while a request is admitted; with a draft all is found anew."""
    model = Footprint.of(subject("full").model)
    admission, counted = Admission(model, PLAN, 10**9), Counter[str]()
    call = Footprint.call

    def count(self: Footprint, *shape: Any) -> int:
        counted["calls"] += 1
        return call(self, *shape)

    monkeypatch.setattr(Footprint, "call", count)
    before, first = admission.spare([]), counted.copy()
    assert first["calls"] > 0
    assert admission.spare([]) == before
    assert counted == first
    admission.add_draft(model)
    assert admission.spare([]) < before - model.weights
    admission.remove_draft(model)
    assert admission.spare([]) == before


def test_what_does_not_fit_yet_waits_its_turn():
    """First come, first served: nobody overtakes, small ones neither."""
    model = subject("full")
    engine = DirectEngine(model, memory_budget=least())
    wishes = [(30, 11), (30, 11), (2, 3), (2, 3), (30, 11), (2, 4)]
    prompts = [random_tokens(length, i) for i, (length, _) in enumerate(wishes)]
    handles = [
        engine.submit(prompt, max_tokens=count)
        for prompt, (_, count) in zip(prompts, wishes, strict=True)
    ]
    order: list[int] = []
    together = 0
    for _ in range(500):
        if not engine.busy:
            break
        engine.round()
        engine.check()
        begun = [i for i, handle in enumerate(handles) if engine.where(handle) != "waiting"]
        order += [i for i in begun if i not in order]
        together = max(together, len(engine.running) + len(engine.prefilling))
    assert order == [0, 1, 2, 3, 4, 5]
    assert together == 1
    assert max(report.waiting for report in engine.reports) == 5
    for handle, prompt, (_, count) in zip(handles, prompts, wishes, strict=True):
        assert handle.result(0).tokens == oracle("full").complete(prompt, count)[0]
    with_more = DirectEngine(model, memory_budget=GIB)
    for prompt, (_, count) in zip(prompts, wishes, strict=True):
        with_more.submit(prompt, max_tokens=count)
    with_more.round()
    assert len(with_more.running) + len(with_more.prefilling) == 3  # all rows that there are


def test_nothing_takes_more_than_was_planned():
    """States large enough to tell: what MLX held at most is within the budget, at every budget."""
    model = make_model()
    plan = BucketPlan(batch=(1, 4, 16), tokens=(4, 32), capacity=(64, 512, 2048))
    footprint = Footprint.of(model, model.compiled(plan).cache_spec)
    wishes = [(random_tokens(20 + 97 * i % 1500, i), 2 + i % 7) for i in range(12)]
    longest = max(len(prompt) + count for prompt, count in wishes)
    smallest = DirectEngine(model, plan)._admission._needs(1, longest)
    together = []
    for budget in (int(1.2 * smallest), 2 * smallest, 4 * smallest):
        mx.clear_cache()
        before = mx.get_active_memory()
        engine = DirectEngine(model, plan, memory_budget=budget)
        mx.reset_peak_memory()
        handles = [engine.submit(prompt, max_tokens=count) for prompt, count in wishes]
        engine.run()
        assert all(handle.done() for handle in handles)
        assert mx.get_peak_memory() - before + footprint.weights <= budget
        together.append(max(r.running + r.prefilling for r in engine.reports))
        assert engine.scheduler._prefixes.nbytes <= budget // 10
        del engine, handles
    assert together[0] < together[2]  # and what there is is used


def test_prefixes_give_way_to_requests():
    model = subject("full")
    engine = DirectEngine(model, memory_budget=3 * least())
    for seed in range(12):
        engine.submit(random_tokens(30, seed), max_tokens=3)
        engine.run()
        engine.check_idle()
    kept = len(engine.scheduler._prefixes)
    assert kept >= 1
    again = engine.submit([*random_tokens(30, 11)[:25], 5], max_tokens=2)
    engine.run()
    assert again.result(0).reused_tokens == 25
    assert max(report.prefix_bytes for report in engine.reports) <= 3 * least() // 10


def test_of_rows_that_end_together_only_those_are_copied_that_are_kept():
    plan = BucketPlan(batch=(16,), tokens=(4,), capacity=(2048,))
    spec = make_model().compiled(plan).cache_spec
    row, state = cache.state_bytes(spec, 1, 2048), cache.init_cache(spec, 16, 2048)
    engine = DirectEngine(make_model(), plan)
    handles = [engine.submit(random_tokens(20, seed), max_tokens=1) for seed in range(16)]
    requests = [engine._owner.requests[handle] for handle in handles]
    for request in requests:
        request.cached = request.written = 20
    pool = PrefixPool(spec, plan, Rewind(spec, 4), 2 * row)
    mx.eval(state)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    pool.keep(dict(enumerate(requests)), state)
    assert len(pool) == 2
    assert mx.get_peak_memory() - before < 3 * row


def endure(count: int) -> None:
    """Requests of distinct lengths, in waves: traces stay within the plan, memory stays flat."""
    model = make_model()
    plan = BucketPlan(batch=(1, 8), tokens=(4, 16), capacity=(64, 512))
    held = []
    with Engine(model, plan, memory_budget=64 << 20) as engine:
        for wave in range(4):
            handles = []
            for i in range(wave, count, 4):
                prompt, new = random_tokens(1 + i * 7 % 97, i), 1 + i % 5
                handles.append(engine.submit(prompt, max_tokens=new))
            assert all(h.result(300).finish_reason == "length" for h in handles)
            del handles
            mx.clear_cache()
            held.append(mx.get_active_memory())
        check_traces(engine.compiled)
        assert engine.stats.requests == count
    limit = 0.1 * (64 << 20)  # prefixes may still be growing
    assert max(held[1:]) - min(held[1:]) < limit


def test_many_requests_leave_nothing_behind():
    endure(240)


@pytest.mark.long
def test_thousands_of_requests_leave_nothing_behind():
    endure(2000)


def test_a_draft_that_takes_the_room_of_others_is_refused():
    model = subject("full")
    least = DirectEngine(model)._admission._needs(1, 47)
    engine = DirectEngine(model, memory_budget=int(1.2 * least))
    engine.submit([1, 2, 3], max_tokens=40)
    with pytest.raises(
        CapacityError, match=r"does not hold the draft model .* use a smaller draft"
    ):
        engine.submit([1, 2, 3], max_tokens=40, speculate=draft("full", 0.1))
    engine.submit([1, 2, 3], max_tokens=40)
