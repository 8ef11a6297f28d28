"""Verifying a bundle: repeat its golden calls here and compare with what was recorded.

`python -m funcrt.bundle.verifier BUNDLE` does it in a process of its own; the export uses that.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from funcrt.bundle.bundle import Bundle
from funcrt.bundle.files import check_hash, hash_file
from funcrt.bundle.loader import load_bundle
from funcrt.bundle.manifest import GROW, PREPARE
from funcrt.bundle.replay import Observation, Place, measure_error, observe_params, places, replay
from funcrt.errors import BundleError, FuncrtError, SourceError
from funcrt.storage import load_arrays

import mlx.core as mx

Progress = Callable[[int, int, str], None]
"""Called with how much is done, how much there is, and what comes next or just ended."""

_MOST_LISTED = 8


@dataclass(frozen=True)
class Check:
    """One measured number and the largest one that passes.

    Attributes:
        function: key of the function.
        check: "error" (largest difference from the float32 reference, over the largest logit, or
            for `prepare` from the exporting process's weights); "tokens" (chosen tokens that
            differ; near ties are noted instead); "lengths" (rows whose length differs); "accepted"
            (rows that accept another number of guesses than their tokens do); "history" (rows that
            count other tokens than they chose); "moved" (rows that growing changed).
        measured, allowed: the two numbers.
        eager: for "error", the same distance from the eager run that the export recorded.
        note: what else a person should know.
    """

    function: str
    check: str
    measured: float
    allowed: float
    eager: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the number is small enough."""
        return self.measured <= self.allowed


def verify(bundle: Bundle | str | Path, progress: Progress | None = None) -> list[Check]:
    """Run every golden call of a bundle: three to five checks per function, one for `prepare`.

    Float32 bundles must come within 2e-5 of a float32 reference and choose its tokens. In 16 bits
    the error may be 1.25 times that of the plain eager run, and another token is a near tie if the
    reference's lead is below twice the measured error.

    Raises:
        BundleError: the bundle cannot be loaded, or its golden file is incomplete.
    """
    if not isinstance(bundle, Bundle):
        bundle = load_bundle(bundle)
    golden = bundle.target.golden
    try:
        path = bundle.folder / golden.file
        check_hash(bundle.folder, golden.file, hash_file(path), bundle.manifest)
        arrays = load_arrays(path)
        return _verify(bundle, arrays, progress or (lambda done, total, item: None))
    except SourceError as error:
        raise BundleError(str(error)) from None
    except KeyError as error:
        raise BundleError(f"{golden.file} has no {error}: export the bundle again") from None


def _verify(bundle: Bundle, arrays: Mapping[str, mx.array], progress: Progress) -> list[Check]:
    golden = bundle.target.golden
    total = 1 + len(list(places(golden)))
    checks = [_check_params(bundle, arrays)]
    progress(1, total, PREPARE)
    for done, (place, seen) in enumerate(replay(bundle.compiled(), golden, arrays), start=2):
        checks += _check_call(place, seen, arrays)
        progress(done, total, place.key)
    return checks


def _check_params(bundle: Bundle, arrays: Mapping[str, mx.array]) -> Check:
    seen = observe_params(bundle.prepared, arrays["prepare.probes"])
    error = measure_error(seen, arrays["prepare.reference"], arrays["prepare.scale"])
    return Check(PREPARE, "error", error, bundle.target.golden.params_allowed, eager=error)


def _check_call(place: Place, seen: Observation, arrays: Mapping[str, mx.array]) -> list[Check]:
    call, key = place.call, place.key
    strange = [Check(key, name, _count(rows), 0) for name, rows in seen.strange.items()]
    if call.function == GROW:
        return strange
    recorded = {
        name: arrays[place.prefix + name]
        for name in ("reference", "eager", "expected_tokens", "gaps", "expected_lengths")
    }
    error = measure_error(seen.values, recorded["reference"], call.scale)
    eager = measure_error(seen.values, recorded["eager"], call.scale)
    expected = recorded["expected_tokens"]
    differs = mx.not_equal(seen.tokens, expected) & (expected >= 0)
    close = recorded["gaps"] < 2 * error * call.scale
    lengths = mx.not_equal(seen.lengths, recorded["expected_lengths"] + seen.accepted)
    return [
        Check(key, "error", error, call.allowed, eager),
        Check(key, "tokens", _count(differs & ~close), 0, note=_list_ties(differs & close)),
        Check(key, "lengths", _count(lengths), 0),
        *strange,
    ]


def _count(rows: mx.array) -> float:
    return float(sum(_flags(rows)))


def _list_ties(rows: mx.array) -> str:
    ties = [row for row, tied in enumerate(_flags(rows)) if tied]
    if not ties:
        return ""
    listed = ", ".join(map(str, ties[:_MOST_LISTED]))
    return f"near ties in rows {listed}{' ...' if len(ties) > _MOST_LISTED else ''}"


def _flags(rows: mx.array) -> list[bool]:
    flags: Any = rows.tolist()
    return list(flags)


# --- a process of its own ------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Verify the bundle named on the command line; 0 if every check passed."""
    parser = argparse.ArgumentParser(prog="python -m funcrt.bundle.verifier", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default device to run on")
    parser.add_argument("--params", action="append", help="weights instead of the bundle's own")
    parser.add_argument("--json", action="store_true", help="one object per line, progress first")
    options = parser.parse_args(arguments)
    if options.device:
        mx.set_default_device(mx.cpu if options.device == "cpu" else mx.gpu)
    try:
        bundle = load_bundle(options.bundle, params=options.params)
        checks = verify(bundle, _print_progress if options.json else None)
    except FuncrtError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.json:
        _print({"checks": [to_json(check) for check in checks]})
    else:
        for check in checks:
            verdict = "ok" if check.passed else "FAILED"
            numbers = f"{check.measured:.3g} (at most {check.allowed:.3g})"
            sys.stdout.write(f"{verdict:6} {check.function} {check.check} {numbers} {check.note}\n")
    return 0 if all(check.passed for check in checks) else 1


def to_json(check: Check) -> dict[str, object]:
    """JSON form of a check; numbers that JSON lacks become null."""
    numbers = {
        name: value if not isinstance(value, float) or math.isfinite(value) else None
        for name, value in asdict(check).items()
    }
    return {**numbers, "passed": check.passed}


def _print_progress(done: int, total: int, item: str) -> None:
    _print({"done": done, "total": total, "item": item})


def _print(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
