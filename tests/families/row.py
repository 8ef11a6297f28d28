"""The row of one case, and what it measured.

python -m tests.families.row CASE
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any

from funcrt.models import FAMILIES
from tests.families.cases import Case
from tests.families.checks import CHECKS
from tests.families.mlx_lm_changes import CHANGES, note
from tests.families.reasons import REASONS


def make_row(name: str, columns: Iterable[str] = tuple(CHECKS)) -> dict[str, Any]:
    """Run the checks of one case, and print what each measured.

    `reason` has a text for every column that is not true, see `REASONS`, and says what was changed
    for mlx-lm's module.
    """
    reasons = []
    with Case(name) as case:
        row: dict[str, Any] = {
            "case": name,
            "model_type": case.model_type,
            "family": FAMILIES[case.model_type].name,
        }
        for column in columns:
            begin = time.perf_counter()
            try:
                result = CHECKS[column](case)
                row[column], said = result.passed, str(result)
            except Exception as error:  # noqa: BLE001
                row[column], said = False, f"{type(error).__name__}: {error}"
                if (name, column) not in REASONS:
                    traceback.print_exc()
            print(f"    {column:<15} {said}  {time.perf_counter() - begin:.1f} s")
            if not row[column]:
                reasons.append(f"{column}: {REASONS.get((name, column), 'fails')}")
            elif column == "mlx_lm" and name in CHANGES:
                reasons.append(f"{column}: {note(CHANGES[name])}")
    return {**row, "reason": "; ".join(reasons)}


def main() -> None:
    print("ROW " + json.dumps(make_row(sys.argv[1])))


if __name__ == "__main__":
    main()
