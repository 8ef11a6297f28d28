"""Committed tables of what works: rows of marks, each made by a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 600
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A JSON file with one row a line.

    Attributes:
        path: the file.
        key: the column that names a row.
        columns: those that are true or false.
        module: `python -m MODULE NAME` prints a line `ROW {...}` with a row's values, and perhaps
            other lines before it.
        fixed: what a row says besides, before it is made.
    """

    path: Path
    key: str
    columns: tuple[str, ...]
    module: str
    fixed: Callable[[str], Row] = lambda _: {}

    def load(self) -> list[Row]:
        """The committed rows."""
        rows: list[Row] = json.loads(self.path.read_text(encoding="utf-8"))
        return rows

    def save(self, rows: Sequence[Row]) -> None:
        """Write rows, one a line."""
        text = ",\n".join(json.dumps(row) for row in rows)
        self.path.write_text(f"[\n{text}\n]\n", encoding="utf-8")

    def passed(self, row: Row) -> bool:
        """Whether every column is true."""
        return all(row[column] for column in self.columns)

    def make_row(self, name: str) -> Row:
        """Check one row in a process of its own."""
        return self.make(name)[0]

    def make(self, name: str) -> tuple[Row, list[str]]:
        """The row, and the other lines that were printed."""
        row = {self.key: name, **self.fixed(name), **dict.fromkeys(self.columns, False)}
        row["reason"] = ""
        try:
            done = subprocess.run(
                [sys.executable, "-m", self.module, name], capture_output=True, text=True,
                timeout=SECONDS, check=False, cwd=Path(__file__).parents[1],
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {**row, "reason": f"takes more than {SECONDS} seconds"}, []
        lines = done.stdout.splitlines()
        rows = [line[4:] for line in lines if line.startswith("ROW ")]
        said = [line for line in lines if not line.startswith("ROW ")]
        if not rows:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:] or [""]
            reason = f"ends the process ({done.returncode}): {last[0]}"
            return {**row, "reason": reason}, said
        found = json.loads(rows[-1])
        return {key: found[key] for key in row}, said

    def make_all(self, names: Sequence[str], check: bool, prune: bool) -> int:
        """Make rows and write them; print what they measured.

        Args:
            names: of the rows.
            check: write nothing, compare with the committed rows.
            prune: drop committed rows of other names.

        Returns:
            The exit code: 1 if a compared row differs.
        """
        old = {row[self.key]: row for row in self.load()} if self.path.exists() else {}
        rows = dict(self._made(names))
        if check:
            differing = [name for name, row in rows.items() if old.get(name) != row]
            for name in differing:
                changed = {k: v for k, v in rows[name].items() if old.get(name, {}).get(k) != v}
                print(f"{name}: {changed}" if name in old else f"{name}: no committed row")
            print(f"{len(differing)} rows differ: {', '.join(differing)}")
            return int(bool(differing))
        kept = {} if prune else {name: row for name, row in old.items() if name not in rows}
        table = [{**kept, **rows}[name] for name in sorted({*rows, *kept})]
        self.save(table)
        print(f"{sum(map(self.passed, table))} of {len(table)} pass everything")
        return 0

    def _made(self, names: Sequence[str]) -> Iterator[tuple[str, Row]]:
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
            for name, (row, said) in zip(names, pool.map(self.make, names), strict=True):
                marks = "".join("x" if row[column] else "." for column in self.columns)
                print("\n".join([f"{marks} {name} {row['reason']}", *said]), flush=True)
                yield name, row
