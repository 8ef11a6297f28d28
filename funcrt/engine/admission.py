"""Whether there is memory for a request, before it is given a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from funcrt import machine
from funcrt.buckets import BucketPlan
from funcrt.engine.grouping import most_places
from funcrt.engine.request import Request
from funcrt.errors import CapacityError
from funcrt.footprint import Footprint
from funcrt.steps import STEPS

_SHARE = 0.9  # of what is free when the engine is made, the rest is for everybody else


class Admission:
    """The memory that requests will take at most, against a budget.

    A request is counted with its prompt and all the new tokens that it may get, in the bucket that
    it and its neighbours then need, with the states that exist beside it while rows move.

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
        self._known: dict[tuple[int, int, bool], int] = {}  # a device may wait while it is found
        if budget is None:
            budget = footprint.weights + int(_SHARE * machine.available_memory())
        self.budget = budget

    def add_draft(self, footprint: Footprint) -> None:
        """Count a draft model, too: its weights, its calls, and as many rows as the model has.

        Raises CapacityError if texts that fit now would not fit beside it.
        """
        longest = [c - 1 for c in self._plan.capacity if self._needs(1, c - 1) <= self.budget]
        self._drafts.append(footprint)
        self._known = {}
        if not longest or self._needs(1, longest[-1], guesses=True) > self.budget:
            self.remove_draft(footprint)
            raise CapacityError(
                f"the memory budget of {self.budget / 1e6:.1f} MB does not hold the draft model "
                f"({footprint.weights / 1e6:.1f} MB of weights, its cache and its calls) beside "
                "the model: use a smaller draft, or raise memory_budget"
            )

    def remove_draft(self, footprint: Footprint) -> None:
        """Count it no more."""
        self._drafts.remove(footprint)
        self._known = {}

    def check(self, longest: int, guesses: bool) -> None:
        """Raise CapacityError if a text does not even fit alone.

        Args:
            longest: tokens in the cache at its end.
            guesses: whether its tokens are guessed and verified.
        """
        needed = self._needs(1, longest, guesses)
        if needed > self.budget:
            raise CapacityError(
                f"a text of {longest} tokens needs {needed / 1e6:.1f} MB with its model, the "
                f"memory budget is {self.budget / 1e6:.1f} MB: ask for fewer new tokens, shorten "
                "the prompt, or raise memory_budget"
            )

    def spare(self, requests: Sequence[Request]) -> int:
        """Bytes that are left when all of these go on to their limits; negative if too few are."""
        longest = max((request.longest for request in requests), default=1)
        guesses = any(request.drafter is not None for request in requests)
        return self.budget - self._needs(max(1, len(requests)), longest, guesses)

    def _needs(self, rows: int, longest: int, guesses: bool = False) -> int:
        known = self._known  # another thread may change drafts meanwhile, which begins a new one
        key = (rows, self._plan.choose_capacity(longest), guesses)
        if key not in known:
            known[key] = self._find_needs(*key)
        return known[key]

    def _find_needs(self, rows: int, capacity: int, guesses: bool) -> int:
        plan, model = self._plan, self._footprint
        batch = plan.choose_batch(rows)
        row, state = model.state(1, capacity), model.state(batch, capacity)
        moving = 2 * state  # one bucket and the next
        joining = 2 * state + rows * row if rows > 1 else 0  # prompts, alone and stacked, beside it
        calls = [model.call(batch, 1, capacity), *self._prefills(model, batch, capacity)]
        if guesses:
            widest = STEPS["verify"].choose_sizes(plan.tokens)[-1]
            calls.append(model.call(batch, widest, capacity, "verify"))
        drafts = 0
        for draft in self._drafts:
            drafts += draft.weights + 2 * draft.state(batch, capacity)
            calls.append(draft.call(batch, 1, capacity))
            width = max([t for t in plan.tokens if t * batch <= most_places(plan)],
                        default=plan.tokens[0])  # fmt: skip
            calls.append(draft.call(batch, width, capacity))
        settings = batch * model.vocab_size * 8  # bias and history
        kept = row  # the copy of a row that has ended
        return model.weights + drafts + max(moving, joining) + kept + settings + max(calls)

    def _prefills(self, model: Footprint, batch: int, capacity: int) -> Iterator[int]:
        """What calls of prompts take, in the shapes that they have."""
        plan = self._plan
        for rows in plan.batch:
            for tokens in plan.tokens:
                fits = rows == plan.batch[0] or rows * tokens <= most_places(plan)
                if rows <= batch and fits:
                    yield model.call(rows, tokens, capacity)
