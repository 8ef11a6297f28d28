"""What the benchmarks share: comparing runs, the machine and its bandwidth, kept results."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.subjects import ROOT

RESULTS = ROOT / "benchmarks" / "results"
Run = dict[str, Any]
Runs = dict[str, list[Run]]


def rate(run: Run) -> float:
    """New tokens per second, from the arrival of the prompts to the last token."""
    return sum(map(len, run["tokens"])) / float(run["seconds"])


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` % of them do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(int(rank), 1) - 1]


def compare(
    runs: Runs, what: str, ours: str, theirs: str, *, lower_is_better: bool = False
) -> dict[str, Any] | None:
    """A ratio of medians that is above 1 where ours is better; None where one did not run.

    Args:
        runs: of all subjects.
        what: a key of a run, or "tokens_per_s".
        ours: a subject.
        theirs: another one.
        lower_is_better: of times and sizes.
    """
    if ours not in runs or theirs not in runs:
        return None
    values = [[_value(run, what) for run in runs[name]] for name in (ours, theirs)]
    if lower_is_better:
        values.reverse()
    first, second = (statistics.median(part) for part in values)
    return {
        "what": what,
        "of": ours,
        "to": theirs,
        "ratio": first / second,
        "by_round": [a / b for a, b in zip(*values)],  # noqa: B905 (one may have dropped out)
    }


def _value(run: Run, what: str) -> float:
    value = rate(run) if what == "tokens_per_s" else run[what]
    return float(value[0] if isinstance(value, list) else value)


def keep(runs: Runs) -> Runs:
    """The runs as they are kept: hashes in place of tokens, and no single steps."""

    def digest(tokens: list[int]) -> str:
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]

    return {
        name: [
            {**run, "token_s": [], "tokens": [digest(row) for row in run["tokens"]]}
            for run in found
        ]
        for name, found in runs.items()
    }


def measure_bandwidth() -> dict[str, float]:
    """GB/s of copying and reading large arrays, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bandwidth"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    note("bandwidth: " + ", ".join(f"{name} {value:.1f} GB/s" for name, value in found.items()))
    return found


def _without_folder(arguments: Sequence[str]) -> list[str]:
    """Where a result was put first is nobody's business."""
    kept = list(arguments)
    if "--out" in kept:
        place = kept.index("--out")
        del kept[place : place + 2]
    return kept


def describe_run(module: str) -> dict[str, Any]:
    """The command, the time and the machine, as kept beside the numbers."""
    from funcrt import blas
    from funcrt._version import __version__

    import mlx.core as mx

    versions = {"funcrt": __version__}
    for name in ("mlx", "mlx-lm", "transformers", "torch"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    device = mx.default_device().type.name
    chip = str(mx.device_info().get("device_name", "")) if device == "gpu" else _cpu_name()
    machine = f"{chip}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    return {
        "command": shlex.join(["python", "-m", module, *_without_folder(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine,
        "device": device,
        "blas": blas.describe(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "all"),
        "versions": versions,
    }


def _cpu_name() -> str:
    """What /proc/cpuinfo calls the processor, else what Python does."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "CPU"


def write_json(path: Path, result: Mapping[str, Any] | Sequence[Any]) -> None:
    """Keep a result beside the code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(result), "utf-8")
    note(f"wrote {path}")


def dump(result: Mapping[str, Any] | Sequence[Any]) -> str:
    """JSON whose lists of numbers, and whatever else is short, take one line."""
    return _dump(result, "") + "\n"


def _dump(value: Any, indent: str) -> str:
    plain = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list, tuple)) or len(plain) + len(indent) <= 96:
        return plain
    deeper = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_dump(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(deeper + part for part in parts) + "\n" + indent + "}"
    if all(isinstance(item, (int, float)) for item in value):
        return plain
    return "[\n" + ",\n".join(deeper + _dump(item, deeper) for item in value) + "\n" + indent + "]"


def note(text: str) -> None:
    """Say on standard error how far a benchmark is."""
    print(text, file=sys.stderr, flush=True)
