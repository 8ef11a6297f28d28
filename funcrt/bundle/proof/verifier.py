"""Verifying a bundle: repeat its golden calls here, change what must not matter, compare.

`python -m funcrt.bundle.proof.verifier BUNDLE` does it in a process of its own, as the export does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from funcrt.bundle.bundle import Bundle
from funcrt.bundle.format import checks as manifests
from funcrt.bundle.format.files import check_files
from funcrt.bundle.format.manifest import GROW, PREPARE
from funcrt.bundle.golden.replay import (
    Observation,
    Place,
    measure_error,
    observe_params,
    places,
    replay,
)
from funcrt.bundle.graphs import mlx_version
from funcrt.bundle.loader import load_bundle
from funcrt.bundle.proof.certificate import (
    Certificate,
    Check,
    find_certificate,
    make_certificate,
    save_certificate,
)
from funcrt.bundle.proof.invariances import check_invariances, count_invariances
from funcrt.errors import BundleError, FuncrtError, SourceError, some_of
from funcrt.machine import device_name
from funcrt.steps import STEPS
from funcrt.storage import load_arrays

import mlx.core as mx

Progress = Callable[[int, int, str], None]
"""Called with how much is done, how much there is, and what comes next or just ended."""

_MOST_LISTED = 8
_EXACT = 2e-5  # allowed where nothing but the order of float32 sums differs


def verify(
    bundle: Bundle | str | Path, progress: Progress | None = None, *, write: bool = True
) -> list[Check]:
    """Run every golden call of a bundle and the invariances, and leave a certificate.

    Three to five checks for each function, one for `prepare`, and those of `invariances`. Float32
    bundles must come within 2e-5 of a float32 reference and choose its tokens. In 16 bits the error
    may be 1.25 times that of the plain eager run, and another token is a near tie if the
    reference's lead is below twice the measured error.

    Args:
        bundle: a folder, or a bundle loaded from one.
        progress: called with every part done.
        write: save `certificate.json`, see `certify`.

    Raises:
        BundleError: a file is damaged, or the golden file is incomplete.
    """
    return list(certify(bundle, progress, write=write).checks)


def certify(
    bundle: Bundle | str | Path, progress: Progress | None = None, *, write: bool = True
) -> Certificate:
    """`verify` that returns what the certificate says, and where it was saved.

    It is saved in the bundle's folder, or, where that is read-only, in the user's cache; not at
    all if the bundle was given other weights than those that it was exported with.
    """
    if not isinstance(bundle, Bundle):
        bundle = load_bundle(bundle)
    certificate = _certify(bundle, progress)
    if write and _is_as_exported(bundle):
        certificate = save_certificate(bundle.folder, certificate)
    return certificate


def ensure_verified(bundle: Bundle, progress: Progress | None = None) -> Certificate:
    """Verify a bundle unless it has passed on this device, with this MLX and these files.

    What passed is remembered as `certify` does; what failed is verified again the next time. A
    bundle that was given other weights is verified with its own, if it has any.

    Raises BundleError naming the checks that failed.
    """
    known = find_certificate(bundle.folder, bundle.digest, device_name(), mlx_version())
    if known is not None and known.passed:
        return known
    if bundle.manifest.params.files and not _is_as_exported(bundle):
        bundle = load_bundle(bundle.folder, expected_digest=bundle.digest)
    certificate = _certify(bundle, progress)
    if _is_as_exported(bundle):
        certificate = save_certificate(bundle.folder, certificate, spare=True)
    if not certificate.passed:
        failed = [
            f"{one.function} {one.check} {one.measured:.3g} (at most {one.allowed:.3g})"
            for one in certificate.failed
        ]
        raise BundleError(
            f"{bundle.folder} does not compute here what was exported: "
            f"{some_of(failed, 4, '; ')}; export it again on this machine"
        )
    return certificate


def _is_as_exported(bundle: Bundle) -> bool:
    """Whether a bundle has the weights that it was exported with, and is still in its folder."""
    manifest, digest = manifests.read_manifest(bundle.folder)
    return digest == bundle.digest and manifest.fingerprint == bundle.manifest.fingerprint


def _certify(bundle: Bundle, progress: Progress | None) -> Certificate:
    begin = time.perf_counter()
    golden = bundle.target.golden
    invariances = count_invariances(bundle.plan, bundle.cache_spec, bundle.functions.present)
    total = 1 + len(list(places(golden))) + invariances
    checks: list[Check] = []
    try:
        check_files(bundle.folder, bundle.manifest, bundle.digest, full=True)
        arrays = load_arrays(bundle.folder / golden.file)
        for done, (item, found) in enumerate(_verify(bundle, arrays), start=1):
            checks += found
            if progress is not None:
                progress(done, total, item)
    except SourceError as error:
        raise BundleError(str(error)) from None
    except KeyError as error:
        raise BundleError(f"{golden.file} has no {error}: export the bundle again") from None
    seconds = time.perf_counter() - begin
    worst = _find_worst(checks)
    return make_certificate(bundle.manifest, bundle.digest, bundle.device, worst, seconds)


def _find_worst(checks: list[Check]) -> list[Check]:
    """One of each function and check: a function may be called more than once."""
    worst: dict[tuple[str, str], Check] = {}
    for check in checks:
        known = worst.setdefault((check.function, check.check), check)
        if known.passed and not check.measured <= known.measured:
            worst[check.function, check.check] = check
    return list(worst.values())


def _verify(bundle: Bundle, arrays: Mapping[str, mx.array]) -> Iterator[tuple[str, list[Check]]]:
    """What was run, and the checks of it."""
    golden, compiled = bundle.target.golden, bundle.compiled()
    yield PREPARE, [_check_params(bundle, arrays)]
    for place, seen in replay(compiled, golden, arrays):
        yield place.key, _check_call(place, seen, arrays)
    allowed = {
        f"{call.function}_{case.bucket(call)}": _allow(call.allowed)
        for case in golden.cases
        for call in case.calls
        if call.function in STEPS
    }
    longest = _find_lengths(bundle.config_values, bundle.max_positions)
    for check in check_invariances(compiled, lambda key: allowed[key], longest):
        yield f"{check.function} {check.check}", [check]


def _allow(allowed: float) -> float:
    """Most that two runs may differ: where rounding is coarse, each from the reference so far."""
    return allowed if allowed <= _EXACT else 2 * allowed


def _find_lengths(config: Mapping[str, Any], longest: int) -> int:
    """The smallest length in a config that positions may be stretched beyond, or `longest`."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            longest = _find_lengths(value, longest)
        elif name.startswith("original_max_position") and isinstance(value, int) and value > 0:
            longest = min(longest, value)
    return longest


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
    parser = argparse.ArgumentParser(
        prog="python -m funcrt.bundle.proof.verifier", description=__doc__
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default device to run on")
    parser.add_argument("--params", action="append", help="weights instead of the bundle's own")
    parser.add_argument("--json", action="store_true", help="one object per line, progress first")
    options = parser.parse_args(arguments)
    if options.device:
        mx.set_default_device(mx.cpu if options.device == "cpu" else mx.gpu)
    try:
        bundle = load_bundle(options.bundle, params=options.params)
        certificate = certify(bundle, _print_progress if options.json else None)
    except FuncrtError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.json:
        path = str(certificate.path) if certificate.path else None
        _print({"checks": [check.to_json() for check in certificate.checks], "certificate": path})
    else:
        for check in certificate.checks:
            verdict = "ok" if check.passed else "FAILED"
            numbers = f"{check.measured:.3g} (at most {check.allowed:.3g})"
            sys.stdout.write(f"{verdict:6} {check.function} {check.check} {numbers} {check.note}\n")
    return 0 if certificate.passed else 1


def _print_progress(done: int, total: int, item: str) -> None:
    _print({"done": done, "total": total, "item": item})


def _print(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
