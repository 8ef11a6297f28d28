"""The result file of `funcrt batch`: one line per prompt, in order, complete or not there."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from funcrt.errors import InputError

_SECONDS_TO_SYNC = 1.0  # what a power failure may take; a killed process loses nothing


class Results:
    """Result lines that are there already, and those that follow.

    Every line begins with its number and the hash of what it answers, so a file of other input is
    known by its first line, and a half-written last line by that much of it as there is.

    Attributes:
        kept: how many lines were there.
        failed: how many lines, kept or new, hold an error.
    """

    def __init__(self, file: BinaryIO, name: str, resume: bool) -> None:
        self.kept = 0
        self.failed = 0
        self._file = file
        self._name = name
        self._reading = resume
        self._end = 0
        self._synced = time.monotonic()

    def holds(self, index: int, digest: str) -> bool:
        """Whether the next line is there; from the first one that is not, lines are written.

        Raises InputError for a line that answers something else.
        """
        if not self._reading:
            return False
        line, head = self._file.readline(), _head(index, digest)
        if not line.endswith(b"\n"):
            torn = line.rstrip(b"\0")  # a file system may fill up with zeros after a power failure
            if not (head.startswith(torn) or torn.startswith(head)):
                raise self._foreign(index)
            self._file.seek(self._end)
            self._file.truncate()
            self._reading = False
            return False
        try:
            answered = line.startswith(head) and json.loads(line)
        except ValueError:
            answered = False
        if not answered:
            raise self._foreign(index)
        self.kept += 1
        self.failed += "error" in answered
        self._end += len(line)
        return True

    def add(self, index: int, digest: str, facts: Mapping[str, Any]) -> None:
        """Write the next line."""
        body = {"index": index, "input": digest, **facts}
        try:
            line = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a surrogate pair, from an escape in the input
            line = json.dumps(body).encode()
        self._file.write(line + b"\n")
        self._file.flush()
        self.failed += "error" in facts
        if time.monotonic() - self._synced > _SECONDS_TO_SYNC:
            self.sync()

    def finish(self, count: int) -> None:
        """Check that there are no lines beyond `count`. Raises InputError."""
        if self._reading and self._file.readline():
            raise self._foreign(count)

    def sync(self) -> None:
        """Have everything on disk."""
        if self._file.seekable():
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _foreign(self, index: int) -> InputError:
        return InputError(
            f"{self._name} holds results of other input, options or another model (first at line "
            f"{index + 1}): name another file, or start anew with --overwrite"
        )


@contextmanager
def open_results(path: Path, overwrite: bool) -> Iterator[Results]:
    """Open a result file for one process at a time; `-` is standard output.

    Raises:
        InputError: another process writes to it.
        OSError: it cannot be written.
    """
    if str(path) == "-":
        yield Results(sys.stdout.buffer, "standard output", resume=False)
        return
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe, a device
        with path.open("wb") as pipe:
            yield Results(pipe, str(path), resume=False)
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is writing to {path}: wait for it") from None
        if overwrite:
            file.truncate(0)
        results = Results(file, str(path), resume=True)
        try:
            yield results
        finally:
            results.sync()


def _head(index: int, digest: str) -> bytes:
    return f'{{"index": {index}, "input": "{digest}", '.encode()
