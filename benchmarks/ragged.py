"""Ragged requests at once on the CPU: funcrt against mlx-lm's batches, same weights.

    python -m benchmarks.ragged             # part of `make bench`: 8 requests
    python -m benchmarks.ragged --batches   # 1 to 8 requests, for throughput against batch

Prints the tables and writes benchmarks/results/ragged.json (ragged-batches.json).
`run_case` serves `benchmarks.cuda`, too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    RESULTS,
    Run,
    compare,
    describe_run,
    keep,
    note,
    percentile,
    rate,
    write_json,
)
from benchmarks.prompts import cut
from benchmarks.sequence import show_ratios
from benchmarks.subjects import Prompts, Spec
from benchmarks.team import Team
from benchmarks.weights import make_smollm2

PLAN = {"batch": [1, 2, 8], "tokens": [8, 16, 48], "capacity": [64]}
Plan = dict[str, list[int]]
PROMPT_TOKENS = (3, 5, 8, 12, 18, 26, 36, 48)
BATCHES = (1, 2, 4, 8)
NEW_TOKENS, ROUNDS = 16, 3
OURS, SOLO = "funcrt-compiled", "funcrt-solo"
BFLOAT16, FLOAT32 = "mlx-lm-bfloat16", "mlx-lm-float32-same-blas"
PAIRS = [(OURS, BFLOAT16), (OURS, FLOAT32), ("funcrt-bundle", FLOAT32),
         ("funcrt-bundle", OURS), (OURS, SOLO)]  # fmt: skip


def run_case(
    team: Team,
    rounds: Sequence[Prompts],
    new_tokens: int,
    batch: int,
    pairs: Sequence[tuple[str, str]],
    solo: str | None = None,
) -> dict[str, Any]:
    """Measure requests that arrive together, on subjects that are warm.

    Args:
        team: the subjects.
        rounds: prompts, of the same lengths in every round.
        new_tokens: that each gets.
        batch: rows that are decoded together.
        pairs: (ours, theirs) to compare.
        solo: the subject that runs them one at a time, with whose tokens all others are compared.
    """
    runs = team.alternate(rounds, new_tokens)
    lengths = [len(prompt) for prompt in rounds[0]]
    found = (compare(runs, "tokens_per_s", ours, theirs) for ours, theirs in pairs)
    return {
        "requests": len(lengths),
        "prompt_tokens": lengths,
        "new_tokens": new_tokens,
        "batch": batch,
        "subjects": {
            name: summarize(name, measured, lengths, batch, runs.get(solo or ""))
            for name, measured in runs.items()
        },
        "left_out": dict(team.left_out),
        "ratios": [ratio for ratio in found if ratio is not None],
        "runs": keep(runs),
    }


def summarize(
    name: str,
    runs: Sequence[Run],
    lengths: Sequence[int],
    batch: int,
    solo: Sequence[Run] | None,
) -> dict[str, Any]:
    """Medians over the rounds of one subject."""
    first = [seconds for run in runs for seconds in run["first_token_s"]]
    found = {
        "tokens_per_s": statistics.median(map(rate, runs)),
        "first_token_p50_s": percentile(first, 50),
        "first_token_p95_s": percentile(first, 95),
        "padding": padding(name, runs[0], lengths, batch),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }
    if "traces" in runs[-1]["report"]:
        found |= {key: runs[-1]["report"][key] for key in ("traces", "steps")}
    if solo is not None:
        requests = sum(len(run["tokens"]) for run in runs)
        found["same_as_solo"] = f"{agreeing(runs, solo)} of {requests}"
    return found


def left_padding(prompts: Sequence[int], new: Sequence[int]) -> dict[str, float]:
    """Shares of padding in one batch of prompts that are padded to the longest.

    All prompt tokens but the last go in one call as wide as the longest; then every row that has
    not ended takes one token a step, over as many cached tokens as the longest row has.

    Args:
        prompts: tokens of each prompt.
        new: tokens that each got.

    Returns:
        What `funcrt.engine.Stats` calls `token_waste`, `row_waste` and `slot_waste`.
    """
    cached = [n - 1 for n in prompts]
    slots = real = 0
    for step in range(1, max(new) + 1):
        rows = [length + step for length, count in zip(cached, new, strict=True) if step <= count]
        slots += len(rows) * (max(cached) + step)
        real += sum(rows)
    tokens = sum(cached) / (len(cached) * max(cached))
    return {"tokens": 1 - tokens, "rows": 0.0, "slots": 1 - real / slots}


def padding(name: str, run: Run, lengths: Sequence[int], batch: int) -> dict[str, float] | None:
    """Shares of padding: as funcrt counts them, or as left padding implies them.

    mlx-lm's is known only where it takes all prompts in one call, up to 8 of them.
    """
    if name.startswith("mlx-lm"):
        one_call = len(lengths) <= min(8, batch)
        return left_padding(lengths, [len(t) for t in run["tokens"]]) if one_call else None
    waste: dict[str, float] | None = run["report"].get("padding")
    return waste


def agreeing(runs: Sequence[Run], solo: Sequence[Run]) -> int:
    """How many requests got the tokens that they get alone."""
    pairs = zip(runs, solo)  # noqa: B905 (one may have dropped out)
    return sum(a == b for ours, alone in pairs for a, b in zip(ours["tokens"], alone["tokens"]))  # noqa: B905


def make_specs(folders: Mapping[str, Path], plan: Plan) -> dict[str, Spec]:
    """The subjects that read SmolLM2."""
    dense, packed = str(folders["dense"]), str(folders["packed"])
    return {
        BFLOAT16: Spec("mlx-lm-batch", dense, dtype="bfloat16"),
        FLOAT32: Spec("mlx-lm-batch", dense, dtype="float32", same_blas=True),
        OURS: Spec("compiled", packed, plan),
        "funcrt-bundle": Spec("bundle", str(folders["bundle"])),
        SOLO: Spec("compiled", packed, {**plan, "batch": [1]}),
    }


def run(
    batches: Sequence[int], names: Sequence[str] | None = None, plan: Plan = PLAN
) -> dict[str, Any]:
    """A case for each of `batches`, with other prompts in every round.

    Args:
        batches: how many of the requests arrive together.
        names: of the subjects; None is all of them.
        plan: the declared buckets.
    """
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        note("making the model's folders and the bundle")
        folders, ids = make_smollm2(Path(scratch), plan)
        # Two rounds first: the second one meets every bucket that the first one led to.
        each = 2 + ROUNDS
        prompts = cut(ids, PROMPT_TOKENS, each * len(batches))
        specs = make_specs(folders, plan)
        with Team({name: specs[name] for name in names or specs}) as team:
            for i, batch in enumerate(batches):
                places = spread(range(len(PROMPT_TOKENS)), batch)
                mine = prompts[each * i : each * (i + 1)]
                rounds = [[row[place] for place in places] for row in mine]
                for warm in rounds[:2]:
                    team.warm(warm, NEW_TOKENS, slow={BFLOAT16: (len(warm), 1)})
                cases.append(run_case(team, rounds[2:], NEW_TOKENS, batch, PAIRS, solo=SOLO))
    return {
        **describe_run("benchmarks.ragged"),
        "model": "SmolLM2-135M",
        "plan": plan,
        "cases": cases,
    }


def spread(values: Sequence[int], count: int) -> list[int]:
    """`count` of the `values`, evenly from the first to the last; one is that in the middle."""
    if count == 1:
        return [values[len(values) // 2]]
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def show(result: Mapping[str, Any]) -> None:
    """Print the tables."""
    from funcrt.cli import terminal

    for case in result["cases"]:
        shortest, longest = min(case["prompt_tokens"]), max(case["prompt_tokens"])
        terminal.table(
            f"{result['model']}, {case['requests']} prompts of {shortest} to {longest} tokens + "
            f"{case['new_tokens']} new, batch {case['batch']}, {result['machine']}",
            ("subject", "tokens/s", "first token p50 / p95, s", "padding: tokens, rows, slots",
             "peak", "as alone"),
            [
                (
                    name,
                    f"{s['tokens_per_s']:.2f}",
                    f"{s['first_token_p50_s']:.2f} / {s['first_token_p95_s']:.2f}",
                    " / ".join(
                        f"{100 * s['padding'][k]:.0f} %" for k in ("tokens", "rows", "slots")
                    ) if s["padding"] else "",
                    f"{s['peak_bytes'] / 1e6:.0f} MB",
                    s.get("same_as_solo", ""),
                )
                for name, s in case["subjects"].items()
            ],
        )  # fmt: skip
        show_ratios(case["ratios"])


def main() -> None:
    """Run, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", action="store_true", help="1 to 8 requests")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.batches:
        plan = {**PLAN, "batch": list(BATCHES)}
        result = run(BATCHES, [FLOAT32, OURS, "funcrt-bundle"], plan)
    else:
        result = run([len(PROMPT_TOKENS)])
    name = "ragged-batches.json" if options.batches else "ragged.json"
    write_json(options.out or RESULTS / name, result)
    show(result)


if __name__ == "__main__":
    main()
