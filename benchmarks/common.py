"""What the benchmarks share: subjects in processes of their own, and the weights they read."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Worker:
    """A subject of `benchmarks.workers` in its own process.

    Args:
        name: the subject.
        folder: its model folder or bundle.
        plan: the buckets of a subject that compiles in its process.
    """

    def __init__(self, name: str, folder: Path, plan: Mapping[str, Sequence[int]]) -> None:
        command = [sys.executable, "-m", "benchmarks.workers", name, str(folder), json.dumps(plan)]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._line()

    def measure(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Time prompts that arrive together; see `benchmarks.workers.measure` for the answer."""
        assert self.process.stdin is not None
        request = {"prompts": prompts, "max_tokens": max_tokens}
        print(json.dumps(request), file=self.process.stdin, flush=True)
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
            raise SystemExit(f"{self.name}: the worker ended early")
        return line


def make_folders(scratch: Path, plan: Mapping[str, Sequence[int]]) -> dict[str, Path]:
    """SmolLM2 in the forms that the subjects read: "packed" and "dense" folders, a "bundle"."""
    import converters
    import funcrt
    from converters import smollm2

    import mlx.core as mx

    folders = {name: scratch / name for name in ("packed", "dense", "bundle.funcrt")}
    packed = converters.load(smollm2.fetch())
    packed.save(folders["packed"])
    dense = {
        name: array.astype(mx.float32)
        for name, array in funcrt.params.prepare(
            packed.params, packed.spec, funcrt.params.Preparation("float32", True, {})
        ).items()
    }
    funcrt.Model(packed.config, dense, packed.tokenizer).save(folders["dense"])
    funcrt.export(packed, folders["bundle.funcrt"], funcrt.BucketPlan(**plan))
    return folders


def describe_run(module: str) -> dict[str, Any]:
    """The command and the machine, as kept beside the numbers."""
    from funcrt import blas

    return {
        "command": f"python -m {module}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "blas": blas.describe(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "all"),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Keep a result beside the code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def note(text: str) -> None:
    """Say on standard error how far a benchmark is."""
    print(text, file=sys.stderr, flush=True)
