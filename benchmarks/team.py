"""Subjects that take turns, each in a process of its own."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.common import Run, Runs, note, rate
from benchmarks.subjects import ROOT, Prompts, Spec

KERNELS = Path(tempfile.gettempdir()) / "funcrt-bench-kernels"
PATIENCE = 900.0  # seconds that an answer may take


def kernel_folder(name: str) -> Path:
    """Where a subject alone keeps kernels that CUDA compiles when they are first used."""
    folder = KERNELS / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class WorkerError(Exception):
    """A subject could not be made, or its process ended or takes too long."""


class Worker:
    """A subject of `benchmarks.workers` in its own process.

    Making one does not wait for it: `ready` does.

    Args:
        name: what it is called.
        spec: how it is made.
    """

    def __init__(self, name: str, spec: Spec) -> None:
        command = [sys.executable, "-m", "benchmarks.workers", json.dumps(asdict(spec))]
        self.name = name
        environment = {**os.environ, "MLX_PTX_CACHE_DIR": str(kernel_folder(name))}
        if spec.kind.startswith("mlx-lm") and not spec.same_blas:
            environment["FUNCRT_BLAS"] = "none"  # as it is installed
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=environment,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

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
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self._listener.join()
        self.process.stdout.close()

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
            slow: how many prompts and tokens are enough for some of the subjects; 0 is none.
        """
        for name in list(self._workers):
            note(f"warming up {name}")
            count, tokens = (slow or {}).get(name, (len(prompts), max_tokens))
            if count:
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
