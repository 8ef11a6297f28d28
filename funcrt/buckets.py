"""Buckets: the finite, declared set of shapes that are compiled. Host policy, no arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from funcrt.errors import CapacityError, InputError


class Bucket(NamedTuple):
    """One compiled shape: rows, tokens per call, cache slots (one of them scratch)."""

    batch: int
    tokens: int
    capacity: int

    def __str__(self) -> str:
        return f"b{self.batch}_t{self.tokens}_s{self.capacity}"


@dataclass(frozen=True, init=False)
class BucketPlan:
    """Every combination of the declared batches, tokens per call and capacities.

    Args:
        batch: row counts, each >= 1.
        tokens: tokens per call, each >= 1. Decoding always takes one token and needs no entry.
        capacity: cache slots, each >= 2; one slot is scratch, so S holds S - 1 tokens.

    Raises:
        InputError: an empty list or a value out of range.
    """

    batch: tuple[int, ...]
    tokens: tuple[int, ...]
    capacity: tuple[int, ...]

    def __init__(
        self, *, batch: Iterable[int], tokens: Iterable[int], capacity: Iterable[int]
    ) -> None:
        for name, values, least in [
            ("batch", batch, 1),
            ("tokens", tokens, 1),
            ("capacity", capacity, 2),
        ]:
            numbers: list[Any] = [values] if isinstance(values, int) else list(values)
            if not numbers or not all(_is_size(number, least) for number in numbers):
                raise InputError(f"plan {name}: expected integers >= {least}, got {numbers}")
            object.__setattr__(self, name, tuple(sorted(set(numbers))))

    def __iter__(self) -> Iterator[Bucket]:
        return (Bucket(b, t, s) for b in self.batch for s in self.capacity for t in self.tokens)

    def choose_batch(self, rows: int) -> int:
        """The smallest declared batch for `rows`. Raises CapacityError."""
        return _choose(self.batch, rows, "rows", "batch", rows)

    def choose_tokens(self, tokens: int) -> int:
        """The smallest declared T for `tokens`, or the largest one: longer input goes in chunks."""
        return next((t for t in self.tokens if t >= tokens), self.tokens[-1])

    def choose_capacity(self, tokens: int, what: str = "text") -> int:
        """The smallest declared S that holds `tokens` beside the scratch slot.

        Raises CapacityError saying what arrived, what fits and what to export.
        """
        for capacity in self.capacity:
            if tokens <= capacity - 1:
                return capacity
        needed = 1 << tokens.bit_length()  # the power of two that leaves room for the scratch slot
        raise CapacityError(
            f"{what} has {tokens} tokens, largest capacity is {self.capacity[-1] - 1}: "
            f"export a larger one (--capacity {needed})"
        )

    def check(self, batch: int | None = None, capacity: int | None = None) -> None:
        """Raise CapacityError unless both are declared."""
        for name, value, declared in [
            ("batch", batch, self.batch),
            ("capacity", capacity, self.capacity),
        ]:
            if value is not None and value not in declared:
                raise CapacityError(
                    f"{name} {value} is not declared; declared: {', '.join(map(str, declared))}"
                )


def _is_size(number: object, least: int) -> bool:
    whole = isinstance(number, int) and not isinstance(number, bool)
    return whole and least <= number < 1 << 31  # type: ignore[operator]


def _choose(declared: tuple[int, ...], wanted: int, what: str, option: str, suggest: int) -> int:
    for value in declared:
        if value >= wanted:
            return value
    raise CapacityError(
        f"{wanted} {what}, largest {option} is {declared[-1]}: "
        f"export a larger one (--{option} {suggest})"
    )


def default_plan(max_positions: int) -> BucketPlan:
    """The plan of a model that was given none; shapes compile only when they are first used."""
    capacities, capacity = [], 256
    while capacity < max_positions + 1:
        capacities.append(capacity)
        capacity *= 2
    return BucketPlan(batch=(1, 2, 4, 8), tokens=(16, 64, 256), capacity=[*capacities, capacity])
