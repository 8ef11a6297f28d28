"""What must not change a row's results, checked in every bucket of `prefill` and `decode_greedy`.

So are those of `prefill_first`, whose text in pieces is one of `prefill`.

| check | what changes | measured | allowed |
|---|---|---|---|
| `neighbours` | other rows hold other texts, or none | what differs | 0 |
| `padding` | side, holes, and the ids that stand there | what differs | 0 |
| `poison` | unused slots, scratch included, hold 1e4 | what differs | 0 |
| `bucket` | batch and capacity: those of the smallest bucket | difference of logits | tolerance |
| `chunking` | the text comes in pieces of the smallest T | difference of logits | tolerance |

What differs are single logits, and arrays of the state in single rows. To be cheap, neighbours,
padding and unused slots change at once; only where anything differs then, one after the other tells
which of them it was. A difference of logits is the largest one over the largest logit, or infinite
where the lengths differ.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from random import Random
from typing import Any

from funcrt.buckets import BucketPlan
from funcrt.bundle.golden.replay import measure_error
from funcrt.bundle.proof.certificate import Check
from funcrt.bundle.proof.scripts import (
    Call,
    Seen,
    choose_capacities,
    cut,
    elsewhere,
    insert_idle,
    list_functions,
    make_script,
    replace_rows,
    run,
)
from funcrt.cache import CacheSpec
from funcrt.compiled import Compiled
from funcrt.steps import STEPS

import mlx.core as mx

_BITWISE = ("neighbours", "padding", "poison")
_MOST_NAMED = 3


def check_invariances(
    compiled: Compiled, allowed: Callable[[str], float], longest: int = 2**31 - 1
) -> Iterator[Check]:
    """Run them all; memory for one cache state is needed at a time.

    Args:
        compiled: the functions of a model or a bundle.
        allowed: largest difference of logits that passes, by key of the function.
        longest: tokens of a text at most. Past the length that `dynamic` and `longrope` positions
            were made for, results depend on where a text is cut, as they should.
    """
    first: list[Seen] = []
    for batch in compiled.plan.batch:
        for capacity in choose_capacities(compiled.plan, compiled.cache_spec):
            bucket = _Bucket(compiled, batch, capacity, longest)
            yield from bucket.check_bitwise()
            yield from bucket.check_chunking(allowed)
            if first:
                yield from bucket.check_bucket(first, allowed)
            first = first or bucket.base


def count_invariances(plan: BucketPlan, spec: CacheSpec, present: Container[str] = STEPS) -> int:
    """How many checks `check_invariances` makes of functions of which so many are `present`."""
    capacities = len(choose_capacities(plan, spec))
    groups = sum(capacities * (5 if batch > 1 else 4) for batch in plan.batch)
    return (groups - 1) * len(list_functions(plan, present))


class _Bucket:
    """The functions of one batch and capacity, and what a script gives in them."""

    def __init__(self, compiled: Compiled, batch: int, capacity: int, longest: int) -> None:
        self._compiled = compiled
        self._capacity = capacity
        self._script = make_script(compiled, batch, longest)
        self._rows = list(range(batch))
        self.base = [seen for _, seen in self._run(self._script)]

    def _run(self, script: Iterable[Call], **changes: Any) -> Iterator[tuple[Call, Seen]]:
        return run(self._compiled, self._capacity, script, **changes)

    # --- bitwise ---------------------------------------------------------------------------------

    def check_bitwise(self) -> Iterator[Check]:
        changes = _BITWISE if len(self._rows) > 1 else _BITWISE[1:]
        together = self._compare(changes)
        found, where = dict.fromkeys(changes, together), ""
        if any(one.count for one in together):
            apart = {change: self._compare([change]) for change in changes}
            where = " (only if all of it changes at once)"
            if any(one.count for group in apart.values() for one in group):
                found, where = apart, ""
        for change, group in found.items():
            for one in group:
                yield one.as_check(change, where)

    def _compare(self, changes: Sequence[str]) -> list[_Differences]:
        """What differs in each function: of every other row, whose neighbours change, by turns."""
        found = [_Differences(seen.key) for seen in self.base]
        for turn in (0, 1):
            rows = self._rows[turn::2]
            if rows:
                results = self._change(changes, turn)
                counted = (seen for call, seen in results if any(call.rows))
                for one, base, seen in zip(found, self.base, counted, strict=True):
                    one.add(base, seen, rows)
        return found

    def _change(self, changes: Sequence[str], turn: int) -> Iterator[tuple[Call, Seen]]:
        vocab, script, options = self._compiled.vocab_size, self._script, {}
        if "neighbours" in changes:
            script = replace_rows(script, turn, vocab)
        if "padding" in changes:
            script, random = list(insert_idle(script)), Random(turn)
            options = {"arrange": elsewhere, "filler": lambda: random.randrange(vocab)}
        return self._run(script, poisoned="poison" in changes, **options)

    # --- but for rounding ------------------------------------------------------------------------

    def check_bucket(
        self, first: Sequence[Seen], allowed: Callable[[str], float]
    ) -> Iterator[Check]:
        for base, other in zip(self.base, first, strict=True):
            yield _measure("bucket", base, other, allowed)

    def check_chunking(self, allowed: Callable[[str], float]) -> Iterator[Check]:
        pieces = [cut(call, self._compiled.plan.tokens[0]) for call in self._script]
        results = self._run([piece for group in pieces for piece in group], hashed=False)
        for base, group in zip(self.base, pieces, strict=True):
            rows: dict[int, mx.array] = {}
            for _ in group:
                call, seen = next(results)
                # A row's logits are those of the last piece that it has.
                rows |= {row: seen.logits[row] for row, text in enumerate(call.rows) if text}
            last = mx.stack([rows[row] for row in self._rows])
            yield _measure("chunking", base, seen._replace(logits=last), allowed)


class _Differences:
    """Counts what differs of the results of one function."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.count = 0
        self._logits = 0
        self._arrays: dict[str, None] = {}

    def add(self, ours: Seen, theirs: Seen, rows: Sequence[int]) -> None:
        """Compare some rows of two calls."""
        chosen = mx.array(list(rows))
        different: Any = mx.sum(ours.logits[chosen] != theirs.logits[chosen]).item()
        arrays = [
            name
            for name, hashes in ours.state.items()
            for row in rows
            if hashes[row] != theirs.state[name][row]
        ]
        self._logits += different
        self.count += different + len(arrays)
        self._arrays |= dict.fromkeys(arrays)

    def as_check(self, check: str, where: str) -> Check:
        named = [f"{self._logits} logits"] if self._logits else []
        named += list(self._arrays)[:_MOST_NAMED]
        named += ["..."] if len(self._arrays) > _MOST_NAMED else []
        note = f"different: {', '.join(named)}{where}" if named else ""
        return Check(self._key, check, float(self.count), 0.0, note=note)


def _measure(check: str, ours: Seen, theirs: Seen, allowed: Callable[[str], float]) -> Check:
    """The largest difference of the rows that both have."""
    rows = min(len(ours.lengths), len(theirs.lengths))
    most = allowed(ours.key)
    if ours.lengths[:rows] != theirs.lengths[:rows]:
        note = f"lengths {ours.lengths[:rows]}, not {theirs.lengths[:rows]}"
        return Check(ours.key, check, float("inf"), most, note=note)
    expected, found = (seen.logits[:rows].astype(mx.float32) for seen in (theirs, ours))
    scale = mx.max(mx.where(expected == -mx.inf, 0, mx.abs(expected)))
    scale = mx.where(scale > 0, scale, 1)
    return Check(ours.key, check, measure_error(found, expected, scale), most)
