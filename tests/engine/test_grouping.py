"""How a queue of prompts is cut into calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations

from funcrt.buckets import BucketPlan
from funcrt.engine.grouping import cut

from hypothesis import given
from hypothesis import strategies as st

sizes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=1, max_size=4, unique=True)


def cost_of(groups: Sequence[Sequence[int]], plan: BucketPlan, overhead: int) -> int:
    """As `cut` counts: the places of each call, its overhead, and what is left of its rows."""
    total = 0
    for group in groups:
        width = plan.choose_chunk(max(group), overhead)
        total += plan.choose_batch(len(group)) * width + overhead
        total += sum(max(0, pending - width) for pending in group)
    return total


def partitions(values: Sequence[int]) -> list[list[list[int]]]:
    """Every way to put neighbors together."""
    if not values:
        return [[]]
    return [
        [list(values[:n]), *rest]
        for n in range(1, len(values) + 1)
        for rest in partitions(values[n:])
    ]


def groups_of(pending: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
    return [list(pending[a:b]) for a, b in pairwise([0, *ends])]


def allowed(groups: Sequence[Sequence[int]], plan: BucketPlan, overhead: int, most: int) -> bool:
    return all(
        len(group) <= plan.batch[0]
        or (
            len(group) <= plan.batch[-1]
            and plan.choose_batch(len(group)) * plan.choose_chunk(max(group), overhead) <= most
        )
        for group in groups
    )


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=7).map(sorted),
    sizes,
    sizes,
    st.sampled_from([0, 1, 5, 30]),
    st.sampled_from([8, 24, 100]),
)
def test_no_cut_is_cheaper(pending, batch, tokens, overhead, most):
    plan = BucketPlan(batch=batch, tokens=tokens, capacity=[64])
    groups = groups_of(pending, cut(pending, plan, overhead, most))
    assert [n for group in groups for n in group] == pending
    assert allowed(groups, plan, overhead, most)
    others = [g for g in partitions(pending) if allowed(g, plan, overhead, most)]
    assert cost_of(groups, plan, overhead) == min(cost_of(g, plan, overhead) for g in others)


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=5),
    st.sampled_from([[1, 2, 4], [1, 3], [2, 4]]),
    st.sampled_from([0, 3, 20]),
)
def test_no_other_order_is_cheaper(pending, batch, overhead):
    """Of prompts that each fit one call."""
    plan = BucketPlan(batch=batch, tokens=[2, 4, 8, 16], capacity=[64])
    ordered = sorted(pending)
    mine = cost_of(groups_of(ordered, cut(ordered, plan, overhead, 10**6)), plan, overhead)
    for order in set(permutations(pending)):
        for groups in partitions(order):
            if max(map(len, groups)) <= batch[-1]:
                assert mine <= cost_of(groups, plan, overhead)


def test_equal_costs_are_one_call():
    plan = BucketPlan(batch=[1, 2, 4], tokens=[4], capacity=[8])
    assert cut([4, 4], plan, 0, 100) == [2]
    assert cut([4, 4, 4], plan, 0, 100) == [1, 3]  # a fourth row would be padding
    assert cut([4, 4, 4], plan, 5, 100) == [3]  # and is cheaper than a second call


def test_rows_that_are_there_anyway_are_filled():
    plan = BucketPlan(batch=[4, 8], tokens=[16], capacity=[32])
    assert cut([16] * 6, plan, 10, 40) == [2, 6]  # 4 x 16 is more than 40, but the least there is


def test_short_prompts_are_not_padded_to_long_ones():
    plan = BucketPlan(batch=[1, 2, 4], tokens=[8, 64], capacity=[128])
    assert cut([5, 6, 7, 8, 60, 61, 62, 64], plan, 10, 10**6) == [4, 8]
