"""Does an engine stay as fast and as small as it began? Long decoding, and thousands of requests.

    python -m benchmarks.endurance      # part of `make bench-full`

Prints a table, writes benchmarks/results/endurance.json and exits with 1 if a claim fails.
benchmarks/README.md says what each claim means.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import RESULTS, ROOT, describe_run, note, write_json

if TYPE_CHECKING:
    from funcrt.engine import Handle, StepReport
    from funcrt.model import Model

MIB = 1 << 20
SLOWDOWN = 1.10
GROWTH_OF_ARRAYS = 1  # MiB that MLX's arrays may grow by
GROWTH_OF_PROCESS = 16  # MiB that the process may: the tokens themselves, malloc's arenas
TINY_STEPS, SMOLLM2_STEPS = 8000, 1000
REQUESTS, IN_FLIGHT, LOOK_EVERY = 2000, 16, 100
BUDGET = 96 * MIB  # small enough for the rows kept of finished requests to reach their share soon
TIME = "time of the last block of steps to the first"
Facts = dict[str, Any]


@dataclass
class Watch:
    """Listens to an engine's steps: how long decoding takes, and what it holds now and then.

    Attributes:
        every: decode steps between two looks at the memory.
        seconds: wall time from one decode step to the next.
        samples: facts at those looks.
        ran: functions and buckets.
        traces: made so far.
    """

    every: int
    seconds: list[float] = field(default_factory=list)
    samples: list[Facts] = field(default_factory=list)
    ran: set[str] = field(default_factory=set)
    traces: int = 0
    last: float | None = None

    def __call__(self, report: StepReport) -> None:
        """What the engine calls after each of its steps."""
        self.ran.add(f"{report.function}_{report.bucket}")
        self.traces = report.traces
        if report.function != "decode":
            return
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append(now - self.last)
            if len(self.seconds) % self.every == 0:
                self.samples.append(look(len(self.seconds), report.traces))
        self.last = time.perf_counter()


def look(count: int, traces: int) -> Facts:
    """Memory of this process and of MLX in it."""
    import mlx.core as mx

    return {
        "count": count,
        "traces": traces,
        "arrays": mx.get_active_memory(),
        "cached": mx.get_cache_memory(),
        "process": process_bytes(),
    }


def process_bytes() -> int:
    """What this process has in memory now, in bytes."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        shown = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
        )
        return int(shown.stdout) * 1024


def run_steps(model: Model, capacity: int, prompts: list[list[int]], steps: int) -> Facts:
    """Decode `steps` tokens for every prompt in one bucket, and look at every block."""
    import funcrt

    watch = Watch(every=min(500, steps // 4))
    plan = funcrt.BucketPlan(batch=[len(prompts)], tokens=[16], capacity=[capacity])
    with funcrt.Engine(model, plan, on_step=watch) as engine:
        # One token more for the prefill, and one because two steps make one interval.
        completions = engine.generate(prompts, max_tokens=steps + 2)
    blocks = range(0, steps, watch.every)
    return {
        "asked": [steps + 2] * len(prompts),
        "given": [len(completion.tokens) for completion in completions],
        "block": watch.every,
        "medians_s": [statistics.median(watch.seconds[i : i + watch.every]) for i in blocks],
        "samples": watch.samples,
        "ran": sorted(watch.ran),
    }


def run_tiny() -> Facts:
    """A random llama of two layers, two rows, in a cache that holds them to the end."""
    from tests.helpers import make_model, random_tokens

    prompts = [random_tokens(16, seed) for seed in range(2)]
    return run_steps(make_model(max_positions=8192), 8192, prompts, TINY_STEPS)


def run_smollm2() -> Facts:
    """SmolLM2, one row; without its tokenizer and so without an end token that stops it early."""
    import converters
    import funcrt
    from converters import smollm2

    model = converters.load(smollm2.fetch())
    assert model.tokenizer is not None
    prompt = list(model.tokenizer.encode("Once upon a time"))
    return run_steps(funcrt.Model(model.config, model.params), 1024, [prompt], SMOLLM2_STEPS)


def run_requests() -> Facts:
    """Prompts of 1 to 2,000 tokens, no two of one length, shuffled, a few at a time."""
    import funcrt
    from tests.helpers import make_model, random_tokens

    import mlx.core as mx

    watch = Watch(every=sys.maxsize)
    plan = funcrt.BucketPlan(batch=[1, 4, 8], tokens=[16, 256], capacity=[256, 1024, 2048])
    lengths = random.Random(0).sample(range(1, REQUESTS + 1), REQUESTS)
    asked = [1 + length % 8 for length in lengths]
    given: list[int] = []
    samples: list[Facts] = []
    flying: deque[Handle] = deque()
    with funcrt.Engine(make_model(max_positions=2048), plan, BUDGET, on_step=watch) as engine:
        for count, length in enumerate(lengths, 1):
            prompt = random_tokens(length, seed=count)
            flying.append(engine.submit(prompt, max_tokens=asked[count - 1]))
            # Looks are taken while nothing runs, so that they compare like with like.
            due = count % LOOK_EVERY == 0
            while len(flying) >= (1 if due else IN_FLIGHT):
                given.append(len(flying.popleft().result().tokens))
            if due:
                samples.append(look(count, watch.traces))
                note(f"requests: {count}")
    return {
        "asked": asked,
        "given": given,
        "samples": samples,
        "ran": sorted(watch.ran),
        "peak": mx.get_peak_memory(),
        "budget": BUDGET,
    }


PARTS: dict[str, Callable[[], Facts]] = {
    "tiny": run_tiny,
    "smollm2": run_smollm2,
    "requests": run_requests,
}


@dataclass(frozen=True)
class Claim:
    """Something that must not exceed a limit."""

    part: str
    what: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether it does not."""
        return self.value <= self.limit


def check_part(part: str, facts: Facts) -> list[Claim]:
    """What is claimed of a part; benchmarks/README.md says why."""
    claims: list[Claim] = []

    def claim(what: str, value: float, limit: float) -> None:
        claims.append(Claim(part, what, value, limit))

    samples, medians = facts["samples"], facts.get("medians_s")
    short = sum(a != b for a, b in zip(facts["asked"], facts["given"], strict=True))
    claim("requests with too few tokens", short, 0)
    claim(
        "traces beyond one of a function in a bucket", samples[-1]["traces"] - len(facts["ran"]), 0
    )
    if medians:
        claim("traces after the first block", samples[-1]["traces"] - samples[0]["traces"], 0)
        claim(TIME, medians[-1] / medians[0], SLOWDOWN)
    for what, limit in (("arrays", GROWTH_OF_ARRAYS), ("process", GROWTH_OF_PROCESS)):
        values = [sample[what] / MIB for sample in samples]
        claim(f"growth of {what}, MiB", measure_growth(values, steady=bool(medians)), limit)
    if "budget" in facts:
        claim("arrays at their peak, MiB", facts["peak"] / MIB, facts["budget"] / MIB)
    return claims


def measure_growth(values: Sequence[float], steady: bool) -> float:
    """From the first to the highest where it is `steady`, else from one half's median to the next.

    What an idle engine holds depends on the bucket that it was in last.
    """
    if steady:
        return max(values[1:]) - values[0]
    half = len(values) // 2
    return statistics.median(values[half:]) - statistics.median(values[:half])


def run_part(part: str, attempts: int) -> Facts:
    """A part in a process of its own, again if time alone failed: other work takes time, too.

    What went before is kept with the last attempt.
    """
    earlier: list[list[float]] = []
    while True:
        note(f"{part} ...")
        facts = {**start_part(part), "earlier_medians_s": earlier}
        failed = [claim.what for claim in check_part(part, facts) if not claim.holds]
        if failed != [TIME] or len(earlier) + 1 == attempts:
            return facts
        note(f"{part}: {TIME}: again")
        earlier.append(facts["medians_s"])


def start_part(part: str) -> Facts:
    """What a part found, in a process of its own."""
    # On a tiny model BLAS threads only wait for each other.
    threads = {} if part == "smollm2" else {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.endurance", "--worker", part],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**threads, **os.environ}, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{part}: the process failed")
    facts: Facts = json.loads(done.stdout)
    return facts


def show(claims: Sequence[Claim]) -> None:
    """Print the table."""
    from funcrt.cli import terminal

    terminal.table(
        "Endurance",
        ("part", "claim", "value", "at most", ""),
        [
            (c.part, c.what, f"{c.value:.4g}", f"{c.limit:.4g}", "holds" if c.holds else "FAILS")
            for c in claims
        ],
    )


def main() -> None:
    """Run, print, keep the result, and fail if a claim does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="only this one; writes nothing")
    parser.add_argument("--attempts", type=int, default=2, help="where only a time is too long")
    parser.add_argument("--out", type=Path, default=RESULTS / "endurance.json")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(PARTS[options.worker]()))
        return
    facts = {
        part: run_part(part, options.attempts)
        for part in ([options.part] if options.part else PARTS)
    }
    claims = [claim for part in facts for claim in check_part(part, facts[part])]
    result = {
        **describe_run("benchmarks.endurance"),
        "claims": [{**asdict(claim), "holds": claim.holds} for claim in claims],
        "parts": {
            part: {k: v for k, v in f.items() if k not in ("asked", "given")}
            for part, f in facts.items()
        },
    }
    if not options.part:
        write_json(options.out, result)
    show(claims)
    sys.exit(not all(claim.holds for claim in claims))


if __name__ == "__main__":
    main()
