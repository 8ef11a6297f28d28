"""Eight ragged requests at once on the CPU: funcrt against mlx-lm's batches, same weights.

    python -m benchmarks.batching       # part of `make bench`

Prints the tables and writes benchmarks/results/batching.json. benchmarks/README.md says what each
number means.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Worker, describe_run, make_folders, note, write_json
from benchmarks.prompts import TEXT, cut

PLAN = {"batch": [1, 2, 8], "tokens": [8, 16, 48], "capacity": [64]}
SOLO_PLAN = {**PLAN, "batch": [1]}
PROMPT_TOKENS = (3, 5, 8, 12, 18, 26, 36, 48)
NEW_TOKENS = 16
WARM_ROUNDS = 2  # the second one meets every bucket that the first one led to

SUBJECTS = {
    "mlx-lm-bfloat16-batch": "dense",
    "mlx-lm-float32-same-blas-batch": "dense",
    "funcrt-compiled": "packed",
    "funcrt-bundle": "bundle.funcrt",
    "funcrt-solo": "packed",
}
OURS, SOLO = "funcrt-compiled", "funcrt-solo"
GOALS = [
    (OURS, "mlx-lm-bfloat16-batch", 4.0),
    (OURS, "mlx-lm-float32-same-blas-batch", None),
    ("funcrt-bundle", OURS, None),
    (OURS, SOLO, None),
]
Run = dict[str, Any]


def run(rounds: int) -> dict[str, Any]:
    """Alternate the subjects, with other prompts in every round."""
    from funcrt.text import Tokenizer

    runs: dict[str, list[Run]] = {name: [] for name in SUBJECTS}
    with tempfile.TemporaryDirectory() as scratch:
        note("making the model's folders and the bundle")
        folders = make_folders(Path(scratch), PLAN)
        ids = list(Tokenizer.from_folder(folders["dense"]).encode(TEXT))
        warm, measured = split(cut(ids, PROMPT_TOKENS, WARM_ROUNDS + rounds), WARM_ROUNDS)
        workers = {
            name: Worker(name, folders[source], SOLO_PLAN if name == SOLO else PLAN)
            for name, source in SUBJECTS.items()
        }
        for name, worker in workers.items():
            note(f"warming up {name}")
            for prompts in warm:
                worker.measure(prompts, NEW_TOKENS)
        for i, prompts in enumerate(measured):
            for name, worker in workers.items():
                runs[name].append(worker.measure(prompts, NEW_TOKENS))
                note(f"round {i + 1} {name}: {rate(runs[name][-1]):.2f} tokens/s")
        for worker in workers.values():
            worker.close()
    return {
        **describe_run("benchmarks.batching"),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "plan": PLAN,
        **summarize(runs),
        "runs": runs,
    }


def split(rounds: Sequence[Any], at: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """The rounds before and after the first that counts."""
    return rounds[:at], rounds[at:]


def rate(run: Run) -> float:
    """New tokens per second, from the arrival of the prompts to the last token."""
    return sum(map(len, run["tokens"])) / float(run["seconds"])


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` % of them do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(int(rank), 1) - 1]


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


def padding(name: str, run: Run) -> dict[str, float] | None:
    """Shares of padding: as funcrt counts them, or as left padding implies them."""
    if name.startswith("mlx-lm"):
        return left_padding(PROMPT_TOKENS, [len(tokens) for tokens in run["tokens"]])
    waste: dict[str, float] | None = run["report"].get("padding")
    return waste


def agreeing(runs: Sequence[Run], solo: Sequence[Run]) -> int:
    """How many requests got the tokens that they get alone."""
    pairs = zip(runs, solo, strict=True)
    return sum(a == b for ours, alone in pairs for a, b in zip(ours["tokens"], alone["tokens"]))  # noqa: B905


def summarize(runs: Mapping[str, list[Run]]) -> dict[str, Any]:
    """Medians over the rounds, and ratios against goals."""
    subjects = {}
    for name, measured in runs.items():
        first = [seconds for run in measured for seconds in run["first_token_s"]]
        subjects[name] = {
            "tokens_per_s": statistics.median(map(rate, measured)),
            "first_token_p50_s": percentile(first, 50),
            "first_token_p95_s": percentile(first, 95),
            "padding": padding(name, measured[0]),
            "peak_bytes": max(run["peak_bytes"] for run in measured),
            "same_as_solo": agreeing(measured, runs[SOLO]),
            "requests": sum(len(run["tokens"]) for run in measured),
        }
    ratios = [
        {
            "of": ours,
            "to": theirs,
            "ratio": subjects[ours]["tokens_per_s"] / subjects[theirs]["tokens_per_s"],
            "by_round": [rate(a) / rate(b) for a, b in zip(runs[ours], runs[theirs], strict=True)],
            "goal": goal,
        }
        for ours, theirs, goal in GOALS
    ]
    return {"subjects": subjects, "ratios": ratios}


def show(result: Mapping[str, Any]) -> None:
    """Print the two tables."""
    from funcrt.cli import terminal

    shortest, longest = min(result["prompt_tokens"]), max(result["prompt_tokens"])
    terminal.table(
        f"SmolLM2-135M, 8 prompts of {shortest} to {longest} tokens + {result['new_tokens']} new, "
        f"{result['blas']}",
        ("subject", "tokens/s", "first token p50 / p95, s", "padding: tokens, rows, slots",
         "peak", "as alone"),
        [
            (
                name.removesuffix("-batch"),
                f"{s['tokens_per_s']:.2f}",
                f"{s['first_token_p50_s']:.2f} / {s['first_token_p95_s']:.2f}",
                " / ".join(f"{100 * s['padding'][k]:.0f} %" for k in ("tokens", "rows", "slots"))
                if s["padding"] else "",
                f"{s['peak_bytes'] / 1e6:.0f} MB",
                f"{s['same_as_solo']} of {s['requests']}",
            )
            for name, s in result["subjects"].items()
        ],
    )  # fmt: skip
    terminal.table(
        "Ratios of tokens/s (above 1: the first is faster)",
        ("", "ratio", "lowest round", "goal"),
        [
            (
                f"{r['of']} to {r['to'].removesuffix('-batch')}",
                f"{r['ratio']:.2f}",
                f"{min(r['by_round']):.2f}",
                str(r["goal"] or ""),
            )
            for r in result["ratios"]
        ],
    )


def main() -> None:
    """Run, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "batching.json")
    options = parser.parse_args()
    result = run(options.rounds)
    write_json(options.out, result)
    show(result)


if __name__ == "__main__":
    main()
