"""`funcrt models`: which model types have a family here, and what is proven for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from funcrt.cli import options as o
from funcrt.cli import terminal

# What every family is checked for on tiny checkpoints, by tests/families.
COLUMNS = {
    "golden": "transformers' logits, for a prompt of 540 tokens",
    "features": "no feature can be left out unnoticed",
    "cached": "prefill and decode equal one uncached call",
    "ragged_left": "rows of a batch are bitwise what they are alone, padded on the left",
    "ragged_right": "the same, padded on the right",
    "chunked": "a prompt in pieces equals the whole one",
    "compiled": "compiled equals eager",
    "exported": "imported by another process equals eager",
    "float16": "float16 from end to end, within its rounding",
    "bfloat16": "the same in bfloat16",
    "four_bit": "every matrix packed in 4 bits",
    "gradients": "gradients equal numeric ones",
    "traces": "one trace for each shape",
    "mlx_lm": "mlx-lm's module gives the same logits, both changed where the notes say so",
    "unknown_config": "settings that nobody implements raise",
}
_TABLE = "table.json"


def models(json_: o.Json = False) -> None:
    """List the model types that have a family here, and which checks each of them passes.

    Other model types go through mlx-lm's modules: `funcrt doctor` says whether one can.
    """
    from funcrt.models import FAMILIES

    found = merge(load_rows(), {name: family.name for name, family in FAMILIES.items()})
    if json_:
        terminal.show(json.dumps(found, ensure_ascii=False))
        return
    title = f"{len(found)} model types; checks: {', '.join(COLUMNS)}"
    rows = [(one["model_type"], one["family"], summary(one), one["reason"]) for one in found]
    terminal.table(title, ("model_type", "family", "passes", "notes"), rows)


def load_rows() -> list[dict[str, Any]]:
    """The committed rows, one for each tiny checkpoint."""
    text = resources.files("funcrt.models").joinpath(_TABLE).read_text("utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def merge(rows: Sequence[Mapping[str, Any]], families: Mapping[str, str]) -> list[dict[str, Any]]:
    """One object for each model type, sorted.

    Args:
        rows: of checkpoints; a column of a model type is true if it is in all of its rows.
        families: model type -> name of its file. One without a row is false in every column.

    A `reason` says why a column is false, or what was changed to make it true; what holds for some
    rows of a model type only names their checkpoints.
    """
    merged = []
    for model_type in sorted(families):
        own = [row for row in rows if row["model_type"] == model_type]
        merged.append(
            {
                "model_type": model_type,
                "family": families[model_type],
                **{column: bool(own) and all(row[column] for row in own) for column in COLUMNS},
                "reason": _merge_reasons(own) if own else "not checked",
            }
        )
    return merged


def _merge_reasons(rows: Sequence[Mapping[str, Any]]) -> str:
    """`column: why; column (case, case): why`."""
    cases: dict[str, list[str]] = {}
    for row in rows:
        for part in filter(None, row["reason"].split("; ")):
            cases.setdefault(part, []).append(row["case"])
    merged = []
    for part, names in cases.items():
        column, _, why = part.partition(": ")
        where = f" ({', '.join(names)})" if len(names) < len(rows) else ""
        merged.append(f"{column}{where}: {why}")
    return "; ".join(merged)


def summary(one: Mapping[str, Any]) -> str:
    """`all`, `all but mlx_lm`, or how many."""
    missing = [column for column in COLUMNS if not one[column]]
    if len(missing) > 3:
        return f"{len(COLUMNS) - len(missing)} of {len(COLUMNS)}"
    return f"all but {', '.join(missing)}" if missing else "all"
