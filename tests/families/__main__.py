"""Make the table of all families: which checks each tiny checkpoint passes.

    python -m tests.families [--check | --readme] [CASE ...]

Every case runs in a process of its own. With names, only their rows are made anew; with --check
nothing is written, and the exit code is 1 if a row differs from the committed one. --readme only
writes the list in README.md again, from the committed table.
"""

from __future__ import annotations

import sys

from tests.families.table import README, TABLE, readme, supported_cases


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    if unknown := {name for name in sys.argv[1:] if name.startswith("--")} - {
        "--check",
        "--readme",
    }:
        sys.exit(f"unknown options: {', '.join(sorted(unknown))}\n{__doc__}")
    known = supported_cases()
    if wrong := [name for name in names if name not in known]:
        sys.exit(f"no such cases: {', '.join(wrong)}; there are: {', '.join(known)}")
    code = 0
    if "--readme" not in sys.argv:
        check = "--check" in sys.argv
        code = TABLE.make_all(names or known, check=check, prune=not names)
    if "--check" not in sys.argv:
        README.write_text(readme(README.read_text("utf-8")), "utf-8")
    sys.exit(code)


if __name__ == "__main__":
    main()
