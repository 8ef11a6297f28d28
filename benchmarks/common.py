"""What the benchmarks share: subjects that take turns, the machine's bandwidth, kept results."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.subjects import ROOT, Prompts, Spec

RESULTS = ROOT / "benchmarks" / "results"
KERNELS = Path(tempfile.gettempdir()) / "funcrt-bench-kernels"
PATIENCE = 900.0  # seconds that an answer may take
Run = dict[str, Any]
Runs = dict[str, list[Run]]


class WorkerError(Exception):
    """A subject could not be made, or its process ended or takes too long."""


class Worker:
    """A subject of `benchmarks.workers` in its own process.

    Making one does not wait for it: `ready` does.

    Args:
        name: what it is called.
        spec: how it is made.
        environment: variables of its process.
    """

    def __init__(self, name: str, spec: Spec, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks.workers", json.dumps(asdict(spec))]
        self.name = name
        # mlx-lm as installed does not get the BLAS that funcrt would load.
        plain = spec.kind.startswith("mlx-lm") and not spec.same_blas
        # CUDA: kernels are compiled when first used; nobody else writes to this folder meanwhile.
        kernels = {"MLX_PTX_CACHE_DIR": str(KERNELS / name)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **kernels, **({"FUNCRT_BLAS": "none"} if plain else {}),
                 **(environment or {})},
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ready(self) -> dict[str, Any]:
        """What is known of the subject, once it is made. Raises WorkerError."""
        facts = self.answer()
        if "failed" in facts:
            raise WorkerError(facts["failed"])
        return facts

    def measure(self, prompts: Prompts, max_tokens: int) -> Run:
        """Time prompts that arrive together; see `benchmarks.workers.measure` for the answer."""
        self.ask(prompts, max_tokens)
        return self.answer()

    def ask(self, prompts: Prompts, max_tokens: int) -> None:
        """Send what is to be measured."""
        assert self.process.stdin is not None
        try:
            request = {"prompts": prompts, "max_tokens": max_tokens}
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerError("its process has ended") from None

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer. Raises WorkerError."""
        try:
            line = self._lines.get(timeout=PATIENCE)
        except queue.Empty:
            self.process.kill()
            raise WorkerError(f"no answer within {PATIENCE:.0f} s") from None
        if not line:
            raise WorkerError(f"its process ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


class Team:
    """Subjects that take turns, each in its own process; one that fails drops out.

    Args:
        specs: name -> how it is made.

    Attributes:
        facts: name -> what is known of it.
        left_out: name -> why it is not measured.
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.facts: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        self._workers = {name: Worker(name, spec) for name, spec in specs.items()}
        for name, worker in list(self._workers.items()):
            try:
                self.facts[name] = worker.ready()
            except WorkerError as error:
                self._drop(name, error)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers.values():
            worker.close()

    def warm(
        self,
        prompts: Prompts,
        max_tokens: int,
        slow: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Meet every shape once, so that no compiling is measured.

        Args:
            prompts: as many and as long as those that are measured.
            max_tokens: new tokens of each.
            slow: how many prompts and tokens are enough for some of the subjects.
        """
        for name in list(self._workers):
            note(f"warming up {name}")
            count, tokens = (slow or {}).get(name, (len(prompts), max_tokens))
            self._measure(name, prompts[:count], tokens)

    def alternate(self, rounds: Sequence[Prompts], max_tokens: int) -> Runs:
        """One run of every subject for each of the `rounds`, whose prompts all subjects share."""
        runs: Runs = {name: [] for name in self._workers}
        for i, prompts in enumerate(rounds):
            for name in list(self._workers):
                if run := self._measure(name, prompts, max_tokens):
                    runs[name].append(run)
                    note(
                        f"round {i + 1} {name}: first token {run['first_token_s'][0]:.3f} s, "
                        f"{rate(run):.2f} tokens/s in all"
                    )
        return {name: found for name, found in runs.items() if found}

    def _measure(self, name: str, prompts: Prompts, max_tokens: int) -> Run | None:
        try:
            return self._workers[name].measure(prompts, max_tokens)
        except WorkerError as error:
            self._drop(name, error)
            return None

    def _drop(self, name: str, error: WorkerError) -> None:
        note(f"{name} is left out: {error}")
        self.left_out[name] = str(error)
        self._workers.pop(name).close()


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
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
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
    """Keep a result beside the code; lists of numbers take one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_dump(result, "") + "\n", "utf-8")
    note(f"wrote {path}")


def _dump(value: Any, indent: str) -> str:
    plain = json.dumps(value)
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
