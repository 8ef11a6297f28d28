"""`funcrt models`: what it lists, from the committed table."""

from __future__ import annotations

import json

from funcrt.cli.models import COLUMNS, load_rows, merge, summary
from funcrt.models import FAMILIES
from tests.commands import run, run_here

import pytest

ONE = {"model_type": "one", "family": "file", **dict.fromkeys(COLUMNS, True), "reason": ""}
ROW = {"case": "one", **ONE}
OTHER = {**ROW, "case": "one-other", "mlx_lm": False, "reason": "mlx_lm: no"}
NOTED = {**ROW, "case": "one-noted", "reason": "mlx_lm: without a window; traces: more"}


def test_json_has_an_object_for_every_model_type() -> None:
    done = run("models", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["model_type"] for one in found] == sorted(FAMILIES)
    assert found == merge(load_rows(), {name: family.name for name, family in FAMILIES.items()})
    for one in found:
        assert list(one) == ["model_type", "family", *COLUMNS, "reason"]
        assert one["family"] == FAMILIES[one["model_type"]].name
        assert all(isinstance(one[column], bool) for column in COLUMNS)
    assert any(one["model_type"] == "mistral" and one["golden"] for one in found)


def test_text_has_a_line_for_every_model_type() -> None:
    done = run_here("models")
    assert done.returncode == 0
    for name in [*FAMILIES, "model_type", "family", "passes", *COLUMNS]:
        assert name in done.stdout


def test_a_model_type_is_true_where_all_of_its_checkpoints_are() -> None:
    (one,) = merge([ROW, OTHER, OTHER], {"one": "file"})
    assert {column for column in COLUMNS if not one[column]} == {"mlx_lm"}
    assert merge([ROW, ROW], {"one": "file"}) == [ONE]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([OTHER], "mlx_lm: no"),
        ([OTHER, OTHER], "mlx_lm: no"),
        ([ROW, OTHER], "mlx_lm (one-other): no"),
        (
            [ROW, NOTED, OTHER, {**OTHER, "case": "one-more"}],
            "mlx_lm (one-noted): without a window; traces (one-noted): more; "
            "mlx_lm (one-other, one-more): no",
        ),
    ],
)
def test_a_note_names_its_checkpoints_unless_it_is_of_all(
    rows: list[dict[str, object]], text: str
) -> None:
    (one,) = merge(rows, {"one": "file"})
    assert one["reason"] == text


def test_notes_of_what_is_true_are_listed() -> None:
    """What was changed before mlx-lm's module could be compared stays visible."""
    note = "without its sliding window, which mlx-lm's module does not know"
    (one,) = [one for one in json.loads(run_here("models", "--json").stdout)
              if one["model_type"] == "mistral"]  # fmt: skip
    assert one["mlx_lm"]
    assert one["reason"] == f"mlx_lm (mistral-window): {note}"
    assert "(mistral-window)" in " ".join(run_here("models").stdout.split())


def test_a_family_without_a_row_is_false_everywhere() -> None:
    assert merge([{**ROW, "model_type": "gone"}], {"new": "file"}) == [
        {"model_type": "new", "family": "file", **dict.fromkeys(COLUMNS, False),
         "reason": "not checked"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ([], "all"),
        (["mlx_lm"], "all but mlx_lm"),
        (["golden", "mlx_lm"], "all but golden, mlx_lm"),
        (["golden", "cached", "compiled", "mlx_lm"], f"{len(COLUMNS) - 4} of {len(COLUMNS)}"),
    ],
)
def test_summary(missing: list[str], text: str) -> None:
    assert summary({**ROW, **dict.fromkeys(missing, False)}) == text
