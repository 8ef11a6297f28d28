"""`certificate.json`: what was measured when a bundle was verified, on which files, and where.

It stands beside the manifest and is not among its `files`, so that every machine can write its own.
It holds for one manifest (which has the hash of every file), one MLX version and one device; for
anything else it is as if it were not there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from funcrt._version import __version__
from funcrt.bundle.format.files import read_small
from funcrt.bundle.format.manifest import CERTIFICATE, Manifest
from funcrt.bundle.format.records import decode, parse_json
from funcrt.bundle.graphs import mlx_version
from funcrt.errors import BundleError
from funcrt.machine import device_name
from funcrt.user_cache import user_cache, write_atomically

FORMAT = "funcrt-certificate"
VERSION = "1.0"  # fields may be added within a major version, which readers pass over


@dataclass(frozen=True)
class Check:
    """One measured number and the largest one that passes.

    Attributes:
        function: key of the function.
        check: what was measured. Of golden calls: "error" (largest difference from the float32
            reference, over the largest logit, or for `prepare` from the exporting process's
            weights); "tokens" (chosen tokens that differ; near ties are noted instead); "lengths"
            (rows whose length differs); "accepted" (rows that accept another number of guesses than
            their tokens do); "history" (rows that count other tokens than they chose); "moved"
            (rows that growing changed). The others are those of `funcrt.bundle.proof.invariances`.
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

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON lacks become null."""
        numbers = {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in asdict(self).items()
        }
        return {**numbers, "passed": self.passed}


@dataclass(frozen=True)
class Certificate:
    """What a verification measured.

    Attributes:
        manifest: sha256 of the bytes of `manifest.json`.
        files: sha256 of every file that it lists.
        target: device class.
        device: name of the device.
        mlx: version of MLX.
        funcrt: version of funcrt.
        date: when it ended, ISO 8601 in UTC.
        seconds: how long it took.
        checks: every check, in the order that they ran in.
        path: where it is kept; None while it is kept nowhere.
    """

    manifest: str
    files: dict[str, str]
    target: str
    device: str
    mlx: str
    funcrt: str
    date: str
    seconds: float
    checks: tuple[Check, ...]
    path: Path | None = None

    @property
    def failed(self) -> list[Check]:
        """The checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """Whether anything was checked, and all of it passed."""
        return bool(self.checks) and not self.failed

    def to_json(self) -> dict[str, Any]:
        """What the file says."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del values["path"]
        head = {"format": FORMAT, "version": VERSION, "passed": self.passed}
        return {**head, **values, "checks": [check.to_json() for check in self.checks]}


def make_certificate(
    manifest: Manifest, digest: str, target: str, checks: Iterable[Check], seconds: float
) -> Certificate:
    """One for what ran here and now; `digest` is that of the manifest, `target` a device class."""
    return Certificate(
        manifest=digest,
        files={name: entry.sha256 for name, entry in manifest.files.items()},
        target=target,
        device=device_name(),
        mlx=mlx_version(),
        funcrt=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        checks=tuple(checks),
    )


def save_certificate(folder: Path, certificate: Certificate, *, spare: bool = False) -> Certificate:
    """Write a certificate into a bundle's folder, or, where that is read-only, the user's cache.

    Args:
        folder: of the bundle.
        certificate: passed or not; one that did not is never taken for one that did.
        spare: leave one in the folder that another device or MLX version has there, so that
            machines that share the folder do not verify it in turns.

    Returns:
        The same with its path, which is None if it could be written to neither.
    """
    paths = [folder / CERTIFICATE, _own_path(certificate)]
    if spare and _holds_elsewhere(paths[0], certificate):
        del paths[0]
    text = json.dumps(certificate.to_json(), indent=2, ensure_ascii=False) + "\n"
    path = next((path for path in paths if write_atomically(path, text)), None)
    return replace(certificate, path=path)


def find_certificate(
    folder: Path, digest: str, device: str | None = None, mlx: str | None = None
) -> Certificate | None:
    """The certificate for a manifest: that in the bundle's folder, else one in the user's cache.

    What cannot be read counts as none. It may say that a check failed: see its `passed`.

    Args:
        folder: of the bundle.
        digest: of its manifest.
        device: name of the device that it must hold for; None takes any.
        mlx: version of MLX that it must hold for; None takes any.
    """
    for path in (folder / CERTIFICATE, *sorted(_cache().glob(f"{digest}-*.json"))):
        found = _load(path)
        if found is None or found.manifest != digest:
            continue
        if device in (None, found.device) and mlx in (None, found.mlx):
            return found
    return None


def load_certificate(path: Path) -> Certificate:
    """Read one, whatever it holds for.

    Raises BundleError if it cannot be read, is of another format, or contradicts itself.
    """
    try:
        text = read_small(path)
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from None
    data = parse_json(text, str(path))
    form, version = data.get("format"), str(data.get("version"))
    if form != FORMAT or version.split(".")[0] != VERSION.split(".")[0]:
        raise BundleError(
            f"{path}: expected format {FORMAT} of version {VERSION}, got {form!r} of {version!r}"
        )
    listed = data.get("checks")
    if not isinstance(listed, list):
        raise BundleError(f"{path}: expected a list of `checks`")
    data["checks"] = [_with_numbers(check) for check in listed]
    certificate: Certificate = decode(Certificate, {**data, "path": None}, str(path))
    checks = tuple(
        replace(check, measured=math.inf) if check.measured == _BEYOND else check
        for check in certificate.checks
    )
    certificate = replace(certificate, checks=checks, path=path)
    if data.get("passed") is not certificate.passed:
        raise BundleError(f"{path} contradicts itself: `passed` is not what its checks say")
    return certificate


_BEYOND = -1.0  # no measured number is negative


def _with_numbers(check: Any) -> Any:
    """A number that JSON lacks was written as null."""
    if isinstance(check, dict) and check.get("measured", 0) is None:
        return {**check, "measured": _BEYOND}
    return check


def _load(path: Path) -> Certificate | None:
    try:
        return load_certificate(path)
    except BundleError:
        return None


def _holds_elsewhere(path: Path, certificate: Certificate) -> bool:
    """Whether the one at `path` is for the same manifest, but another device or MLX version."""
    found = _load(path)
    return (
        found is not None
        and found.manifest == certificate.manifest
        and (found.device, found.mlx) != (certificate.device, certificate.mlx)
    )


def _cache() -> Path:
    return user_cache() / "certificates"


def _own_path(certificate: Certificate) -> Path:
    """Where it is kept if not in the folder: a file of its own for each device and MLX version."""
    place = hashlib.sha256(json.dumps([certificate.device, certificate.mlx]).encode()).hexdigest()
    return _cache() / f"{certificate.manifest}-{place[:16]}.json"
