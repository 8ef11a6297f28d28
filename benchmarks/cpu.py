"""One sequence on the CPU: funcrt against mlx-lm, same weights, alternating, medians.

    python -m benchmarks.cpu            # make bench

Prints the table and writes benchmarks/results/cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
PLAN = {"batch": [1], "tokens": [1, 64], "capacity": [128]}
PROMPT_TOKENS, NEW_TOKENS = 39, 32
PACKED_NEW_TOKENS = 4  # mlx-lm's 4-bit form takes minutes on a CPU
SUBJECTS = ("mlx-lm-bfloat16", "mlx-lm-float32-same-blas", "funcrt-compiled", "funcrt-bundle")
GOALS = [
    ("decode", "funcrt-compiled", "mlx-lm-bfloat16", 1.8),
    ("first token", "funcrt-compiled", "mlx-lm-bfloat16", 6.0),
    ("decode", "funcrt-compiled", "mlx-lm-float32-same-blas", None),
    ("first token", "funcrt-compiled", "mlx-lm-float32-same-blas", None),
    ("decode", "funcrt-bundle", "funcrt-compiled", None),
    ("decode", "funcrt-compiled", "mlx-lm-4bit", 20.0),
    ("first token", "funcrt-compiled", "mlx-lm-4bit", None),
]


class Worker:
    """A subject in its own process."""

    def __init__(self, name: str, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.workers", name, str(folder), json.dumps(PLAN)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._line()

    def measure(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Time one request."""
        assert self.process.stdin is not None
        print(
            json.dumps({"prompt": prompt, "max_tokens": max_tokens}),
            file=self.process.stdin, flush=True,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended early: {self.process.args}")
        return line


def make_folders(scratch: Path) -> dict[str, Path]:
    """The same weights in the forms that the subjects read."""
    import converters
    import funcrt
    from converters import smollm2

    import mlx.core as mx

    packed = converters.load(smollm2.fetch())
    packed.save(scratch / "packed")
    dense = {
        name: array.astype(mx.float32)
        for name, array in funcrt.params.prepare(
            packed.params, packed.spec, funcrt.params.Preparation("float32", True, {})
        ).items()
    }
    funcrt.Model(packed.config, dense, packed.tokenizer).save(scratch / "dense")
    funcrt.export(packed, scratch / "bundle.funcrt", funcrt.BucketPlan(**PLAN))
    return {
        "mlx-lm-bfloat16": scratch / "dense",
        "mlx-lm-float32-same-blas": scratch / "dense",
        "mlx-lm-4bit": scratch / "packed",
        "funcrt-compiled": scratch / "packed",
        "funcrt-bundle": scratch / "bundle.funcrt",
    }


def read_prompt() -> list[int]:
    """The first ids of the longest prompt of the golden file."""
    golden = json.loads((ROOT / "tests" / "reference" / "smollm2.json").read_text("utf-8"))
    longest = max((p["prompt_ids"] for p in golden["prompts"].values()), key=len)
    return [int(token) for token in longest[:PROMPT_TOKENS]]


def run(rounds: int, with_packed: bool) -> dict[str, Any]:
    """Alternate the subjects and collect every single measurement."""
    prompt = read_prompt()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SUBJECTS}
    with tempfile.TemporaryDirectory() as scratch:
        folders = make_folders(Path(scratch))
        workers = {name: Worker(name, folders[name]) for name in SUBJECTS}
        for name, worker in workers.items():
            print(f"warming up {name}", file=sys.stderr)
            worker.measure(prompt, 4)
        for i in range(rounds):
            for name, worker in workers.items():
                runs[name].append(worker.measure(prompt, NEW_TOKENS))
                last = runs[name][-1]
                print(
                    f"round {i + 1} {name}: first token {last['first_token_s']:.2f} s, "
                    f"{last['decode_tok_s']:.1f} tok/s", file=sys.stderr,
                )  # fmt: skip
        for worker in workers.values():
            worker.close()
        if with_packed:
            print("mlx-lm-4bit, once (minutes)", file=sys.stderr)
            worker = Worker("mlx-lm-4bit", folders["mlx-lm-4bit"])
            runs["mlx-lm-4bit"] = [worker.measure(prompt, PACKED_NEW_TOKENS)]
            worker.close()
    return summarize(runs)


def summarize(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, ratios against goals, and whether the subjects agree on the text."""
    from funcrt import blas

    medians = {
        name: {
            "decode": statistics.median(run["decode_tok_s"] for run in measured),
            "first token": statistics.median(run["first_token_s"] for run in measured),
        }
        for name, measured in runs.items()
    }
    ratios = []
    for what, ours, theirs, goal in GOALS:
        if theirs in medians:
            a, b = medians[ours][what], medians[theirs][what]
            ratio = a / b if what == "decode" else b / a
            ratios.append({"what": what, "of": ours, "to": theirs, "ratio": ratio, "goal": goal})
    mine = runs["funcrt-compiled"][0]["tokens"]
    return {
        "command": "python -m benchmarks.cpu",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "blas": blas.describe(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "medians": medians,
        "ratios": ratios,
        "same_ids_as_funcrt": {
            name: measured[0]["tokens"] == mine[: len(measured[0]["tokens"])]
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
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = run(options.rounds, not options.skip_4bit)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    show(result)


if __name__ == "__main__":
    main()
