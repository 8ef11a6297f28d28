"""One sequence on the CPU: funcrt against mlx-lm, same weights, alternating, medians.

    python -m benchmarks.cpu            # make bench

Prints the table and writes benchmarks/results/cpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Worker, describe_run, make_folders, note, write_json
from benchmarks.prompts import TEXT, cut

PLAN = {"batch": [1], "tokens": [8, 32], "capacity": [128]}
PROMPT_TOKENS, NEW_TOKENS = 39, 32
PACKED_NEW_TOKENS = 4  # mlx-lm's 4-bit form takes minutes on a CPU
SUBJECTS = {
    "mlx-lm-bfloat16": "dense",
    "mlx-lm-float32-same-blas": "dense",
    "funcrt-compiled": "packed",
    "funcrt-bundle": "bundle.funcrt",
}
GOALS = [
    ("decode", "funcrt-compiled", "mlx-lm-bfloat16", 1.8),
    ("first token", "funcrt-compiled", "mlx-lm-bfloat16", 6.0),
    ("decode", "funcrt-compiled", "mlx-lm-float32-same-blas", None),
    ("first token", "funcrt-compiled", "mlx-lm-float32-same-blas", None),
    ("decode", "funcrt-bundle", "funcrt-compiled", None),
    ("decode", "funcrt-compiled", "mlx-lm-4bit", 20.0),
    ("first token", "funcrt-compiled", "mlx-lm-4bit", None),
]


def run(rounds: int, with_packed: bool) -> dict[str, Any]:
    """Alternate the subjects, with another prompt in every round, and collect every measurement."""
    from funcrt.text import Tokenizer

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SUBJECTS}
    with tempfile.TemporaryDirectory() as scratch:
        folders = make_folders(Path(scratch), PLAN)
        ids = list(Tokenizer.from_folder(folders["dense"]).encode(TEXT))
        warm, *measured = cut(ids, [PROMPT_TOKENS], 1 + rounds)
        workers = {name: Worker(name, folders[SUBJECTS[name]], PLAN) for name in SUBJECTS}
        for name, worker in workers.items():
            note(f"warming up {name}")
            worker.measure(warm, 4)
        for i, prompts in enumerate(measured):
            for name, worker in workers.items():
                runs[name].append(worker.measure(prompts, NEW_TOKENS))
                last = runs[name][-1]
                note(
                    f"round {i + 1} {name}: first token {last['first_token_s'][0]:.2f} s, "
                    f"{last['decode_tok_s']:.1f} tok/s"
                )
        for worker in workers.values():
            worker.close()
        if with_packed:
            note("mlx-lm-4bit, once (minutes)")
            worker = Worker("mlx-lm-4bit", folders["packed"], PLAN)
            runs["mlx-lm-4bit"] = [worker.measure(measured[0], PACKED_NEW_TOKENS)]
            worker.close()
    return summarize(runs)


def summarize(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, ratios against goals, and whether the subjects agree on the text."""
    medians = {
        name: {
            "decode": statistics.median(run["decode_tok_s"] for run in measured),
            "first token": statistics.median(run["first_token_s"][0] for run in measured),
        }
        for name, measured in runs.items()
    }
    ratios = []
    for what, ours, theirs, goal in GOALS:
        if theirs in medians:
            a, b = medians[ours][what], medians[theirs][what]
            ratio = a / b if what == "decode" else b / a
            ratios.append({"what": what, "of": ours, "to": theirs, "ratio": ratio, "goal": goal})
    mine = runs["funcrt-compiled"][0]["tokens"][0]
    return {
        **describe_run("benchmarks.cpu"),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "medians": medians,
        "ratios": ratios,
        "same_ids_as_funcrt": {
            name: measured[0]["tokens"][0] == mine[: len(measured[0]["tokens"][0])]
            for name, measured in runs.items()
        },
        "runs": runs,
    }


def show(result: dict[str, Any]) -> None:
    """Print the two tables."""
    from funcrt.cli import terminal

    terminal.table(
        f"SmolLM2-135M, {PROMPT_TOKENS}-token prompt + {NEW_TOKENS} new, {result['blas']}",
        ("subject", "first token, s", "decode, tok/s"),
        [
            (name, f"{m['first token']:.2f}", f"{m['decode']:.2f}")
            for name, m in result["medians"].items()
        ],
    )
    terminal.table(
        "Ratios (above 1: the first is faster)",
        ("", "ratio", "goal"),
        [
            (f"{r['what']}: {r['of']} to {r['to']}", f"{r['ratio']:.2f}", str(r["goal"] or ""))
            for r in result["ratios"]
        ],
    )


def main() -> None:
    """Run, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-4bit", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.json")
    options = parser.parse_args()
    result = run(options.rounds, not options.skip_4bit)
    write_json(options.out, result)
    show(result)


if __name__ == "__main__":
    main()
