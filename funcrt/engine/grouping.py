"""Which prompts share a call: the queue is cut into calls that cost the least together."""

from __future__ import annotations

from collections.abc import Sequence

from funcrt.buckets import BucketPlan, choose_overhead

_WHOLE_CALL = 4  # times the overhead: such a call spends most of its time on tokens


def most_places(plan: BucketPlan) -> int:
    """Tokens of the largest call of several prompts; a call of one may have more."""
    return max(plan.tokens[-1], _WHOLE_CALL * choose_overhead())


def cut(pending: Sequence[int], plan: BucketPlan, overhead: int, most: int) -> list[int]:
    """Where to cut a queue into calls: the end of each, so the last one is `len(pending)`.

    A call has the declared batch for its rows and the chunk with which its longest row begins; it
    costs its places and the `overhead`. What is then left of its rows costs a token a token. The
    sum over all calls is the least that any cut has; of equal ones the last calls are the largest.
    Where each prompt fits one call, nothing is lost by taking neighbors only: exchanging rows of
    two calls so that the longer ones sit together makes no call wider.

    Args:
        pending: tokens of each prompt that are not cached yet, in ascending order.
        plan: the declared buckets; the largest batch bounds the rows of a call.
        overhead: of a call, in tokens, see `funcrt.buckets.choose_overhead`.
        most: places of the largest call, see `most_places`, but that the smallest declared batch
            is always allowed.
    """
    batches = [0, *(plan.choose_batch(rows) for rows in range(1, plan.batch[-1] + 1))]
    cost, begin = [0], [0]
    for end in range(1, len(pending) + 1):
        width = plan.choose_chunk(pending[end - 1], overhead)
        left, cheapest, start = 0, -1, end - 1
        for first in reversed(range(max(0, end - plan.batch[-1]), end)):
            places = batches[end - first] * width
            if places > max(most, batches[1] * width):
                break
            left += max(0, pending[first] - width)
            total = cost[first] + places + overhead + left
            if cheapest < 0 or total <= cheapest:
                cheapest, start = total, first
        cost.append(cheapest)
        begin.append(start)
    ends, end = [], len(pending)
    while end:
        ends.append(end)
        end = begin[end]
    return ends[::-1]
