"""Golden logits of every family; the whole checklist of some, as in the committed table."""

from __future__ import annotations

import importlib.util
import json
import re

from funcrt.models import FAMILIES
from tests.families.against_mlx_lm import mlx_lm
from tests.families.cases import Case, case_names
from tests.families.checks import CHECKS
from tests.families.features import EXTRA, IDLE
from tests.families.mlx_lm_changes import CHANGES, Change, note
from tests.families.reasons import REASONS
from tests.families.results import Result, worst
from tests.families.row import make_row
from tests.families.table import BEGIN, README, TABLE, model_type_of, readme, supported_cases

import pytest

# What the families have between them; those that are not written yet are passed over.
SAMPLE = {
    "mistral-window": "sliding windows and rings",
    "gemma2": "windows per layer, norms around, soft caps",
    "gpt_oss": "attention sinks, experts",
    "deepseek_v3": "latent attention, grouped routing",
    "mamba2": "a recurrent state and nothing else",
    "qwen3_next": "gated delta beside full attention",
}
CASES = supported_cases()
ROWS = {row["case"]: row for row in TABLE.load()}
needs_mlx_lm = pytest.mark.skipif(
    importlib.util.find_spec("mlx_lm") is None, reason="rows are made with mlx-lm"
)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str) -> None:
    with Case(name) as case:
        result = CHECKS["golden"](case)
    assert result.passed, str(result)


@needs_mlx_lm
@pytest.mark.parametrize("name", [name for name in SAMPLE if name in CASES])
def test_a_row_is_as_committed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = make_row(name)
    assert row == ROWS[name], capsys.readouterr().out


def test_the_table_has_every_case() -> None:
    assert list(ROWS) == CASES
    for name, row in ROWS.items():
        assert list(row) == ["case", "model_type", "family", *CHECKS, "reason"]
        assert row["model_type"] == model_type_of(name)
        assert row["family"] == FAMILIES[row["model_type"]].name
        assert TABLE.columns == tuple(CHECKS)
        noted = {"mlx_lm"} if name in CHANGES else set()
        said = [column for column in CHECKS if not row[column] or column in noted]
        assert [part.split(": ")[0] for part in row["reason"].split("; ") if part] == said


def test_notes_are_those_of_the_changes() -> None:
    for name, changes in CHANGES.items():
        assert ROWS[name]["reason"] == f"mlx_lm: {note(changes)}"
        assert not re.search("; |: ", note(changes))  # rows and model types are joined by them


def test_what_is_false_has_a_reason_and_reasons_are_of_what_is_false() -> None:
    for name, row in ROWS.items():
        for column in CHECKS:
            assert row[column] == ((name, column) not in REASONS), (name, column)
    assert not {name for name, _ in REASONS} - set(case_names())


def test_exceptions_are_of_cases_that_exist() -> None:
    known = {*case_names(), *map(model_type_of, case_names()), "*"}
    assert not CHANGES.keys() - set(CASES)
    assert not EXTRA.keys() - known
    assert not IDLE.keys() - known


@needs_mlx_lm
def test_a_change_that_is_not_needed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Change("with another text", {"bos_token_id": 3})
    monkeypatch.setitem(CHANGES, "mistral", (idle,))
    with Case("mistral") as case:
        result = mlx_lm(case)
    assert not result.passed
    assert result.note == "needed: with another text"
    monkeypatch.delitem(CHANGES, "mistral-window")
    with Case("mistral-window") as case:
        assert mlx_lm(case).found > 0.1


def test_every_family_has_a_case() -> None:
    """Spellings of one family may share the case of another."""
    files = {FAMILIES[model_type_of(name)].name for name in CASES}
    assert files == {family.name for family in FAMILIES.values()}


def test_readme_lists_the_families() -> None:
    text = README.read_text("utf-8")
    assert readme(text) == text, "run `python -m tests.families --readme`"
    with pytest.raises(ValueError, match=r"README\.md: expected <!-- families"):
        readme(text.replace(BEGIN, ""))


def test_results_pass_within_their_limits_only() -> None:
    assert Result(1.0, 1.0).passed
    assert not Result(1.1, 1.0).passed
    assert not Result(0.9, 1.0, at_least=True).passed
    assert not Result(float("nan"), 1.0).passed
    assert not Result(float("inf"), 1.0, at_least=True).passed
    near, far = Result(0.9, 1.0, "near"), Result(0.0, 0.0, "far")
    assert worst([far, near]) == near
    assert worst([near, Result(1e-9, 0.0, "wrong")]).note == "wrong"
    assert worst([Result(3.0, 2.0, at_least=True), Result(0.0, 2.0, at_least=True)]).found == 0.0
    assert worst([near, Result(float("nan"), 1.0, "nan")]).note == "nan"


@needs_mlx_lm
def test_the_row_is_what_another_process_prints(capsys: pytest.CaptureFixture[str]) -> None:
    row, said = TABLE.make("mistral")
    assert row == ROWS["mistral"]
    assert json.loads(json.dumps(row)) == row
    assert len(said) == len(CHECKS)
