"""Buckets: the finite, declared set of shapes that are compiled. Host policy, no arrays."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from funcrt.errors import CapacityError, InputError

if TYPE_CHECKING:
    from funcrt.calling import CallForm
    from funcrt.footprint import Footprint

_MOST_PLANNED = 1 << 16  # tokens that the choice of chunks looks ahead


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

    @classmethod
    def from_trace(
        cls,
        lengths: Iterable[Sequence[int]],
        memory_budget: int | None = None,
        *,
        footprint: Footprint | CallForm | None = None,
        overhead: int | None = None,
        max_batches: int = 5,
        max_chunks: int = 4,
        max_capacities: int = 3,
        max_batch: int = 64,
        max_chunk: int = 512,
    ) -> BucketPlan:
        """A plan for requests like those of a sample.

        Capacities are those that leave fewest slots empty, tokens per call the powers of two with
        which prompts are cheapest to feed (one of them at most 8), batches powers of two as far as
        the longest request fits in memory that often.

        Args:
            lengths: pairs (prompt tokens, new tokens), each at least 1.
            memory_budget: bytes for weights, cache states and calls; None is no limit.
            footprint: a model or a bundle, or its `Footprint`; None counts the caches of a 1B llama
                in bfloat16, 32 KiB per token, and no weights.
            overhead: what a call costs beside its tokens; None is that of the default device.
            max_batches: how many batch sizes there may be.
            max_chunks: how many sizes of tokens per call.
            max_capacities: how many capacities.
            max_batch: the largest batch.
            max_chunk: the most tokens per call.

        Raises:
            InputError: lengths that are not such pairs, or limits below 1.
            CapacityError: the longest request alone is beyond the budget.
        """
        from funcrt.planning import Limits, make_plan  # it knows arrays, this module does not

        limits = Limits(max_batches, max_chunks, max_capacities, max_batch, max_chunk)
        return make_plan(lengths, memory_budget, footprint, overhead, limits)

    def joined(self, other: BucketPlan) -> BucketPlan:
        """Every size that either plan declares."""
        return BucketPlan(
            batch=self.batch + other.batch,
            tokens=self.tokens + other.tokens,
            capacity=self.capacity + other.capacity,
        )

    def __iter__(self) -> Iterator[Bucket]:
        return (Bucket(b, t, s) for b in self.batch for s in self.capacity for t in self.tokens)

    def choose_batch(self, rows: int) -> int:
        """The smallest declared batch for `rows`. Raises CapacityError."""
        return _choose(self.batch, rows, "rows", "batch", rows)

    def next_capacity(self, capacity: int) -> int:
        """The smallest declared capacity above `capacity`. Raises CapacityError at the largest."""
        return self.choose_capacity(capacity)

    def choose_tokens(self, tokens: int) -> int:
        """The smallest declared T for `tokens`, or the largest one: longer input goes in chunks."""
        return next((t for t in self.tokens if t >= tokens), self.tokens[-1])

    def choose_chunk(self, pending: int, overhead: int) -> int:
        """The declared T with which to begin feeding `pending` tokens in the cheapest calls.

        A call of T tokens costs T + `overhead`, padded or not; see `choose_overhead`. The largest
        chunks of the cheapest cut come first, so only the last call may be padded.

        Raises InputError unless pending >= 1 and overhead >= 0.
        """
        for name, number, least in [("pending", pending, 1), ("overhead", overhead, 0)]:
            if not _is_size(number, least):
                raise InputError(f"{name}: expected an integer >= {least}, got {number!r}")
        first = _first_chunks(self.tokens, overhead)
        return first[pending] if pending < len(first) else self.tokens[-1]

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


def choose_overhead() -> int:
    """What a call costs beside its tokens, in tokens: mostly reading the weights once.

    On a CPU 10: a decoding step of SmolLM2-135M takes 37 ms on two cores, a token more 4 ms. On a
    GPU 512: reading the weights takes as long as multiplying them with some hundred rows, and
    scheduling a call as long again; of a small model, longer.
    """
    from funcrt.machine import is_on_gpu  # nothing else here needs MLX

    return 512 if is_on_gpu() else 10


@lru_cache(maxsize=64)
def _first_chunks(tokens: tuple[int, ...], overhead: int) -> Sequence[int]:
    """Index n -> the largest chunk of a cheapest cut of n tokens; beyond the end, the largest T."""
    size = _table_size(tokens)
    cost, first = array("q", [0]) * size, array("q", [0]) * size
    for n in range(1, size):
        # Of equally cheap ones the largest.
        cost[n], negative = min((t + overhead + cost[max(n - t, 0)], -t) for t in tokens)
        first[n] = -negative
    return first


def _table_size(tokens: tuple[int, ...]) -> int:
    """The number of pending tokens from which on a cheapest cut can begin with the largest chunk.

    Of any n whole numbers some add up to a multiple of n. So of largest / gcd smaller chunks, some
    add up to whole largest ones, which are fewer calls: a cheapest cut has fewer smaller chunks
    than that. Where every size divides the next, smaller chunks of that many tokens hold a subset
    that makes one largest chunk.
    """
    largest = tokens[-1]
    if all(b % a == 0 for a, b in pairwise(tokens)):
        return largest
    bound = (largest // math.gcd(*tokens) - 1) * tokens[-2] + 1
    return min(bound, max(_MOST_PLANNED, largest + 1))  # beyond it nearly every chunk is a largest


def default_plan(max_positions: int, *, limited: bool = False) -> BucketPlan:
    """The plan of a model that was given none; shapes compile only when they are first used.

    Four tokens make the ends of prompts cheap, and guesses that are verified in one call.

    Args:
        max_positions: longest text.
        limited: whether the model can go no further.
    """
    capacities, capacity = [], 256
    while capacity < max_positions + 1:
        capacities.append(capacity)
        capacity *= 2
    if limited:
        capacity = max_positions + 1
    return BucketPlan(
        batch=(1, 2, 4, 8, 16), tokens=(4, 16, 64, 256), capacity=[*capacities, capacity]
    )
