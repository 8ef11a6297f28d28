"""Make the table of every module of mlx-lm: what works as a pure function, and why not.

    python -m tests.reference.make_mlx_lm_modules [--check] [NAME ...]

Every module runs in a process of its own, since one of them ends the process when a package is
missing. With names, only their rows are made anew; with --check nothing is written, and the exit
code is 1 if a row differs from the committed one.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

from tests.rows import Table

COLUMNS = ("eager", "compiled", "exported", "ragged_left", "ragged_right", "dtype")


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


_TABLE = Table(
    path=Path(__file__).with_name("mlx_lm_modules.json"),
    key="module",
    columns=COLUMNS,
    module="tests.reference.mlx_lm_checks",
)
make_row, load_table, passed = _TABLE.make_row, _TABLE.load, _TABLE.passed


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--check"]
    check = "--check" in sys.argv
    sys.exit(_TABLE.make_all(names or list_modules(), check=check, prune=not names))


if __name__ == "__main__":
    main()
