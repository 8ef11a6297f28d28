"""Make the table of every module of mlx-lm: what works as a pure function, and why not.

    python -m tests.reference.make_mlx_lm_modules [--check] [NAME ...]

Every module runs in a process of its own, since one of them ends the process when a package is
missing. With names, only their rows are made anew; with --check nothing is written, and the exit
code is 1 if a row differs from the committed one.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("mlx_lm_modules.json")
COLUMNS = ("eager", "compiled", "exported", "ragged_left", "ragged_right", "dtype")
SECONDS = 600


def list_modules() -> list[str]:
    """Every module of the installed mlx-lm that has a `Model`, found without importing any."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return sorted(path.stem for path in folder.glob("*.py") if _has_model(path))


def _has_model(path: Path) -> bool:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            return True
        if isinstance(node, ast.ImportFrom) and any(
            (name.asname or name.name) == "Model" for name in node.names
        ):
            return True
    return False


def make_row(name: str) -> dict[str, Any]:
    """Check one module in a process of its own."""
    row: dict[str, Any] = {"module": name, **dict.fromkeys(COLUMNS, False), "reason": ""}
    command = [sys.executable, "-m", "tests.reference.mlx_lm_checks", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {**row, "reason": f"takes more than {SECONDS} seconds"}
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not lines:
        said = (done.stdout + done.stderr).strip().splitlines()
        last = said[-1] if said else ""
        return {**row, "reason": f"ends the process ({done.returncode}): {last}"}
    found = json.loads(lines[-1])
    return {key: found[key] for key in row}


def passed(row: dict[str, Any]) -> bool:
    """Whether every column is true."""
    return all(row[column] for column in COLUMNS)


def load_table() -> list[dict[str, Any]]:
    """The committed table."""
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return rows


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--check"]
    check = "--check" in sys.argv
    wanted = names or list_modules()
    old = {row["module"]: row for row in load_table()} if TABLE.exists() else {}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        rows = {}
        for name, row in zip(wanted, pool.map(make_row, wanted), strict=True):
            rows[name] = row
            marks = "".join("x" if row[column] else "." for column in COLUMNS)
            print(f"{marks} {name} {row['reason']}", flush=True)
    if check:
        differing = [name for name, row in rows.items() if old.get(name) != row]
        print(f"{len(differing)} rows differ: {', '.join(differing)}")
        sys.exit(bool(differing))
    kept = {name: old[name] for name in old if names and name not in rows}
    table = [rows.get(name) or kept[name] for name in sorted({*rows, *kept})]
    text = ",\n".join(json.dumps(row) for row in table)
    TABLE.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    print(f"{sum(map(passed, table))} of {len(table)} modules pass everything")


if __name__ == "__main__":
    main()
