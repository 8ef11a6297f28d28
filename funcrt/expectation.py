"""What a plan would waste on a sample of requests, and the memory that it would take.

Everything here is arithmetic on lengths: nothing is allocated, traced or compiled.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from funcrt.buckets import BucketPlan, choose_overhead
from funcrt.calling import CallForm
from funcrt.footprint import Footprint, footprint_of
from funcrt.planning import check_lengths
from funcrt.steps import STEPS


@dataclass(frozen=True)
class Expectation:
    """What a plan does with a sample of requests, all there from the start.

    Attributes:
        requests: how many.
        prompt_tokens: tokens of their prompts.
        prefill_tokens: the same with padding.
        prefill_calls: calls of one row that feed them; fewer where rows are stacked.
        slots: what requests need, each with its scratch slot.
        reserved_slots: slots of the smallest declared capacity of each.
        new_tokens: tokens to generate, rows of decoding steps that do something.
        decode_rows: the same with idle rows.
        decode_calls: decoding steps, when the largest batch is kept full as long as requests wait.
        memory: (batch, capacity) -> bytes of weights, states and the largest call.
        functions: how many an export of the plan compiles.
    """

    requests: int
    prompt_tokens: int
    prefill_tokens: int
    prefill_calls: int
    slots: int
    reserved_slots: int
    new_tokens: int
    decode_rows: int
    decode_calls: int
    memory: dict[tuple[int, int], int]
    functions: int

    @property
    def wasted_tokens(self) -> int:
        """Padding in prefill calls."""
        return self.prefill_tokens - self.prompt_tokens

    @property
    def wasted_slots(self) -> int:
        """Reserved slots that stay empty."""
        return self.reserved_slots - self.slots

    @property
    def wasted_rows(self) -> int:
        """Idle rows, summed over all decoding steps."""
        return self.decode_rows - self.new_tokens

    @property
    def largest_memory(self) -> int:
        """Bytes that the largest batch and capacity take."""
        return max(self.memory.values())


def expect(
    plan: BucketPlan,
    lengths: Iterable[Sequence[int]],
    footprint: Footprint | CallForm | None = None,
    overhead: int | None = None,
) -> Expectation:
    """What `plan` would waste and take, before anything is compiled.

    Args:
        plan: any plan, not only one made for these requests.
        lengths: pairs (prompt tokens, new tokens).
        footprint: of the model, or a model or bundle; None as in `BucketPlan.from_trace`.
        overhead: see `BucketPlan.choose_chunk`; None is that of the default device.

    Raises:
        InputError: lengths that are not such pairs.
        CapacityError: a request fits no declared capacity.
    """
    requests = check_lengths(lengths)
    footprint = footprint_of(footprint)
    overhead = choose_overhead() if overhead is None else overhead
    calls: Counter[int] = Counter()
    for prompt, count in Counter(request.prompt for request in requests).items():
        for chunk, times in _cut(plan, prompt, overhead).items():
            calls[chunk] += times * count
    needs = Counter(request.slots for request in requests)
    rows, steps = _decode(plan, [request.new for request in requests])
    return Expectation(
        requests=len(requests),
        prompt_tokens=sum(request.prompt for request in requests),
        prefill_tokens=sum(chunk * count for chunk, count in calls.items()),
        prefill_calls=sum(calls.values()),
        slots=sum(need * count for need, count in needs.items()),
        reserved_slots=sum(
            plan.choose_capacity(need - 1, "request") * count for need, count in needs.items()
        ),
        new_tokens=sum(request.new for request in requests),
        decode_rows=rows,
        decode_calls=steps,
        memory={
            (batch, capacity): footprint.total(batch, plan.tokens[-1], capacity)
            for batch in plan.batch
            for capacity in plan.capacity
        },
        functions=sum(
            len(step.buckets(plan.batch, plan.tokens, plan.capacity)) for step in STEPS.values()
        ),
    )


def _cut(plan: BucketPlan, pending: int, overhead: int) -> Counter[int]:
    """Chunk -> how many of them the cheapest cut has."""
    calls: Counter[int] = Counter()
    while pending > 0:
        chunk = plan.choose_chunk(pending, overhead)
        calls[chunk] += 1
        pending -= chunk
    return calls


def _decode(plan: BucketPlan, counts: Sequence[int]) -> tuple[int, int]:
    """(rows, steps) of decoding: rows are filled in order as they become free."""
    ends: list[int] = []  # steps at which running requests end
    now = rows = 0
    for count in counts:
        if len(ends) == plan.batch[-1]:
            end = heapq.heappop(ends)
            rows += (end - now) * plan.batch[-1]
            now = end
        heapq.heappush(ends, now + count)
    while ends:
        batch = plan.choose_batch(len(ends))
        end = heapq.heappop(ends)
        rows += (end - now) * batch
        now = end
    return rows, now
