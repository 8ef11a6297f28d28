"""Guessing tokens from the text itself, on text that repeats itself, against plain decoding.

    python -m benchmarks.speculation        # part of `make bench`

SmolLM2 continues a passage that it has read three times. The output is the same by construction,
and compared. Writes benchmarks/results/speculation.json.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import sequence
from benchmarks.common import RESULTS, describe_run, measure_bandwidth, note, write_json
from benchmarks.prompts import cut
from benchmarks.subjects import Spec
from benchmarks.team import Team
from benchmarks.weights import make_smollm2

PLAIN, NGRAM = "funcrt-compiled", "funcrt-ngram"
PASSAGE, TIMES, NEW_TOKENS, ROUNDS = 48, 3, 96, 3
PLAN = {"batch": [1], "tokens": [8, 48], "capacity": [256]}
PAIRS = [("decode_tok_s", NGRAM, PLAIN)]


def run() -> dict[str, Any]:
    """Both subjects, with another passage in every round."""
    bandwidth = measure_bandwidth()
    with tempfile.TemporaryDirectory() as scratch:
        note("making the model's folders")
        folders, ids = make_smollm2(Path(scratch))
        passages = cut(ids, [PASSAGE], 1 + ROUNDS)
        warm, *measured = [[passage * TIMES] for (passage,) in passages]
        source = str(folders["packed"])
        specs = {
            PLAIN: Spec("compiled", source, PLAN),
            NGRAM: Spec("compiled", source, PLAN, speculate="ngram"),
        }
        with Team(specs) as team:
            team.warm(warm, NEW_TOKENS)
            case = sequence.run_case(team, measured, NEW_TOKENS, bandwidth, PAIRS)
    # Fewer steps read the weights: bytes a second would say nothing.
    for key in ("gb_s", "share"):
        case["subjects"][NGRAM].pop(key)
    reports = [run["report"] for run in case["runs"][NGRAM]]
    return {
        **describe_run("benchmarks.speculation"),
        "model": "SmolLM2-135M",
        "plan": PLAN,
        "acceptance": [report["acceptance"] for report in reports],
        "steps": [report["steps"] for report in reports],
        "cases": [case],
    }


def main() -> None:
    """Run, print, and keep the result."""
    result = run()
    write_json(RESULTS / "speculation.json", result)
    sequence.show(result)
    print("guesses that were right: " + ", ".join(f"{x:.0%}" for x in result["acceptance"]))


if __name__ == "__main__":
    main()
