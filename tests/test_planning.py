"""Plans made from a sample of requests, against brute force and against what they promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Any

from funcrt import BucketPlan
from funcrt.buckets import default_plan
from funcrt.cache import CacheLayout
from funcrt.errors import CapacityError, InputError
from funcrt.expectation import expect
from funcrt.footprint import Footprint, stand_in
from funcrt.planning import choose_batches, choose_chunks, choose_sizes, cost_of_cut
from funcrt.steps import STEPS
from tests.helpers import make_model

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PAIRS = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 500)), min_size=1, max_size=40)
LENGTHS = [(7, 20), (30, 5), (200, 50), (210, 10), (1000, 100)]


@pytest.fixture(scope="module")
def footprint() -> Footprint:
    model = make_model()
    return Footprint.of(model, model.cache_spec(CacheLayout()))


def reserved(sizes: Sequence[int], needs: Counter[int]) -> int:
    return sum(min(s for s in sizes if s >= need) * count for need, count in needs.items())


# --- capacities -----------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 5))
def test_sizes_are_the_best_there_are(needs: list[int], most: int) -> None:
    counted = Counter(needs)
    sizes = choose_sizes(counted, most, lambda need: need)
    others = [
        (*chosen, max(needs))
        for count in range(most)
        for chosen in combinations(sorted(set(needs) - {max(needs)}), count)
    ]
    best = min(reserved(chosen, counted) for chosen in others)
    assert reserved(sizes, counted) == best
    assert len(sizes) == min(len(c) for c in others if reserved(c, counted) == best)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30))
def test_waste_never_grows_with_more_sizes(needs: list[int]) -> None:
    def round_up(need: int) -> int:
        return -(-need // 16) * 16

    counted = Counter(needs)
    taken = [reserved(choose_sizes(counted, most, round_up), counted) for most in range(1, 9)]
    assert taken == sorted(taken, reverse=True)


def test_capacities_are_round_above_64_and_as_needed_below() -> None:
    plan = BucketPlan.from_trace([(7, 20), (200, 50), (1000, 100)])
    assert plan.capacity == (28, 256, 1152)
    assert BucketPlan.from_trace([(7, 20), (200, 50), (1000, 100)], max_capacities=1).capacity == (
        1152,
    )


# --- tokens per call ------------------------------------------------------------------------------


@given(
    st.dictionaries(st.integers(1, 3000), st.integers(1, 5), min_size=1, max_size=6),
    st.integers(0, 130),
)
@settings(max_examples=30)
def test_chunks_are_the_cheapest_set(prompts: dict[int, int], overhead: int) -> None:
    powers = [2, 4, 8, 16, 32]
    chosen = choose_chunks(prompts, powers, 3, overhead)
    others = [c for count in (1, 2, 3) for c in combinations(powers, count) if min(c) <= 8]

    def total(chunks: Sequence[int]) -> int:
        return sum(cost_of_cut(chunks, n, overhead) * count for n, count in prompts.items())

    assert chosen in others
    assert total(chosen) == min(map(total, others))


@given(
    st.sets(st.sampled_from([1, 2, 4, 8, 16, 64]), min_size=1),
    st.integers(1, 500),
    st.integers(0, 130),
)
def test_costs_are_those_of_the_chunks_that_a_plan_chooses(
    chunks: set[int], pending: int, overhead: int
) -> None:
    plan = BucketPlan(batch=1, tokens=chunks, capacity=8)
    cost, left = 0, pending
    while left > 0:
        chunk = plan.choose_chunk(left, overhead)
        cost += chunk + overhead
        left -= chunk
    assert cost == cost_of_cut(plan.tokens, pending, overhead)


def test_long_prompts_get_large_chunks_and_short_ones_small() -> None:
    long = BucketPlan.from_trace([(4000, 10)] * 3, overhead=10)
    short = BucketPlan.from_trace([(20, 10), (25, 10)], overhead=10)
    assert long.tokens[-1] == 512
    assert short.tokens[-1] <= 32
    assert long.tokens[0] <= 8
    assert short.tokens[0] <= 8
    assert BucketPlan.from_trace([(4000, 10)], max_chunk=64).tokens[-1] <= 64


# --- batches and memory ---------------------------------------------------------------------------


def test_batches_are_powers_of_two_up_to_the_requests() -> None:
    assert BucketPlan.from_trace([(10, 5)]).batch == (1,)
    assert BucketPlan.from_trace([(10, 5)] * 7).batch == (1, 2, 4)
    assert BucketPlan.from_trace([(10, 5)] * 1000, max_batch=16).batch == (1, 2, 4, 8, 16)
    assert BucketPlan.from_trace([(10, 5)] * 1000).batch[-1] == 64


def test_few_batches_keep_the_largest_and_one() -> None:
    powers = [1, 2, 4, 8, 16, 32, 64]
    assert choose_batches(powers, 7) == tuple(powers)
    assert choose_batches(powers, 1) == (64,)
    assert choose_batches(powers, 2) == (1, 64)
    assert choose_batches(powers, 4) == (1, 16, 32, 64)


@given(PAIRS, st.integers(200_000, 200_000_000), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_request_fits_and_the_budget_is_kept(
    footprint: Footprint, pairs: list[tuple[int, int]], budget: int, capacities: int, batches: int
) -> None:
    limits = {"max_capacities": capacities, "max_batches": batches, "overhead": 10}
    free = BucketPlan.from_trace(pairs, footprint=footprint, **limits)
    try:
        plan = BucketPlan.from_trace(pairs, budget, footprint=footprint, **limits)
    except CapacityError:
        assert footprint.total(1, 2, free.capacity[-1]) > budget
        return
    assert len(plan.capacity) <= capacities
    assert len(plan.batch) <= batches
    assert plan.capacity == free.capacity
    for prompt, new in pairs:
        assert plan.choose_capacity(prompt + new) > prompt + new
    expected = expect(plan, pairs, footprint, overhead=10)
    assert expected.largest_memory <= budget
    assert expected.largest_memory == footprint.total(
        plan.batch[-1], plan.tokens[-1], plan.capacity[-1]
    )
    doubled = 2 * plan.batch[-1]
    if doubled <= min(64, len(pairs)):  # nothing but the budget stopped it
        assert footprint.total(doubled, plan.tokens[-1], plan.capacity[-1]) > budget


def test_a_budget_below_one_request_says_what_is_needed(footprint: Footprint) -> None:
    with pytest.raises(CapacityError) as caught:
        BucketPlan.from_trace(LENGTHS, 1_000_000, footprint=footprint)
    needed = footprint.total(1, 2, 1152)
    assert f"one request of 1151 tokens needs {needed} bytes" in str(caught.value)
    assert "budget is 1000000: raise it" in str(caught.value)
    assert BucketPlan.from_trace(LENGTHS, needed, footprint=footprint).batch == (1,)


def test_the_default_footprint_is_named() -> None:
    enough = stand_in().total(1, 2, 1152)
    assert BucketPlan.from_trace(LENGTHS, enough).batch == (1,)
    with pytest.raises(CapacityError, match="no model is named, so the caches of a 1B llama"):
        BucketPlan.from_trace(LENGTHS, enough - 1)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([], "at least one pair"),
        (5, "expected pairs .*got int"),
        ("ab", "expected pairs .*got str"),
        ({1: 2}, "expected pairs .*got dict"),
        ([(1, 2), 3], r"request 1: expected two numbers .*got 3"),
        ([(1, 2, 3)], r"request 0: expected two numbers"),
        ([(0, 2)], "request 0: prompt tokens: expected an integer >= 1, got 0"),
        ([(1, 0)], "request 0: new tokens: expected an integer >= 1, got 0"),
        ([(-1, 2)], "got -1"),
        ([(1.0, 2)], "got 1.0"),
        ([(True, 2)], "got True"),
        ([("1", "2")], "got '1'"),
        ([(2**31, 1)], "more than any cache holds"),
        ([(2**30, 2**30)], "more than any cache holds"),
        ([(float("nan"), 1)], "got nan"),
        ([None], "got None"),
    ],
    ids=str,
)
def test_odd_lengths_are_refused(lengths: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        BucketPlan.from_trace(lengths)
    with pytest.raises(InputError, match=says):
        expect(default_plan(64), lengths)


@pytest.mark.parametrize(
    "limit", ["max_batches", "max_chunks", "max_capacities", "max_batch", "max_chunk"]
)
def test_odd_limits_are_refused(limit: str) -> None:
    with pytest.raises(InputError, match="expected an integer >= 1, got 0"):
        BucketPlan.from_trace(LENGTHS, **{limit: 0})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="memory budget: expected an integer >= 1, got -5"):
        BucketPlan.from_trace(LENGTHS, -5)
    with pytest.raises(InputError, match="overhead: expected an integer >= 0"):
        BucketPlan.from_trace(LENGTHS, overhead=-1)


def test_numbers_of_other_libraries_and_one_shot_iterables_are_taken() -> None:
    assert BucketPlan.from_trace(np.array(LENGTHS)) == BucketPlan.from_trace(iter(LENGTHS))


def test_the_longest_request_there_can_be_is_planned() -> None:
    plan = BucketPlan.from_trace([(2**30, 2**29), (5, 5)])
    assert plan.capacity[-1] > 2**30 + 2**29
    with pytest.raises(CapacityError, match="memory budget"):
        BucketPlan.from_trace([(2**30, 2**29)], 10**12)


# --- expectations ---------------------------------------------------------------------------------


def test_what_a_plan_wastes_is_counted(footprint: Footprint) -> None:
    plan = BucketPlan(batch=(1, 2), tokens=(4, 16), capacity=(32, 64))
    found = expect(plan, [(10, 3), (33, 20), (5, 5)], footprint, overhead=4)
    assert (found.requests, found.prompt_tokens, found.new_tokens) == (3, 48, 28)
    # 10 -> 16; 33 -> 16 16 4; 5 -> 4 4
    assert (found.prefill_tokens, found.prefill_calls) == (16 + 36 + 8, 6)
    assert found.wasted_tokens == 12
    assert (found.slots, found.reserved_slots) == (14 + 54 + 11, 32 + 64 + 32)
    assert found.wasted_slots == 128 - 79
    # Two rows for 8 steps (3, then 5 tokens beside the long one), then one for 12.
    assert (found.decode_calls, found.decode_rows, found.wasted_rows) == (20, 28, 0)
    assert found.memory[2, 64] == found.largest_memory == footprint.total(2, 16, 64)
    assert set(found.memory) == {(1, 32), (1, 64), (2, 32), (2, 64)}
    assert found.functions == sum(
        len(step.buckets(plan.batch, plan.tokens, plan.capacity)) for step in STEPS.values()
    )


def test_idle_rows_are_counted() -> None:
    plan = BucketPlan(batch=(4,), tokens=8, capacity=64)
    found = expect(plan, [(3, 10), (3, 2), (3, 1)])
    assert (found.decode_calls, found.decode_rows, found.wasted_rows) == (10, 40, 27)


def test_a_request_that_fits_nowhere_is_named() -> None:
    with pytest.raises(CapacityError, match="request has 100 tokens"):
        expect(BucketPlan(batch=1, tokens=8, capacity=64), [(3, 2), (90, 10)])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.sets(st.integers(1, 5), min_size=1))
def test_decoding_is_what_a_step_by_step_run_does(counts: list[int], batches: set[int]) -> None:
    plan = BucketPlan(batch=batches, tokens=8, capacity=64)
    waiting, running, rows, steps = list(counts), [], 0, 0
    while waiting or running:
        while waiting and len(running) < max(batches):
            running.append(waiting.pop(0))
        rows += plan.choose_batch(len(running))
        steps += 1
        running = [left - 1 for left in running if left > 1]
    found = expect(plan, [(1, count) for count in counts])
    assert (found.decode_rows, found.decode_calls) == (rows, steps)


@given(PAIRS)
@settings(max_examples=30, deadline=None)
def test_more_sizes_never_waste_more(pairs: list[tuple[int, int]]) -> None:
    slots = [
        expect(BucketPlan.from_trace(pairs, max_capacities=n), pairs).wasted_slots
        for n in (1, 2, 3, 6)
    ]
    costs = []
    for n in (1, 2, 3, 4):
        plan = BucketPlan.from_trace(pairs, max_chunks=n, overhead=10)
        found = expect(plan, pairs, overhead=10)
        costs.append(found.prefill_tokens + 10 * found.prefill_calls)
    assert slots == sorted(slots, reverse=True)
    assert costs == sorted(costs, reverse=True)


def test_order_does_not_matter_to_the_plan() -> None:
    plans = {BucketPlan.from_trace(order, overhead=10) for order in permutations(LENGTHS)}
    assert len(plans) == 1
