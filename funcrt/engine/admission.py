"""Whether there is memory for a request, before it is given a row."""

from __future__ import annotations

from collections.abc import Sequence

from funcrt import machine
from funcrt.buckets import BucketPlan
from funcrt.engine.request import Request
from funcrt.errors import CapacityError
from funcrt.footprint import Footprint

_SHARE = 0.9  # of what is free when the engine is made, the rest is for everybody else


class Admission:
    """The memory that requests will take at most, against a budget.

    A request is counted with its prompt and all the new tokens that it may get, in the bucket that
    it and its neighbours then need, and with a second such state for moves between buckets.

    Args:
        footprint: what the model takes.
        plan: the declared buckets.
        budget: bytes for weights, states, kept rows and one call; None takes most of what is free.

    Attributes:
        budget: bytes.
    """

    def __init__(self, footprint: Footprint, plan: BucketPlan, budget: int | None) -> None:
        self._footprint = footprint
        self._drafts: list[Footprint] = []
        self._plan = plan
        if budget is None:
            budget = footprint.weights + int(_SHARE * machine.available_memory())
        self.budget = budget

    def add_draft(self, footprint: Footprint) -> None:
        """Count a draft model, too: its weights, and as many rows as the model itself has.

        Raises CapacityError if texts that fit now would not fit beside it.
        """
        longest = [c - 1 for c in self._plan.capacity if self._needs(1, c - 1) <= self.budget]
        self._drafts.append(footprint)
        if not longest or self._needs(1, longest[-1]) > self.budget:
            self._drafts.pop()
            state = footprint.state(self._plan.batch[0], self._plan.capacity[-1])
            raise CapacityError(
                f"the draft model takes {footprint.weights / 1e6:.1f} MB and up to "
                f"{state / 1e6:.1f} MB for a text, and the memory budget of "
                f"{self.budget / 1e6:.1f} MB does not hold that beside the model: use a smaller "
                "draft, or raise memory_budget"
            )

    def check(self, longest: int) -> None:
        """Raise CapacityError if a text of so many tokens does not even fit alone."""
        needed = self._needs(1, longest)
        if needed > self.budget:
            raise CapacityError(
                f"a text of {longest} tokens needs {needed / 1e6:.1f} MB with its model, the "
                f"memory budget is {self.budget / 1e6:.1f} MB: ask for fewer new tokens, shorten "
                "the prompt, or raise memory_budget"
            )

    def spare(self, requests: Sequence[Request]) -> int:
        """Bytes that are left when all of these go on to their limits; negative if too few are."""
        longest = max((request.longest for request in requests), default=1)
        return self.budget - self._needs(max(1, len(requests)), longest)

    def _needs(self, rows: int, longest: int) -> int:
        plan = self._plan
        batch, capacity = plan.choose_batch(rows), plan.choose_capacity(longest)
        # Many rows are decoded, few prefilled: either may need more.
        decoding = self._footprint.total(batch, 1, capacity)
        states = 2 * self._footprint.state(batch, capacity)
        prefilling = self._footprint.call(plan.batch[0], plan.tokens[-1], capacity)
        drafts = sum(f.weights + 2 * f.state(batch, capacity) for f in self._drafts)
        return drafts + max(decoding, self._footprint.weights + states + prefilling)
