"""What the benchmarks compute from their measurements; the measuring itself is no test."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from benchmarks import (
    common,
    endurance,
    graph_files,
    plots,
    ragged,
    report,
    sequence,
    steps,
    tracing,
    weights,
    workers,
)
from benchmarks.goals import GOALS, Goal, judge
from benchmarks.prompts import cut, draw
from benchmarks.subjects import Spec
from benchmarks.team import Team

import pytest


def test_prompts_have_the_lengths_and_begin_differently() -> None:
    rounds = cut(range(100, 160), [3, 40, 7], 5)
    assert [[len(prompt) for prompt in prompts] for prompts in rounds] == [[3, 40, 7]] * 5
    beginnings = {tuple(prompt[:2]) for prompts in rounds for prompt in prompts}
    assert len(beginnings) == 15


def test_prompts_are_pieces_of_the_text_taken_as_a_circle() -> None:
    ids = list(range(30))
    for prompt in (prompt for prompts in cut(ids, [20, 2], 4) for prompt in prompts):
        assert prompt == [(prompt[0] + i) % 30 for i in range(len(prompt))]


@pytest.mark.parametrize(
    ("ids", "lengths", "rounds"),
    [([1, 2] * 20, [4, 4, 4], 1), (range(10), [11], 1), (range(10), [2, 2], 6)],
    ids=["repetitive", "shorter than a prompt", "fewer places than prompts"],
)
def test_a_text_with_too_few_beginnings_is_refused(
    ids: list[int], lengths: list[int], rounds: int
) -> None:
    with pytest.raises(ValueError, match="too few"):
        cut(ids, lengths, rounds)


def test_left_padding_counts_by_hand() -> None:
    # Prefill: rows of 1 and 4 tokens, 4 wide. Decode: 2 + 5, then 3 + 6 of twice the longest,
    # then the second row alone.
    waste = ragged.left_padding([2, 5], [2, 3])
    assert waste["tokens"] == pytest.approx(1 - 5 / 8)
    assert waste["rows"] == 0
    assert waste["slots"] == pytest.approx(1 - (2 + 5 + 3 + 6 + 7) / (10 + 12 + 7))


def test_equal_prompts_have_no_padding() -> None:
    assert ragged.left_padding([4, 4, 4], [3, 3, 3]) == {"tokens": 0, "rows": 0, "slots": 0}


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 12), (95, 23), (96, 24), (100, 24)])
def test_percentiles_are_measured_values(percent: float, expected: int) -> None:
    assert common.percentile(list(range(24, 0, -1)), percent) == expected


def make_run(tokens: list[list[int]], seconds: float) -> common.Run:
    first = [seconds / 2] * len(tokens)
    padding = {"tokens": 0.5, "rows": 0.0, "slots": 0.25}
    report = {"padding": padding, "traces": 2, "steps": 9}
    return {
        "tokens": tokens, "seconds": seconds, "first_token_s": first, "peak_bytes": 7,
        "report": report,
    }  # fmt: skip


def test_ragged_summary() -> None:
    tokens = [[1, 2]] * 8
    ours = [make_run(tokens, s) for s in (4.0, 2.0, 1.0)]
    theirs = [make_run([*tokens[:7], [1, 3]], 8.0)] * 3
    lengths = [3] * 7 + [9]
    mine = ragged.summarize("funcrt-compiled", ours, lengths, 8, ours)
    other = ragged.summarize("mlx-lm-bfloat16", theirs, lengths, 8, ours)
    assert (mine["tokens_per_s"], other["tokens_per_s"]) == (8, 2)
    assert (mine["first_token_p50_s"], mine["first_token_p95_s"]) == (1, 2)
    assert (mine["same_as_solo"], other["same_as_solo"]) == ("24 of 24", "21 of 24")
    assert mine["padding"]["tokens"] == 0.5
    assert other["padding"]["tokens"] > 0.5
    assert (mine["traces"], mine["peak_bytes"]) == (2, 7)


def test_ratios_are_above_one_where_ours_is_better() -> None:
    runs = {
        "ours": [{**make_run([[1, 2]], s), "peak_bytes": 10} for s in (4.0, 2.0, 1.0)],
        "theirs": [{**make_run([[1, 2]], 8.0), "peak_bytes": 5}] * 2,
    }
    faster = common.compare(runs, "tokens_per_s", "ours", "theirs")
    assert faster is not None
    assert (faster["ratio"], faster["by_round"]) == (4, [2, 4])
    sooner = common.compare(runs, "first_token_s", "ours", "theirs", lower_is_better=True)
    assert sooner is not None
    assert (sooner["ratio"], sooner["by_round"]) == (4, [2, 4])
    larger = common.compare(runs, "peak_bytes", "ours", "theirs", lower_is_better=True)
    assert larger is not None
    assert larger["ratio"] == 0.5
    assert common.compare(runs, "tokens_per_s", "ours", "nobody") is None


def test_sequence_summary_counts_the_bytes_that_a_step_reads() -> None:
    run = {**make_run([[1, 2, 3]], 1.5), "decode_tok_s": 2.0}
    facts = {"read_bytes": 900, "cache_bytes": 10, "primitives": 5}
    found = sequence.summarize([run], facts, context=10, bandwidth={"copy": 4e-6})
    assert found["gb_s"] == pytest.approx(2 * (900 + 10 * 10) / 1e9)
    assert found["share"] == pytest.approx(0.5)
    assert (found["ms_step"], found["traces"], found["primitives"]) == (500, 2, 5)


@pytest.mark.parametrize(
    ("times", "rate"),
    [
        ([3.0], None),
        ([3.0, 3.5], 2.0),
        ([3.0, 3.5, 4.0], 2.0),
        ([3.0, 3.1, 3.6, 4.1, 4.1], 2.0),
        ([9.0, 9.0, 9.25, 9.25], 4.0),
    ],
)
def test_decoding_is_timed_without_what_comes_late_or_at_once(
    times: list[float], rate: float | None
) -> None:
    assert workers.decode_rate(times) == (None if rate is None else pytest.approx(rate))


def test_bytes_read_by_a_step() -> None:
    arrays = {"model.embed_tokens.weight": 100, "x.experts.0.up.weight": 40, "norm.weight": 4}
    config = {"num_experts": 8, "num_experts_per_tok": 2}
    assert weights.read_bytes(config, arrays) == 100 + 40 // 4 + 4
    assert weights.read_bytes({}, {**arrays, "lm_head.weight": 100}) == 100 + 40 + 4


def test_bytes_of_cache_count_layers_that_attend() -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
              "hidden_size": 32}  # fmt: skip
    assert weights.cache_bytes(config, 2) == 2 * 3 * 2 * 8 * 2
    types = ["conv", "full_attention", "conv"]
    assert weights.cache_bytes({**config, "layer_types": types}, 2) == 2 * 1 * 2 * 8 * 2


def test_late_steps_are_held_against_early_ones() -> None:
    early, late = [7.0, 8.0, 9.0, 10.0, 40.0], [100.0, 101.5, 103.0]
    assert steps.compare(early, late) == {"early_ms": 1000, "late_ms": 1500, "ratio": 1.5}


def test_steps_take_turns() -> None:
    found = steps.run_here("llama-tiny:float32", 500, 2)
    assert (found["steps"], found["capacity"], found["traces"]) == (500, 768, 2)
    assert len(found["rounds"]) == 2


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [5]), (2, [1, 9]), (3, [1, 5, 9]), (9, list(range(1, 10)))]
)
def test_lengths_are_spread_evenly(count: int, expected: list[int]) -> None:
    assert ragged.spread(range(1, 10), count) == expected


def test_random_prompts_differ_from_round_to_round() -> None:
    rounds = draw([3, 5], 2, 10_000)
    assert [[len(prompt) for prompt in prompts] for prompts in rounds] == [[3, 5]] * 2
    assert len({tuple(prompt) for prompts in rounds for prompt in prompts}) == 4
    assert rounds == draw([3, 5], 2, 10_000)


def test_kept_runs_have_hashes_in_place_of_tokens() -> None:
    (run,) = common.keep({"a": [make_run([[1, 2], [1, 2], [3]], 1.0)]})["a"]
    first, second, third = run["tokens"]
    assert first == second != third


def make_result(value: float, machine: str = "a CPU") -> dict[str, object]:
    return {"machine": machine, "date": "2026-11-30", "ratio": value}


@pytest.mark.parametrize(
    ("value", "at_most", "met"),
    [(1.9, False, False), (2.0, False, True), (2.0, True, True), (2.1, True, False)],
)
def test_goals_are_met_or_missed(value: float, at_most: bool, met: bool) -> None:
    goal = Goal("speed", 2, "x.json", lambda r: r["ratio"], "x", at_most, note="a bound")
    row = judge(goal, make_result(value))
    assert (row["value"], row["met"], row["machine"]) == (value, met, "a CPU")
    assert row.get("note") == (None if met else "a bound")


@pytest.mark.parametrize(
    "result", [None, make_result(3), {**make_result(3, "NVIDIA H200"), "ratio": {}}]
)
def test_goals_that_were_not_measured_are_not_met(result: dict[str, object] | None) -> None:
    goal = Goal("H200, speed", 2, "x.json", lambda r: r["ratio"]["x"], "x")
    row = judge(goal, result)
    assert (row["value"], row["met"], row["note"], row["machine"]) == (None, False, "not run", None)
    row = judge(replace(goal, note="no time"), result)
    assert row["note"] == "not run: no time"


def test_what_is_reported_is_what_the_results_say() -> None:
    stale = [file.name for file, text in report.make().items() if file.read_text("utf-8") != text]
    assert not stale, "run `python -m benchmarks.report` and commit what it writes"


def test_every_goal_is_in_the_summary() -> None:
    rows = report.summarize()
    assert [row["goal"] for row in rows] == [goal.goal for goal in GOALS]
    keys = {"goal", "target", "value", "unit", "machine", "command", "date", "met"}
    assert all(keys <= set(row) for row in rows)


def test_charts_are_drawings() -> None:
    lines = plots.draw_lines("a < b", "x", "y", {"one": [(1, 2.0), (8, 1.0)], "two": [(2, 9.7)]})
    bars = plots.draw_bars("t", "y", {"g": {"one": 3.0, "two": 104.0}, "h": {"two": 20.0}})
    for chart, marks in ((lines, "circle"), (bars, "rect")):
        root = ElementTree.fromstring(chart)
        found = root.findall(f"{{http://www.w3.org/2000/svg}}{marks}")
        assert len(found) == (3 if marks == "circle" else 3 + 2 + 1)  # bars, keys, background


def test_subjects_take_turns_and_one_that_fails_drops_out() -> None:
    plan = {"batch": [2], "tokens": [4], "capacity": [16]}
    specs = {"ours": Spec("compiled", "llama-tiny:float32", plan), "odd": Spec("nothing", "")}
    with Team(specs) as team:
        runs = team.alternate([[[1, 2, 3], [4]], [[5], [6, 7]]], 3)
    assert team.left_out == {"odd": "its process ended with exit code 1"}
    assert list(runs) == ["ours"]
    assert [[len(row) for row in run["tokens"]] for run in runs["ours"]] == [[3, 3]] * 2
    assert runs["ours"][-1]["report"]["traces"] <= 2
    assert team.facts["ours"]["primitives"] > 100


def make_facts(**changes: object) -> endurance.Facts:
    samples = [{"count": 10 * i, "traces": 2, "arrays": 1000, "process": 5000} for i in range(1, 5)]
    facts = {"asked": [3, 3], "given": [3, 3], "medians_s": [1.0, 9.0, 1.05], "samples": samples,
             "ran": ["decode_b1_t1_s8", "prefill_b1_t4_s8"]}  # fmt: skip
    return {**facts, **changes}


def failing(part: str, facts: endurance.Facts) -> list[str]:
    return [claim.what for claim in endurance.check_part(part, facts) if not claim.holds]


@pytest.mark.parametrize("part", endurance.PARTS)
def test_a_steady_engine_passes(part: str) -> None:
    assert failing(part, make_facts()) == []


def test_each_claim_can_fail() -> None:
    def grown(name: str, by: int, **changes: object) -> endurance.Facts:
        samples = make_facts()["samples"]
        samples[-1][name] += by
        return make_facts(samples=samples, **changes)

    more = endurance.MIB * (endurance.GROWTH_OF_PROCESS + 1)
    assert failing("tiny", make_facts(given=[3, 2])) == ["requests with too few tokens"]
    assert [what[:6] for what in failing("tiny", grown("traces", 1))] == ["traces", "traces"]
    assert failing("tiny", grown("arrays", more)) == ["growth of arrays, MiB"]
    assert failing("tiny", grown("process", more)) == ["growth of process, MiB"]
    assert failing("tiny", make_facts(medians_s=[1.0, 1.2])) == [endurance.TIME]
    full = {"medians_s": None, "peak": 3, "budget": 2}
    assert failing("requests", make_facts(**full)) == ["arrays at their peak, MiB"]


@pytest.mark.parametrize(
    ("values", "steady", "growth"),
    [
        ([5, 4, 9, 6], True, 4),
        ([5, 4, 3], True, -1),
        ([1, 5, 5, 9, 5, 5], False, 0),
        ([1, 2, 3, 4, 5, 6], False, 3),
    ],
)
def test_growth(values: list[float], steady: bool, growth: float) -> None:
    assert endurance.measure_growth(values, steady) == growth


@pytest.mark.parametrize(
    ("slow", "odd", "earlier"),
    [(0, False, 0), (1, False, 1), (9, False, 2), (9, True, 0)],
    ids=["well", "well at last", "never", "not for time alone"],
)
def test_parts_run_again_for_time_alone(
    monkeypatch: pytest.MonkeyPatch, slow: int, odd: bool, earlier: int
) -> None:
    medians = iter([[1.0, 2.0]] * slow + [[1.0, 1.0]])
    given = [3, 2] if odd else [3, 3]
    monkeypatch.setattr(
        endurance, "start_part", lambda _: make_facts(medians_s=next(medians), given=given)
    )
    facts = endurance.run_part("tiny", attempts=3)
    assert facts["earlier_medians_s"] == [[1.0, 2.0]] * earlier


def test_graph_files_are_grouped_by_function() -> None:
    keys = ["top_b1_t1_s0", "prefill_b1_t4_s8", "prefill_block_b1_t4_s8", "prefill_b2_t4_s8"]
    apart, together = (graph_files.group(form, keys) for form in graph_files.FORMS)
    assert apart == {f"{key}.mlxfn": [key] for key in keys}
    assert together == {
        "top.mlxfn": keys[:1], "prefill.mlxfn": [keys[1], keys[3]],
        "prefill_block.mlxfn": [keys[2]],
    }  # fmt: skip


def test_medians_keep_the_structure() -> None:
    runs = [{"a": n, "b": {"c": 10 * n}} for n in (3, 1, 2)]
    assert graph_files.summarize(runs) == {"a": 2, "b": {"c": 20}}


def test_a_trace_is_added_up_by_hand() -> None:
    events = [
        tracing.Event("void multiply<float, 3>(int, float*)", 100, 130),
        tracing.Event("copy", 120, 140),  # beside it
        tracing.Event("void multiply<float, 3>(int, float*)", 143, 150),
        tracing.Event("add", 1150, 1151),
    ]
    found = tracing.summarize_events(events)
    assert found["span_ms"] == pytest.approx(1.051)
    assert found["busy_ms"] == pytest.approx(0.048)
    assert found["pauses"] == {
        "below 2000 us": {"count": 1, "ms": pytest.approx(1.0)},
        "below 5 us": {"count": 1, "ms": pytest.approx(0.003)},
    }
    assert found["between"] == {"multiply<float, 3> -> add": {"count": 1, "ms": pytest.approx(1.0)}}
    assert list(found["kernels"]) == ["multiply<float, 3>", "copy", "add"]
    assert found["kernels"]["multiply<float, 3>"] == {"count": 2, "ms": pytest.approx(0.037)}
    shown = {**found, "model": "m", "batch": 2, "served_s": 1}
    assert "| `pauses below 2000 us` | 1 | 1 | 95.1% |" in report.trace_table(shown)


def test_a_trace_of_nothing() -> None:
    found = tracing.summarize_events([])
    assert (found["span_ms"], found["busy_ms"], found["events"]) == (0, 0, 0)
    assert report.trace_table({**found}).count("\n") == 2


def test_calls_are_timed_from_one_report_to_the_next() -> None:
    calls = [("prefill", 1.0), ("decode", 1.002), ("decode", 1.005), ("decode", 1.015)]
    found = tracing.summarize_calls(calls)
    assert list(found) == ["decode"]
    assert found["decode"] == {
        "count": 3, "ms": pytest.approx(3.0), "ms_in_all": pytest.approx(15.0)
    }  # fmt: skip
