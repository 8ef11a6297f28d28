"""From the start of a process to its first token, kernels warm; what export and loading take.

    python -m benchmarks.cold       # part of `make bench`

Writes benchmarks/results/cold.json. `run_case` serves `benchmarks.cuda`, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, describe_run, note, write_json
from benchmarks.subjects import CPP_HOST, ROOT
from benchmarks.team import kernel_folder

ROUNDS, PROMPT_TOKENS = 3, 32
PLAN = {"batch": [1], "tokens": [PROMPT_TOKENS], "capacity": [256]}
Times = dict[str, float]


def run_case(
    source: str, vocab_size: int, rounds: int, after: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Export, then start processes in turns.

    Args:
        source: of the weights, see `benchmarks.weights`, or "smollm2".
        vocab_size: how many ids there are.
        rounds: processes of each subject that are measured, after one that warms the kernels up.
        after: called with the bundle's folder before it is deleted.

    Returns:
        `export_s`; for each subject medians of `first_token_s` since the process started, and of
        the parts that it tells: `import_s`, `load_s`, and `compute_s` from there to the token.
    """
    with tempfile.TemporaryDirectory() as scratch:
        made = start("make", "make", source, scratch)[1]
        prompt = ",".join(str(1 + 37 * i % (vocab_size - 1)) for i in range(PROMPT_TOKENS))
        subjects = {
            "mlx-lm": ("mlx-lm", f"{scratch}/model", prompt),
            "funcrt-bundle": ("bundle", f"{scratch}/bundle.funcrt", prompt),
        }
        if made["on_cpu"]:
            subjects["mlx-lm-float32-same-blas"] = ("mlx-lm-same-blas", f"{scratch}/dense", prompt)
            if CPP_HOST.exists():
                subjects["funcrt-cpp"] = ("cpp", f"{scratch}/bundle.funcrt", prompt)
        runs: dict[str, list[Times]] = {name: [] for name in subjects}
        for i in range(1 + rounds):
            for name, child in subjects.items():
                seconds, told = start(name, *child)
                note(f"{'warm-up' if i == 0 else f'round {i}'} {name}: {seconds:.2f} s")
                if i:
                    runs[name].append({"first_token_s": seconds, **told})
        if after is not None:
            after(Path(scratch) / "bundle.funcrt")
    medians = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in runs.items()
    }
    ours, theirs = (medians[name]["first_token_s"] for name in ("funcrt-bundle", "mlx-lm"))
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "plan": PLAN,
        "export_s": made["export_s"],
        "functions": made["functions"],
        "subjects": medians,
        "ratio": ours / theirs,
        "left_out": {} if CPP_HOST.exists() else {"funcrt-cpp": "not built: make cpp"},
        "runs": runs,
    }


def start(name: str, kind: str, *arguments: str) -> tuple[float, dict[str, Any]]:
    """Start a process; seconds until it said its first line, and what it said there."""
    command = [sys.executable, "-m", "benchmarks.first_token", kind, *arguments]
    if kind == "make":
        command = [sys.executable, "-m", "benchmarks.cold", "--make", *arguments]
    elif kind == "cpp":
        command = [str(CPP_HOST), arguments[0], "--prompt-ids", arguments[1], "--max-tokens", "1"]
    environment = {**os.environ, "MLX_PTX_CACHE_DIR": str(kernel_folder(f"cold-{name}"))}
    if kind == "mlx-lm":
        environment["FUNCRT_BLAS"] = "none"
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode or not line:
        raise RuntimeError(f"{name} ended with exit code {process.returncode}")
    return seconds, {} if kind == "cpp" else json.loads(line)


def make(source: str, scratch: str) -> dict[str, Any]:
    """Folders "model" (what mlx-lm users have), on a CPU "dense" in float32, and the bundle.

    On a CPU the bundle has the weights in float32, too, which is what runs there: it starts as fast
    as it can, and takes the room on disk for it.
    """
    import funcrt
    from benchmarks import weights
    from funcrt.params import cast

    import mlx.core as mx

    folder, on_cpu = Path(scratch), mx.default_device().type == mx.DeviceType.cpu
    if source == "smollm2":
        folders, _ = weights.make_smollm2(folder)
        model = funcrt.load_model(folders["dense"])
        funcrt.Model(model.config, cast(model.params, "bfloat16")).save(folder / "model")
    else:
        model = weights.make_model(source)
        model.save(folder / "model")
        if on_cpu:
            model = model.in_float32()
            model.save(folder / "dense")
    begin = time.perf_counter()
    bundle = funcrt.export(model, folder / "bundle.funcrt", funcrt.BucketPlan(**PLAN))
    return {
        "export_s": time.perf_counter() - begin,
        "functions": len(bundle.target.functions),
        "on_cpu": on_cpu,
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the table."""
    from funcrt.cli import terminal

    terminal.table(
        f"Start of a process to its first token; export {result['export_s']:.1f} s, "
        f"{result['functions']} functions",
        ("subject", "first token, s", "import", "load", "compute"),
        [
            (name, *(f"{s[key]:.2f}" if key in s else ""
                     for key in ("first_token_s", "import_s", "load_s", "compute_s")))
            for name, s in result["subjects"].items()
        ],
    )  # fmt: skip
    print(f"funcrt-bundle to mlx-lm: {result['ratio']:.2f} times as long")


def main() -> None:
    """Run, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        print(json.dumps(make(*options.make)), flush=True)
        return
    result = {"model": "SmolLM2-135M", **run_case("smollm2", 49152, ROUNDS)}
    result = {**describe_run("benchmarks.cold"), **result}
    write_json(RESULTS / "cold.json", result)
    show(result)


if __name__ == "__main__":
    main()
