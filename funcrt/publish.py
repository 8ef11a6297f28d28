"""Replacing a folder as a whole: it is written beside its place and then exchanged with it.

A reader finds the old folder or the new one, never a mixture, whatever kills the writer and when.
A folder being written is locked (`flock`), and the lock dies with its process; so a folder without
a lock is one that nobody will finish, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from funcrt.errors import PublishError

_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class Kind(NamedTuple):
    """What kind of folder is written: its name for people, and how to recognise an older one."""

    name: str
    recognises: Callable[[Path], bool]


@contextlib.contextmanager
def staging(target: Path, kind: Kind) -> Iterator[Path]:
    """A new folder beside `target`, removed on leaving unless `publish` moved it into place.

    Raises PublishError when `target` holds anything of another kind; OSError when its parent
    cannot be written.
    """
    check_target(target, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent):
        _clean_up(target)
        folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        folder.mkdir()
        lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def publish(
    folder: Path, target: Path, kind: Kind, check: Callable[[], None] = lambda: None
) -> None:
    """Make a complete `folder` the one at `target`; what was there takes its name.

    Args:
        folder: from `staging`.
        target: the same as there.
        kind: the same as there.
        check: called while no other writer can publish beside `target`; what it raises stops this.

    Raises PublishError, OSError; the old folder is then still in place.
    """
    _sync_tree(folder)
    with _locked(target.parent):
        check()
        _put(folder, target, kind)
    _sync(target.parent)


def _put(folder: Path, target: Path, kind: Kind) -> None:
    for _ in range(100):  # where there are no locks, another writer may do so at any moment
        check_target(target, kind)
        try:
            if target.exists():
                exchange(folder, target)
            else:
                folder.rename(target)
            break
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
    else:
        raise PublishError(f"{target} is replaced by others again and again; write it again")


def check_target(target: Path, kind: Kind) -> None:
    """Raise PublishError if `target` exists and is neither of this kind nor an empty folder."""
    if not target.exists() and not target.is_symlink():
        return
    if Path.cwd().is_relative_to(target):
        raise PublishError(f"{target} is the folder this runs in: choose another place")
    if target.is_symlink() or not target.is_dir():
        raise PublishError(f"{target} is a file or a link, not a folder: choose another place")
    if any(target.iterdir()) and not kind.recognises(target):
        raise PublishError(f"{target} is not {kind.name} and is not replaced: choose another place")


def exchange(first: Path, second: Path) -> None:
    """Swap two folders of one parent, atomically where the file system can. Raises OSError."""
    try:
        _exchange_atomically(first, second)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        _exchange_by_renames(first, second)


def _exchange_atomically(first: Path, second: Path) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    try:
        if sys.platform == "darwin":
            failed = library.renamex_np(*names, ctypes.c_uint(_EXCHANGE))
        else:
            failed = library.renameat2(
                _AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_EXCHANGE)
            )
    except AttributeError:  # a C library without the call
        raise OSError(errno.ENOSYS, "no atomic exchange") from None
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(second))


def _exchange_by_renames(first: Path, second: Path) -> None:
    """Between the two renames nothing is in place; `_clean_up` undoes a death right there."""
    aside = second.with_name(f".{second.name}.old")
    second.rename(aside)
    try:
        first.rename(second)
    except OSError:
        aside.rename(second)
        raise
    aside.rename(first)


def _clean_up(target: Path) -> None:
    aside = target.with_name(f".{target.name}.old")
    if aside.exists():
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(target)
    for folder in target.parent.iterdir():
        name = folder.name
        if name.startswith(f".{target.name}.") and name.endswith(".tmp") and folder.is_dir():
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep writers from taking each other's new folder for a stale one."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lock(folder: Path) -> int | None:
    """An open handle that holds the folder's lock, or None if another process does."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
