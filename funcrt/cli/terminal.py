"""What the command line shows: progress, tables, streamed text, and the same as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_status = Console(stderr=True, highlight=False)
_output = Console(highlight=False)


@dataclass
class Clock:
    """Seconds that a `timed` block took."""

    seconds: float = 0.0


@contextmanager
def timed(what: str) -> Iterator[Clock]:
    """Measure a block; a spinner shows on a terminal while it runs."""
    clock, begin = Clock(), time.perf_counter()
    with _status.status(f"{escape(what)} ...") if _status.is_terminal else _nothing():
        yield clock
    clock.seconds = time.perf_counter() - begin


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def progress(what: str, in_bytes: bool = False) -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar to report `(done, total, current item)` to; one line where there is no terminal.

    What is counted may be bytes, which also tell the time that is left.
    """
    counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeElapsedColumn())
    if in_bytes:
        counts = (DownloadColumn(), TimeRemainingColumn())
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), *counts,
        TextColumn("{task.fields[item]}"), console=_status, transient=True,
        disable=not _status.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task(escape(what), total=None, item="")
        silent = not _status.is_terminal

        def tick(done: int, total: int | None, item: str) -> None:
            nonlocal silent
            if silent:
                warn(f"{what} ...")
                silent = False
            bar.update(task, completed=done, total=total, item=item)

        yield tick


def is_shown() -> bool:
    """Whether somebody sees a progress bar."""
    return _status.is_terminal


def emit(facts: Mapping[str, Any], as_json: bool, text: str, err: bool = False) -> None:
    """Print facts as one line of JSON, or `text` (to standard error with `err`)."""
    if as_json:
        show(json.dumps(facts, ensure_ascii=False))
    elif err:
        warn(text)
    else:
        show(text)


def show(text: str) -> None:
    """Print text."""
    print(text, flush=True)


def warn(text: str) -> None:
    """Print text to standard error, or nowhere if that is closed."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def size(count: float) -> str:
    """Bytes for people: `98.4 MB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; cells are text, and columns without any name get no header."""
    _output.print(title, markup=False, soft_wrap=True)
    grid = Table(box=rich.box.SIMPLE, show_header=any(columns))
    for i, column in enumerate(columns):
        grid.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*map(escape, row))
    _output.print(grid)


def echo(enabled: bool) -> Callable[[str], None]:
    """A function that shows text as it streams, or swallows it."""

    def show(text: str) -> None:
        if enabled:
            print(text, end="", flush=True)

    return show


def ask(question: str, quiet: bool) -> str:
    """A line from the terminal; empty at its end."""
    try:
        return input("" if quiet else question).strip()
    except EOFError:
        return ""
