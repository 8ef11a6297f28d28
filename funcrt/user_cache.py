"""The user's cache folder, and files that appear as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/funcrt`, by default `~/.cache/funcrt`. It may not exist."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore relative paths.
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "funcrt"


def write_atomically(path: Path, content: str | bytes) -> bool:
    """Write a file that readers see complete or as it was; False where it cannot be written.

    Folders are made within the user's cache only: a bundle's that was removed stays away.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if path.is_relative_to(user_cache()):
            path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(content if isinstance(content, bytes) else content.encode())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        return False
    return True
