"""The committed table of all families, and the list in README.md that is made from it."""

from __future__ import annotations

from pathlib import Path

from funcrt import models
from funcrt.cli.models import COLUMNS, load_rows, merge, summary
from funcrt.models import FAMILIES
from tests.families.cases import case_names, config_of
from tests.rows import Row, Table

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- families: python -m tests.families --readme -->\n", "<!-- /families -->\n"


def model_type_of(case: str) -> str:
    """As its config.json spells it."""
    return str(config_of(case)["model_type"])


def _fixed(case: str) -> Row:
    model_type = model_type_of(case)
    return {"model_type": model_type, "family": FAMILIES[model_type].name}


TABLE = Table(
    path=Path(models.__file__).with_name("table.json"),
    key="case",
    columns=tuple(COLUMNS),
    module="tests.families.row",
    fixed=_fixed,
)


def supported_cases() -> list[str]:
    """The cases whose model type has a family, sorted."""
    return [case for case in case_names() if model_type_of(case) in FAMILIES]


def readme(text: str) -> str:
    """README.md with its list of families made anew. Raises ValueError without its marks."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"README.md: expected {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + families_list() + END + after


def families_list() -> str:
    """A Markdown table of all model types."""
    found = merge(load_rows(), {name: family.name for name, family in FAMILIES.items()})
    lines = ["| `model_type` | file | passes | notes |", "|---|---|---|---|"]
    lines += [
        f"| {one['model_type']} | `models/{one['family']}.py` | {summary(one)} | {one['reason']} |"
        for one in found
    ]
    return "\n".join([*lines, ""])
