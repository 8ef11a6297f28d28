"""`funcrt plan`: what it reads, what it prints, how it fails."""

from __future__ import annotations

import json
from pathlib import Path

from funcrt.buckets import BucketPlan
from funcrt.cache import CacheLayout
from funcrt.cli.plan import read_trace
from funcrt.errors import InputError
from funcrt.expectation import expect
from funcrt.footprint import Footprint
from tests.commands import run, save_model
from tests.helpers import make_model

import pytest

PAIRS = [(20, 50), (200, 50), (700, 100), (30, 3)]
TRACE = """\
{"prompt_tokens": 20, "completion_tokens": 50}
{"id": "x", "usage": {"prompt_tokens": 200, "completion_tokens": 50, "total_tokens": 250}}

[700, 100]
{"index": 0, "text": "a", "prompt_tokens": 30, "tokens": [1, 2, 3], "finish_reason": "stop"}
{"index": 1, "error": "prompt too long"}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE, "utf-8")
    return path


def test_every_kind_of_line_is_read() -> None:
    requests, failed = read_trace(TRACE.encode().splitlines(keepends=True))
    assert [tuple(request) for request in requests] == PAIRS
    assert failed == 1


def test_a_count_of_its_own_is_preferred() -> None:
    line = (
        b'{"prompt_tokens": 5, "completion_tokens": 2, "tokens": [1], "usage": {}, "error": null}'
    )
    assert read_trace([line]) == ([(5, 2)], 0)
    assert read_trace([b'{"usage": null, "prompt_tokens": 5, "tokens": [1]}']) == ([(5, 1)], 0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x", "line 2: not JSON"),
        ("3", "line 2: expected an object or a pair of numbers, got 3"),
        ("{}", "line 2: expected prompt_tokens and completion_tokens, got nothing"),
        ('{"prompt_tokens": 3}', "line 2: .*got prompt_tokens"),
        ('{"prompt_tokens": null, "completion_tokens": 1}', "line 2: prompt tokens: .*got None"),
        ('{"prompt_tokens": 3, "completion_tokens": "4"}', "line 2: new tokens: .*got '4'"),
        ('{"prompt_tokens": 3, "tokens": []}', "line 2: new tokens: .*got 0"),
        ("[1, 2, 3]", "line 2: expected two numbers"),
        ("[0, 1]", "line 2: prompt tokens: expected an integer >= 1, got 0"),
        ("[1, true]", "line 2: new tokens: .*got True"),
        ("[1e3, 1]", "got 1000.0"),
        ("[NaN, 1]", "got nan"),
        (f"[{10**30}, 1]", "more than any cache holds"),
        ("[" * 100_000, "line 2: not JSON"),
        ("\udcff", "line 2: not JSON"),
    ],
    ids=lambda text: text[:20],
)
def test_bad_lines_are_named(line: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_trace([b"[1, 2]\n", line.encode("utf-8", "surrogateescape")])


def test_many_bad_lines_are_named_by_number() -> None:
    with pytest.raises(InputError, match=r"line 1: .*; also bad: lines 2, 3, 4, 5 and 2 more$"):
        read_trace([*[b"x"] * 7, b"[1, 2]"])
    with pytest.raises(InputError, match="the trace has no request"):
        read_trace([b"\n", b'{"error": "x"}'])


def test_it_prints_options_for_export(trace: Path) -> None:
    done = run("plan", trace)
    plan = BucketPlan.from_trace(PAIRS)
    assert done.returncode == 0, done.stderr
    sizes = [",".join(map(str, sizes)) for sizes in (plan.batch, plan.tokens, plan.capacity)]
    first, *rest = done.stdout.splitlines()
    assert first == "--batch {} --tokens {} --capacity {}".format(*sizes)
    table = "\n".join(rest)
    for words in ("tokens of prompts", "cache slots", "rows of decoding", "1B llama", "--model"):
        assert words in table
    assert done.stderr == "lines that report an error, passed over: 1\n"


def test_a_model_and_a_budget_bound_the_plan(trace: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    model = make_model()
    footprint = Footprint.of(model, model.cache_spec(CacheLayout()))
    options = ("--model", folder, "--json", "--batches", "3", "--capacities", "2")
    done = run("plan", "-", "--memory", "4MB", *options, text=TRACE)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    plan = BucketPlan(**{name: facts[name] for name in ("batch", "tokens", "capacity")})
    assert len(plan.batch) <= 3
    assert len(plan.capacity) == 2
    assert facts["options"].startswith("--batch 1")
    assert facts["failed"] == 1
    # Weights are those of the bundle to be: nothing is kept as stored beside them.
    assert facts["weights"] == footprint.params
    extra = footprint.stored
    found = {(row["batch"], row["capacity"]): row["bytes"] for row in facts["memory"]}
    expected = expect(plan, PAIRS, footprint)
    assert found == {key: size - extra for key, size in expected.memory.items()}
    assert max(found.values()) <= 4_000_000
    assert facts["wasted"]["slots"] == expected.wasted_slots
    assert facts["functions"] == expected.functions


def test_failures_are_one_line_and_usage_is_told_apart(trace: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("[1, 2]\n[1]\n", "utf-8")
    for arguments, says in [
        (("plan", bad), "error: line 2: expected two numbers"),
        (("plan", tmp_path / "absent"), "error: "),
        (("plan", trace, "--memory", "2MB"), "error: one request of 831 tokens needs "),
    ]:
        done = run(*arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.splitlines()[-1].startswith(says)
        assert "Traceback" not in done.stderr
    for arguments in [
        ("plan",),
        ("plan", trace, "--memory", "much"),
        ("plan", trace, "--batches", "0"),
        ("plan", trace, "--kv-bits", "8"),
        ("plan", trace, "--kv-bits", "3"),
    ]:
        assert run(*arguments).returncode == 2
