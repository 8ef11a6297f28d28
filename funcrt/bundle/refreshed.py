"""What became of bundles that were refreshed on this machine, by the digests of their manifests.

Refreshing changes the digest, and whoever loads a bundle by the one that it was exported with
should not have to learn another: the user's cache folder remembers which digest came of which.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from funcrt.errors import BundleError
from funcrt.user_cache import user_cache, write_atomically


def check_expected(folder: Path, digest: str, expected: str | None, *, refreshed: bool) -> None:
    """Raise BundleError unless a manifest's digest is the expected one, if any is.

    `refreshed` also takes that of a bundle which was made here of the expected one.
    """
    if expected is None or digest == expected.lower():
        return
    if not (refreshed and digest in find_refreshed(expected.lower())):
        raise BundleError(
            f"{folder} is not the bundle that was expected: the sha256 of its manifest is "
            f"{digest}, expected {expected}"
        )


def remember_refreshed(before: str, after: str) -> None:
    """Keep that a bundle was made of another; nothing where the cache folder cannot be written."""
    write_atomically(_record(before), json.dumps(sorted({*_read(before), after})))


def find_refreshed(digest: str) -> set[str]:
    """A digest, those of the bundles that were made of it here, and of those, and so on."""
    found, left = set(), [digest]
    while left:
        if (one := left.pop()) not in found:
            found.add(one)
            left += _read(one)
    return found


def _read(digest: str) -> list[str]:
    if not _is_digest(digest):  # of no file
        return []
    try:
        made = json.loads(_record(digest).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return list(filter(_is_digest, made)) if isinstance(made, list) else []


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _record(digest: str) -> Path:
    return user_cache() / "refreshed" / f"{digest}.json"
