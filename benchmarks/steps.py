"""Does a step take as long at the end of a long text as at its beginning? Same bucket, one row.

    python -m benchmarks.steps      # part of `make bench`

A random llama of two layers decodes 8,000 tokens through `Engine`. Its last steps are held against
the first ones of other texts that take turns with them, 150 steps each: what a machine does
between the 100th step and the 8,000th, half a minute later, is nothing that the engine does. Writes
benchmarks/results/steps.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.common import RESULTS, describe_run, note, write_json
from benchmarks.prompts import draw
from benchmarks.subjects import ROOT
from benchmarks.weights import SHAPES

if TYPE_CHECKING:
    from funcrt.engine import StepReport

COUNT, EARLY, WINDOW, PAIRS = 8000, 100, 100, 5
TURN = EARLY + WINDOW // 2  # steps of either before the other goes on; the last of them count
SOURCE = "llama-tiny:float32"
PROMPT_TOKENS = 16
PATIENCE = 1800.0  # seconds


class Pace:
    """Ends each step of an engine at a time that is kept, and holds it where it was told to.

    Args:
        stop: how many steps it may make.
    """

    def __init__(self, stop: int) -> None:
        self.times: list[float] = []
        self._stop = stop
        self._changed = threading.Condition()

    def __call__(self, report: StepReport) -> None:
        """What `on_step` is."""
        if report.function != "decode":
            return
        with self._changed:
            self.times.append(time.perf_counter())
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self.times) < self._stop, PATIENCE)

    def let_go(self, stop: int) -> None:
        """Let it go on until it has made so many steps."""
        with self._changed:
            self._stop = stop
            self._changed.notify_all()

    def run_to(self, stop: int) -> None:
        """The same, and wait for that."""
        self.let_go(stop)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.times) >= stop, PATIENCE):
                raise TimeoutError(f"{len(self.times)} of {stop} steps in {PATIENCE:.0f} s")


def run_here(source: str, count: int, pairs: int) -> dict[str, Any]:
    """Decode `count` tokens, the last of them in turns with other texts.

    Args:
        source: of the weights.
        count: steps; the bucket holds all of them.
        pairs: how many times the turns change; the ratio is one of medians over all.
    """
    import funcrt
    from benchmarks import weights

    size = -(-(PROMPT_TOKENS + count + 1) // 256) * 256
    plan = funcrt.BucketPlan(batch=[1], tokens=[PROMPT_TOKENS], capacity=[size])
    model = weights.make_model(source)
    vocab = SHAPES[source.partition(":")[0]]["vocab_size"]
    ((long, warm, *short),) = draw([PROMPT_TOKENS] * (2 + pairs), 1, vocab)
    pace, free = Pace(count - pairs * TURN), Pace(sys.maxsize)
    with (
        funcrt.Engine(model, plan, on_step=pace) as engine,
        funcrt.Engine(model, plan, on_step=free) as other,
    ):
        other.generate([warm], max_tokens=4)
        handle = engine.submit(long, max_tokens=count + 2)
        pace.run_to(count - pairs * TURN)
        early, late = [], []
        for pair, prompt in enumerate(short):
            free.times.clear()
            other.generate([prompt], max_tokens=TURN + 2)
            early.append(free.times[TURN - WINDOW : TURN])
            pace.run_to(count - (pairs - 1 - pair) * TURN)
            late.append(pace.times[-WINDOW:])
        pace.let_go(sys.maxsize)
        handle.result(PATIENCE)
        traces = engine.compiled.traces.total()
    found = [compare(first, last) for first, last in zip(early, late, strict=True)]
    return {
        "steps": count,
        "capacity": size,
        "traces": traces,
        "rounds": found,
        "ratio": statistics.median(each["ratio"] for each in found),
    }


def compare(early: Sequence[float], late: Sequence[float]) -> dict[str, float]:
    """Median times, in ms, of early and of late steps, from when each ended; their ratio."""
    first, last = (
        1000 * statistics.median(b - a for a, b in pairwise(times)) for times in (early, late)
    )
    return {"early_ms": first, "late_ms": last, "ratio": last / first}


def run_case(source: str, count: int, pairs: int) -> Mapping[str, Any]:
    """`run_here` in a process with one BLAS thread: with a tiny model more only wait."""
    note(f"{count} steps of {source}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.steps", "--here", source, str(count), str(pairs)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Run and keep the result, or run here and print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--here", nargs=3, metavar=("SOURCE", "STEPS", "PAIRS"))
    options = parser.parse_args()
    if options.here:
        source, count, pairs = options.here
        print(json.dumps(run_here(source, int(count), int(pairs))))
        return
    found = run_case(SOURCE, COUNT, PAIRS)
    write_json(RESULTS / "steps.json", {**describe_run("benchmarks.steps"), **found})
    print(f"step {COUNT} to step {EARLY}: {found['ratio']:.3f} times as long")


if __name__ == "__main__":
    main()
