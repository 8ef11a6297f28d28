"""Buckets chosen for a sample of requests: arithmetic on lengths, nothing is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, combinations
from numbers import Integral
from typing import Any, NamedTuple

from funcrt.buckets import BucketPlan, choose_overhead
from funcrt.calling import CallForm
from funcrt.errors import CapacityError, InputError
from funcrt.footprint import Footprint, footprint_of

_FINE = 64  # capacities are multiples of it; those below are as large as needed
_GROUPS = 512  # no more multiples than this are looked at
_SMALL = 8  # one size of at most this many tokens, for the ends of prompts and for guesses
_LARGEST_NUMBER = 2**31 - 1
_UNKNOWN = "no model is named, so the caches of a 1B llama in bfloat16 are counted, without weights"


class Request(NamedTuple):
    """Tokens that a request brings, and those that it asks for."""

    prompt: int
    new: int

    @property
    def slots(self) -> int:
        """Slots of a cache that holds both, the scratch slot included."""
        return self.prompt + self.new + 1


class Limits(NamedTuple):
    """How large a plan may get.

    Attributes:
        batches: how many batch sizes.
        chunks: how many sizes of tokens per call.
        capacities: how many capacities.
        batch: the largest batch.
        chunk: the most tokens per call.
    """

    batches: int
    chunks: int
    capacities: int
    batch: int
    chunk: int


def make_plan(
    lengths: Iterable[Sequence[int]],
    memory_budget: int | None,
    source: Footprint | CallForm | None,
    overhead: int | None,
    limits: Limits,
) -> BucketPlan:
    """See `BucketPlan.from_trace`."""
    requests = check_lengths(lengths)
    footprint = footprint_of(source)
    overhead = choose_overhead() if overhead is None else overhead
    for name, number, least in [
        *((f"max {name}", value, 1) for name, value in limits._asdict().items()),
        ("overhead", overhead, 0),
        ("memory budget", 1 if memory_budget is None else memory_budget, 1),
    ]:
        _check_number(name, number, least)
    needs = Counter(request.slots for request in requests)
    capacity = choose_sizes(needs, limits.capacities, partial(_round_up, largest=max(needs)))

    def fits(batch: int, tokens: int) -> bool:
        needed = footprint.total(batch, tokens, capacity[-1])
        return memory_budget is None or needed <= memory_budget

    smallest = min(2, limits.chunk)
    if not fits(1, smallest):
        told = _too_large(footprint, smallest, capacity[-1], memory_budget)
        raise CapacityError(told if source is not None else f"{told} ({_UNKNOWN})")
    chunks = [n for n in _powers(smallest, limits.chunk) if fits(1, n)]
    prompts = Counter(request.prompt for request in requests)
    tokens = choose_chunks(prompts, chunks, limits.chunks, overhead)
    rows = _powers(1, min(limits.batch, len(requests)))
    batch = choose_batches([n for n in rows if fits(n, tokens[-1])], limits.batches)
    return BucketPlan(batch=batch, tokens=tokens, capacity=capacity)


def check_lengths(lengths: Iterable[Sequence[int]]) -> list[Request]:
    """Requests of (prompt tokens, new tokens). Raises InputError naming the first odd one."""
    given: Any = lengths
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
        raise InputError(f"lengths: expected pairs (prompt, new), got {type(given).__name__}")
    requests = [check_pair(f"request {i}", pair) for i, pair in enumerate(given)]
    if not requests:
        raise InputError("lengths: expected at least one pair (prompt, new), got none")
    return requests


def check_pair(where: str, pair: Any) -> Request:
    """One request. Raises InputError that begins with `where`."""
    try:
        prompt, new = pair
    except (TypeError, ValueError):
        raise InputError(
            f"{where}: expected two numbers (prompt tokens, new tokens), got {pair!r}"
        ) from None
    for name, number in [("prompt tokens", prompt), ("new tokens", new)]:
        _check_number(f"{where}: {name}", number, 1)
    if prompt + new >= _LARGEST_NUMBER:
        raise InputError(f"{where}: {prompt} + {new} tokens are more than any cache holds")
    return Request(int(prompt), int(new))


def _check_number(name: str, number: object, least: int) -> None:
    whole = isinstance(number, Integral) and not isinstance(number, bool)
    if not whole or number < least:  # type: ignore[operator]
        raise InputError(f"{name}: expected an integer >= {least}, got {number!r}")


def _too_large(footprint: Footprint, tokens: int, capacity: int, budget: int | None) -> str:
    needed = footprint.total(1, tokens, capacity)
    states = 2 * footprint.state(1, capacity)
    return (
        f"one request of {capacity - 1} tokens needs {needed} bytes ({footprint.weights} of "
        f"weights, {states} of cache states before and after a move), the memory budget is "
        f"{budget}: raise it, or leave the longest requests out"
    )


# --- sizes ---------------------------------------------------------------------------------------


def choose_sizes(
    needs: Mapping[int, int], most: int, round_up: Callable[[int], int]
) -> tuple[int, ...]:
    """The sizes that waste least when every need takes the smallest one that holds it.

    Exact over the sizes that `round_up` gives, by dynamic programming in one dimension; of equally
    good answers the one with fewest sizes.

    Args:
        needs: need -> how often it occurs.
        most: how many sizes there may be.
        round_up: need -> the size made for it; never falls as needs grow.
    """
    groups: Counter[int] = Counter()
    for need, count in needs.items():
        groups[round_up(need)] += count
    sizes = sorted(groups)
    below = [0, *accumulate(groups[size] for size in sizes)]  # needs in the j smallest groups
    best: list[tuple[float, tuple[int, ...]]] = [(0, ()), *[(float("inf"), ())] * len(sizes)]
    for _ in range(min(most, len(sizes))):
        best = [_add_size(best, sizes, below, j) for j in range(len(best))]
    return best[-1][1]


def _add_size(
    best: list[tuple[float, tuple[int, ...]]], sizes: list[int], below: list[int], j: int
) -> tuple[float, tuple[int, ...]]:
    """(what is reserved for the j smallest groups, sizes), with at most one size more."""
    if j == 0:
        return best[0]
    size, count = sizes[j - 1], below[j]
    reserved, i = min((best[i][0] + size * (count - below[i]), i) for i in range(j))
    return (reserved, (*best[i][1], size)) if reserved < best[j][0] else best[j]


def _round_up(need: int, largest: int) -> int:
    if need <= _FINE:
        return need
    step = _FINE
    while largest > step * _GROUPS:
        step *= 2
    return -(-need // step) * step


def choose_chunks(
    prompts: Mapping[int, int], chunks: Sequence[int], most: int, overhead: int
) -> tuple[int, ...]:
    """The cheapest set of tokens per call for these prompts, one of at most 8 tokens among them.

    Args:
        prompts: length -> how often it occurs.
        chunks: powers of two to choose from, ascending.
        most: how many to choose.
        overhead: what a call costs beside its tokens, see `buckets.choose_overhead`.
    """
    largest = chunks[-1]
    rests: Counter[int] = Counter()
    whole = 0  # each choice cuts what is a multiple of the largest alike in all prompts
    for length, count in prompts.items():
        rests[length % largest] += count
        whole += length // largest * count
    rests[largest] += whole
    sets = [
        chosen
        for count in range(1, most + 1)
        for chosen in combinations(chunks, count)
        if chosen[0] <= _SMALL
    ]
    return min(
        sets,
        key=lambda chosen: (
            sum(n * cost_of_cut(chosen, rest, overhead) for rest, n in rests.items()),
            len(chosen),
            chosen[-1],
        ),
    )


def cost_of_cut(chunks: Sequence[int], pending: int, overhead: int) -> int:
    """Cost of the cheapest calls for `pending` tokens, where every chunk divides the next one."""
    *smaller, chunk = chunks
    whole, rest = divmod(pending, chunk)
    cost = whole * (chunk + overhead)
    if not rest:
        return cost
    padded = chunk + overhead
    return cost + (min(padded, cost_of_cut(smaller, rest, overhead)) if smaller else padded)


def choose_batches(fitting: Sequence[int], most: int) -> tuple[int, ...]:
    """Batch sizes out of powers of two: the largest, 1, and what is best as rows become fewer."""
    if len(fitting) <= most:
        return tuple(fitting)
    if most == 1:
        return (fitting[-1],)
    rows = dict.fromkeys(range(2, fitting[-1] + 1), 1)
    return (1, *choose_sizes(rows, most - 1, lambda need: 1 << (need - 1).bit_length()))


def _powers(least: int, most: int) -> list[int]:
    return [least << i for i in range((most // least).bit_length())]
