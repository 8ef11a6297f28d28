"""Does a step take as long at the end of a long text as at its beginning? Same bucket, one row.

    python -m benchmarks.steps      # part of `make bench`

A random llama of two layers decodes 8,000 tokens through `Engine`. Writes
benchmarks/results/steps.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common import RESULTS, describe_run, write_json
from benchmarks.prompts import draw
from benchmarks.subjects import Spec
from benchmarks.team import Team
from benchmarks.weights import SHAPES

COUNT, EARLY, WINDOW, ROUNDS = 8000, 100, 100, 3
NAME, SOURCE = "funcrt-compiled", "llama-tiny:float32"
PROMPT_TOKENS = 16


def run_case(source: str, vocab_size: int, count: int, rounds: int) -> dict[str, Any]:
    """Decode `count` tokens `rounds` times, and compare the steps around the 100th with the last.

    Args:
        source: of the weights.
        vocab_size: how many ids there are.
        count: steps; the bucket holds all of them.
        rounds: the ratio is the median of so many.
    """
    size = -(-(PROMPT_TOKENS + count + 1) // 256) * 256
    plan = {"batch": [1], "tokens": [PROMPT_TOKENS], "capacity": [size]}
    warm, *measured = draw([PROMPT_TOKENS], 1 + rounds, vocab_size)
    with Team({NAME: Spec("compiled", source, plan, one_thread=True)}) as team:
        team.warm(warm, 4)
        runs = team.alternate(measured, count + 1)[NAME]
    found = [compare(run["token_s"]) for run in runs]
    return {
        "steps": count,
        "capacity": size,
        "traces": runs[-1]["report"]["traces"],
        "rounds": found,
        "ratio": statistics.median(each["ratio"] for each in found),
    }


def compare(seconds: Sequence[float]) -> dict[str, float]:
    """Median times, in ms, of the 100 steps around the 100th and of the last 100; their ratio."""
    early = statistics.median(seconds[EARLY - WINDOW // 2 : EARLY + WINDOW // 2])
    late = statistics.median(seconds[-WINDOW:])
    return {"early_ms": 1000 * early, "late_ms": 1000 * late, "ratio": late / early}


def main() -> None:
    """Run, print, and keep the result."""
    found = run_case(SOURCE, SHAPES["llama-tiny"]["vocab_size"], COUNT, ROUNDS)
    write_json(RESULTS / "steps.json", {**describe_run("benchmarks.steps"), **found})
    print(f"step {COUNT} to step {EARLY}: {found['ratio']:.3f} times as long")


if __name__ == "__main__":
    main()
