"""What a check measured, beside what is allowed."""

from __future__ import annotations

import math
from typing import NamedTuple

TOLERANCE = 2e-5  # float32, as a share of the largest logit
BLINDNESS = 100 * TOLERANCE  # what a feature that is switched off must move at least
WIDTH, CAPACITY = 8, 64  # T of calls with several rows, and S


class Result(NamedTuple):
    """A measured number against its limit.

    Attributes:
        found: what was measured.
        limit: the largest that passes, or the least with `at_least`.
        note: what the number belongs to.
        at_least: the limit is a lower one.
    """

    found: float
    limit: float
    note: str = ""
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether the number is within its limit; one that is not finite never is."""
        if not math.isfinite(self.found):
            return False
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.found:.2g} ({sign} {self.limit:.2g}){f' {self.note}' if self.note else ''}"


def worst(results: list[Result]) -> Result:
    """The one that fails, or comes nearest to it."""

    def margin(result: Result) -> float:
        if not math.isfinite(result.found):
            return math.inf
        over = (result.limit, result.found) if result.at_least else (result.found, result.limit)
        return over[0] / over[1] if over[1] else over[0] * math.inf if over[0] else 0.0

    return max(results, key=margin)
