"""summary.json, the README's table, a page of tables and the plots, from benchmarks/results alone.

python -m benchmarks.report             # writes them
python -m benchmarks.report --check     # exits with 1 if they are not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.common import RESULTS, dump, note
from benchmarks.goals import GOALS, Result, judge
from benchmarks.subjects import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- measured: python -m benchmarks.report -->\n", "<!-- /measured -->"
# Tables of one sequence and of ragged batches: file, and what is in it.
TABLES = (
    "sequence", "sequence-long", "ragged", "ragged-batches", "speculation", "families",
    "families-llama-1b", "cuda-1b", "cuda-8b", "cuda-8b-4bit", "cuda-1b-4bit", "cuda-context",
    "cuda-context-8b", "cuda-transformers", "cuda-transformers-8b", "cuda-families",
    "cuda-speculation", "cuda-1b-ragged", "cuda-1b-batches", "cuda-8b-ragged", "cuda-8b-ragged-64",
    "cuda-8b-4bit-ragged",
)  # fmt: skip


def read(name: str) -> Result | None:
    """A result by its file's name without `.json`, or None."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return None
    result: Result = json.loads(file.read_text("utf-8"))
    return result


def summarize() -> list[dict[str, Any]]:
    """A row for each goal."""
    return [judge(goal, read(goal.file.removesuffix(".json"))) for goal in GOALS]


# --- tables --------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def goal_table(summary: Sequence[Mapping[str, Any]]) -> str:
    """All goals: ratios are against mlx-lm in the same run unless the goal says otherwise."""
    rows = []
    for row in summary:
        unit = " %" if row["unit"] == "%" else ""
        value = "not run" if row["value"] is None else f"{row['value']:.3g}{unit}"
        rows.append((row["goal"], f"{row['target']}{unit}", value, "yes" if row["met"] else "no"))
    return table(("goal, against mlx-lm in the same run", "target", "measured", "met"), rows)


def sequence_table(case: Mapping[str, Any]) -> str:
    """One sequence, a row for each subject."""
    rows = [
        (
            name,
            f"{1000 * s['first_token_s']:.0f} ms",
            f"{s['decode_tok_s']:.1f}",
            f"{s['ms_step']:.2f}",
            f"{s['gb_s']:.0f} ({100 * s['share']:.0f} %)" if "share" in s else "",
            f"{s['peak_bytes'] / 1e6:.0f} MB",
            str(s.get("primitives", "")),
        )
        for name, s in case["subjects"].items()
    ]
    head = ("", "first token", "tokens/s", "ms/step", "GB/s (share of a copy)", "peak memory",
            "primitives")  # fmt: skip
    return table(head, rows)


def ragged_table(case: Mapping[str, Any]) -> str:
    """Requests that arrive together, a row for each subject."""
    rows = []
    for name, s in case["subjects"].items():
        waste = s["padding"]
        parts = (
            [f"{100 * waste[key]:.0f} %" for key in ("tokens", "rows", "slots")] if waste else []
        )
        first = f"{s['first_token_p50_s']:.2f} / {s['first_token_p95_s']:.2f} s"
        rows.append((name, f"{s['tokens_per_s']:.1f}", first, ", ".join(parts)))
    return table(("", "tokens/s", "first token, p50 / p95", "padding: tokens, rows, slots"), rows)


def cold_table(result: Mapping[str, Any]) -> str:
    """From the start of a process to its first token, a row for each subject."""
    parts = ("first_token_s", "import_s", "load_s", "compute_s")
    rows = [
        (name, *(f"{s[part]:.2f} s" if part in s else "" for part in parts))
        for name, s in result["subjects"].items()
    ]
    return table(("", "first token", "import", "load", "compute"), rows)


def profile_table(result: Mapping[str, Any]) -> str:
    """Where the time of a decode step goes, a row for each model and batch."""
    parts = ("step", "pipelined", "call", "encode", "products", "memory")
    rows = [
        (name, *(f"{found[part]:.2f}" for part in parts), str(found["primitives"]))
        for name, found in result["models"].items()
    ]
    return table(("ms", *parts, "primitives"), rows)


def trace_table(result: Mapping[str, Any]) -> str:
    """What a GPU did while requests were served: the kernels that took longest, and the pauses."""
    parts = {**result["kernels"], **{f"pauses {k}": v for k, v in result["pauses"].items()}}
    rows = [
        (f"`{name}`", str(part["count"]), f"{part['ms']:.0f}", f"{part['ms'] / span:.1%}")
        for name, part in parts.items()
        if (span := result["span_ms"]) and part["ms"] >= 0.005 * span
    ]
    return table(("", "count", "ms", "share"), rows)


def steps_trace_table(result: Mapping[str, Any]) -> str:
    """The kernels of steps, us of a step, a column for each number of tokens that are held."""
    steps, count = list(result["steps"].values()), result["count"]
    found: dict[str, list[float]] = {
        "a step, without the tracer": [each["step_ms"] for each in steps],
        "of which any kernel runs": [each["busy_ms"] / count for each in steps],
    }
    for name in dict.fromkeys(name for each in steps for name in each["kernels"]):
        times = [each["kernels"].get(name, {"ms": 0.0})["ms"] / count for each in steps]
        if max(times) >= 0.005:
            found[f"`{name}`"] = times
    head = ("us a step", *(f"{length} tokens held" for length in result["steps"]))
    return table(
        head, [(name, *(f"{1000 * ms:.0f}" for ms in times)) for name, times in found.items()]
    )


def other_tables() -> Iterator[str]:
    """The tables of results that have no cases."""
    for name, place in (("cold", "CPU"), ("cuda-cold", "H200")):
        if result := read(name):
            yield (
                f"{place}, {result['model']}, start of a process to its first token, kernels warm; "
                f"export of {result['functions']} functions {result['export_s']:.1f} s "
                f"({link(name)}):\n\n{cold_table(result)}"
            )
    for name, place in (("profile", "CPU"), ("cuda-profile", "H200")):
        if result := read(name):
            yield (
                f"{place}, where the time of a decode step goes "
                f"([what each means](../profiling.py); {link(name)}):\n\n"
                f"{profile_table(result)}"
            )
    for name in ("cuda-1b-trace", "cuda-8b-trace"):
        if result := read(name):
            yield (
                f"H200, {result['model']}, ragged requests in a batch of {result['batch']}: "
                f"the GPU is busy for {result['busy_ms']:.0f} of {result['span_ms']:.0f} ms while "
                f"it is traced, and without the tracer they take {result['served_s']:.2f} s "
                f"({link(name)}):\n\n"
                f"{trace_table(result)}"
            )

    if result := read("cuda-steps-trace"):
        yield (
            f"H200, {result['model']}, one row of {result['plan']['capacity'][0]} slots "
            f"({link('cuda-steps-trace')}):\n\n{steps_trace_table(result)}"
        )


def link(name: str) -> str:
    """A result in Markdown."""
    return f"[{name}.json]({name}.json)"


def case_tables() -> Iterator[str]:
    """A title and a table for each case of the results that are shown."""
    for name in TABLES:
        result = read(name)
        for case in result["cases"] if result else ():
            model = case.get("model", result["model"] if result else "")
            if "requests" in case:
                least, most = min(case["prompt_tokens"]), max(case["prompt_tokens"])
                what = f"{case['requests']} requests of {least} to {most} tokens"
                what += f" + {case['new_tokens']} new, batch {case['batch']}"
                body = ragged_table(case)
            else:
                what = f"{case['prompt_tokens']}-token prompt + {case['new_tokens']} new"
                body = sequence_table(case)
            place = "H200" if name.startswith("cuda") else "CPU"
            yield f"{place}, {model}, {what} ({link(name)}):\n\n{body}"


def write_section(summary: Sequence[Mapping[str, Any]], charts: Mapping[str, str]) -> str:
    """What stands between the markers of the README: all goals, and the plots."""
    images = [f"![{name}](benchmarks/results/{name}.svg)\n" for name in charts]
    return "\n".join([goal_table(summary), *images])


def write_page() -> str:
    """The page beside the results: all tables."""
    head = (
        "# Results\n\nMade by `python -m benchmarks.report`; [what each number is](../README.md).\n"
    )
    return "\n".join([head, *case_tables(), *other_tables()])


def replace_section(readme: str, section: str) -> str:
    """The README with another section between the markers. Raises ValueError without them."""
    begin, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return readme[:begin] + section + readme[end:]


# --- plots ---------------------------------------------------------------------------------------


def cases_of(*names: str) -> list[Mapping[str, Any]]:
    """The cases of those results that are there."""
    return [case for name in names for case in (read(name) or {"cases": []})["cases"]]


def lines_of(cases: Sequence[Mapping[str, Any]], x: Any, y: str) -> plots.Series:
    """Subject -> points, of subjects that have more than one."""
    found: dict[str, dict[float, float]] = {}
    for case in cases:
        for name, subject in case["subjects"].items():
            found.setdefault(name, {})[x(case)] = subject[y]
    return {name: list(points.items()) for name, points in found.items() if len(points) > 1}


def draw_charts() -> dict[str, str]:
    """Name -> SVG, of the charts for which there are results."""
    charts: dict[str, str] = {}

    def context(case: Mapping[str, Any]) -> float:
        return float(case["prompt_tokens"] + case["new_tokens"] // 2)

    for place, model, names in (
        ("cpu", "SmolLM2, CPU", ("sequence-long",)),
        ("cuda", "1B bf16, H200", ("cuda-context",)),
    ):
        if lines := lines_of(cases_of(*names), context, "ms_step"):
            charts[f"latency-{place}"] = plots.draw_lines(
                f"Latency against context: {model}", "tokens in the cache", "ms per step", lines
            )
    for place, model, names in (
        ("cpu", "SmolLM2, CPU", ("ragged-batches",)),
        ("cuda", "1B bf16, H200", ("cuda-1b-batches", "cuda-1b-ragged")),
    ):
        if lines := lines_of(cases_of(*names), lambda case: float(case["batch"]), "tokens_per_s"):
            charts[f"throughput-{place}"] = plots.draw_lines(
                f"Throughput against batch: {model}", "rows", "tokens/s, end to end", lines
            )
    for place, title, shown in (
        ("cpu", "CPU", {"SmolLM2": "sequence"}),
        ("cuda", "H200", {"1B bf16": "cuda-1b", "8B bf16": "cuda-8b", "8B 4-bit": "cuda-8b-4bit"}),
    ):
        groups = {
            label: {n: 100 * s["share"] for n, s in cases[0]["subjects"].items() if "share" in s}
            for label, name in shown.items()
            if (cases := cases_of(name))
        }
        if groups:
            charts[f"bandwidth-{place}"] = plots.draw_bars(
                f"Bandwidth of decoding one sequence: {title}",
                "bytes that a step has to read, % of the bandwidth of a copy",
                groups,
            )
    return charts


def make() -> dict[Path, str]:
    """File -> what the results say that it should hold."""
    summary, charts = summarize(), draw_charts()
    files = {RESULTS / "summary.json": dump(summary), RESULTS / "README.md": write_page()}
    files |= {RESULTS / f"{name}.svg": text for name, text in charts.items()}
    readme = README.read_text("utf-8")
    return {**files, README: replace_section(readme, write_section(summary, charts))}


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = [
        file
        for file, text in make().items()
        if not file.exists() or file.read_text("utf-8") != text
    ]
    for file in stale:
        note(f"{'not what the results say: ' if options.check else 'wrote '}{file}")
    if options.check:
        sys.exit(bool(stale))
    for file, text in make().items():
        file.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
