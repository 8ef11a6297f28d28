"""Everything that is measured on a CUDA GPU, in steps that keep their JSON when they are done.

    python -m benchmarks.cuda                       # make bench-cuda
    python -m benchmarks.cuda --steps 1b,1b-ragged  # some of them; --list says what there is
    python -m benchmarks.cuda --tiny --out FOLDER   # tries all of it, anywhere; measures nothing

The weights are random, of the shapes of Llama 3.2 1B and Llama 3.1 8B, and drawn on the GPU by
every process alike. Writes benchmarks/results/cuda-STEP.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cold, ragged, sequence, steps
from benchmarks.common import RESULTS, describe_run, measure_bandwidth, note, write_json
from benchmarks.prompts import draw
from benchmarks.subjects import ROOT, Spec
from benchmarks.team import Team
from benchmarks.weights import SHAPES

OURS, THEIRS, EAGER, TORCH = "funcrt", "mlx-lm", "funcrt-eager", "transformers"
NGRAM, BUNDLE = "funcrt-ngram", "funcrt-bundle"
PAIRS = [
    ("decode_tok_s", OURS, THEIRS),
    ("first_token_s", OURS, THEIRS),
    ("peak_bytes", OURS, THEIRS),
    ("decode_tok_s", OURS, EAGER),
    ("decode_tok_s", OURS, TORCH),
    ("first_token_s", OURS, TORCH),
    ("decode_tok_s", NGRAM, OURS),
    ("decode_tok_s", BUNDLE, THEIRS),
    ("peak_bytes", BUNDLE, THEIRS),
]
LONG, GROWING = 32768 - 256, range(4096, 32768, 4096)
REQUESTS, SHORTEST, LONGEST, RAGGED_NEW = 64, 16, 515, 128
Result = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What a run takes: the real thing, or something tiny that any machine does in a minute.

    Attributes:
        models: "1b" and "8b" -> shape.
        dense: dtype of weights that are not packed.
        divide: numbers of tokens by this.
        rounds: most of them.
    """

    models: Mapping[str, str]
    dense: str = "bfloat16"
    divide: int = 1
    rounds: int = 5

    def tokens(self, count: int) -> int:
        """So many tokens, or fewer."""
        return max(4, count // self.divide)

    def source(self, model: str, form: str = "bfloat16") -> str:
        """What `benchmarks.weights` draws."""
        return f"{self.models.get(model, model)}:{self.dense if form == 'bfloat16' else form}"

    def vocab(self, model: str) -> int:
        """How many ids the model has."""
        return int(SHAPES[self.models.get(model, model)]["vocab_size"])


REAL = Sizes({"1b": "llama-1b", "8b": "llama-8b"})
# float32: MLX multiplies no experts of 16 bits on a CPU.
TINY = Sizes({"1b": "llama-tiny", "8b": "llama-tiny"}, "float32", divide=32, rounds=1)


def capacity(tokens: int) -> int:
    """The least multiple of 256 slots that holds `tokens` and a scratch slot."""
    return -(-(tokens + 1) // 256) * 256


def run_sequence(
    sizes: Sizes,
    model: str,
    form: str,
    cases: Sequence[tuple[int, int]],
    rounds: int,
    extra: Sequence[str] = (),
    bundle: Path | None = None,
    between: Sequence[int] = (),
) -> Result:
    """One sequence at a time.

    Args:
        sizes: of everything.
        model: "1b", "8b" or a shape.
        form: of its weights.
        cases: (prompt tokens, new tokens).
        rounds: of each case.
        extra: subjects beside funcrt, compiled in its process, and mlx-lm.
        bundle: that "funcrt-bundle" loads.
        between: tokens of more capacities, which a long prompt grows through.
    """
    asked = [(sizes.tokens(prompt), sizes.tokens(new)) for prompt, new in cases]
    source = sizes.source(model, form)
    plan = {
        "batch": [1],
        "tokens": sorted({min(prompt, 2048) for prompt, _ in asked}),
        "capacity": sorted(
            {capacity(prompt + new) for prompt, new in asked}
            | {capacity(sizes.tokens(tokens)) for tokens in between}
        ),
    }
    guessing = {**plan, "tokens": [8, *plan["tokens"]]}
    every = {
        OURS: Spec("compiled", source, plan),
        THEIRS: Spec("mlx-lm", source),
        EAGER: Spec("eager", source, plan),
        TORCH: Spec("transformers", source, plan),
        NGRAM: Spec("compiled", source, guessing, speculate="ngram"),
        BUNDLE: Spec("bundle", str(bundle)),
    }
    bandwidth = measure_bandwidth()
    results = []
    with Team({name: every[name] for name in (OURS, THEIRS, *extra)}) as team:
        for prompt_tokens, new_tokens in asked:
            count = min(rounds, sizes.rounds)
            warm, *measured = draw([prompt_tokens], 1 + count, sizes.vocab(model))
            team.warm(warm, min(new_tokens, 16))
            results.append(sequence.run_case(team, measured, new_tokens, bandwidth, PAIRS))
    return {"kind": "sequence", "model": f"{model} {form}", "cases": results}


def run_ragged(
    sizes: Sizes, model: str, form: str, batches: Sequence[int], rounds: int, slow: bool = False
) -> Result:
    """64 requests of 16 to 515 tokens that arrive together, 128 new tokens each.

    Args:
        sizes: of everything.
        model: "1b" or "8b".
        form: of its weights.
        batches: rows that are decoded together, one case each; below 16, four requests for a row.
        rounds: of each case.
        slow: mlx-lm takes half a minute for a round, so that a few requests have to warm it up.
    """
    source, results = sizes.source(model, form), []
    new = sizes.tokens(RAGGED_NEW)
    for batch in batches:
        lengths, plan = ragged_lengths(sizes, batch), ragged_plan(sizes, batch)
        specs = {
            OURS: Spec("compiled", source, plan),
            THEIRS: Spec("mlx-lm-batch", source, batch=batch),
        }
        warm, *measured = draw(lengths, 1 + min(rounds, sizes.rounds), sizes.vocab(model))
        with Team(specs) as team:
            team.warm(warm, new, slow={THEIRS: (8, 4)} if slow else None)
            case = ragged.run_case(team, measured, new, batch, [(OURS, THEIRS)])
        results.append({**case, "plan": plan})
    return {"kind": "ragged", "model": f"{model} {form}", "cases": results}


def ragged_lengths(sizes: Sizes, batch: int) -> list[int]:
    """Tokens of the prompts; the longest first would be kinder to any scheduler."""
    every = range(sizes.tokens(SHORTEST), sizes.tokens(LONGEST) + 1)
    return shuffle(ragged.spread(every, min(REQUESTS, 4 * batch)))


def ragged_plan(sizes: Sizes, batch: int) -> dict[str, list[int]]:
    """The buckets of ragged requests."""
    shortest, longest, new = (sizes.tokens(n) for n in (SHORTEST, LONGEST, RAGGED_NEW))
    return {
        "batch": [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= batch],
        "tokens": sorted({sizes.tokens(n) for n in (32, 64, 128, 192, 256, 384, 512)}),
        "capacity": sorted({capacity(shortest + new), capacity(256), capacity(longest + new)}),
    }


def run_trace(sizes: Sizes, model: str, batch: int) -> Result:
    """What the GPU does meanwhile."""
    lengths, plan = ragged_lengths(sizes, batch), ragged_plan(sizes, batch)
    found = trace(sizes, model, plan, "--prompts", lengths)
    return {"kind": "trace", "model": f"{model} bfloat16", "batch": batch, "plan": plan, **found}


def run_steps_trace(sizes: Sizes) -> Result:
    """What the GPU does in steps of one row that holds few tokens, and many."""
    most = max(1000, steps.COUNT // sizes.divide)
    plan = {"batch": [1], "tokens": [16], "capacity": [capacity(most + RAGGED_NEW)]}
    found = trace(sizes, "1b", plan, "--steps", [steps.EARLY, most])
    count = sizes.tokens(RAGGED_NEW)
    return {"kind": "steps-trace", "model": "1b bfloat16", "plan": plan, "count": count,
            "steps": found}  # fmt: skip


def trace(
    sizes: Sizes, model: str, plan: Mapping[str, list[int]], what: str, lengths: Sequence[int]
) -> Result:
    """`benchmarks.tracing` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tracing", sizes.source(model),
         "--plan", json.dumps(plan), what, json.dumps(lengths),
         "--new", str(sizes.tokens(RAGGED_NEW))],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: Result = json.loads(done.stdout)
    return found


def shuffle(lengths: Sequence[int]) -> list[int]:
    """The same lengths in an order that is always the same and no order at all."""
    count, stride = len(lengths), 29  # no batch size divides by it
    return [lengths[i * stride % count] for i in range(count)]


def run_steps(sizes: Sizes) -> Result:
    """One row decodes from step 1 to step 8,000 in one bucket."""
    count = max(1000, steps.COUNT // sizes.divide)
    found = steps.run_case(sizes.source("1b"), count, sizes.rounds)
    return {"kind": "steps", "model": "1b bfloat16", **found}


def run_cold(sizes: Sizes) -> Result:
    """Export, load, and from the start of a process to its first token."""
    cases: list[Result] = []

    def measure(folder: Path) -> None:
        """A bundle holds its weights once: this is where memory is compared, too."""
        cases.extend(
            run_sequence(sizes, "1b", "bfloat16", [(32, 192)], 3, [BUNDLE], folder)["cases"]
        )

    found = cold.run_case(sizes.source("1b"), sizes.vocab("1b"), min(3, sizes.rounds), measure)
    return {"kind": "cold", "model": "1b bfloat16", **found, "cases": cases}


def run_families(sizes: Sizes) -> Result:
    """A small MoE and a hybrid."""
    cases = []
    for shape in ("moe", "hybrid"):
        found = run_sequence(sizes, shape, "bfloat16", [(128, 128)], 3)
        cases += [{"model": shape, **case} for case in found["cases"]]
    return {"kind": "sequence", "model": "small families", "cases": cases}


def run_profile(sizes: Sizes) -> Result:
    """Where the time of a step goes, in a process of its own."""
    sources = [sizes.source("1b"), sizes.source("8b"), sizes.source("8b", "4bit")]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.profiling", *sources, "--out", scratch],
            cwd=ROOT, check=True,
        )  # fmt: skip
        (file,) = Path(scratch).iterdir()
        found: Result = json.loads(file.read_text("utf-8"))
    return {"kind": "profile", "models": found["models"], "bandwidth_gb_s": found["bandwidth_gb_s"]}


PROMPTS = [(128, 256), (2048, 256)]
STEPS: Mapping[str, Callable[[Sizes], Result]] = {
    "1b": lambda s: run_sequence(s, "1b", "bfloat16", PROMPTS, 5, [EAGER]),
    "1b-ragged": lambda s: run_ragged(s, "1b", "bfloat16", [16, 64], 3),
    "8b": lambda s: run_sequence(s, "8b", "bfloat16", PROMPTS, 3),
    "8b-ragged": lambda s: run_ragged(s, "8b", "bfloat16", [16], 3),
    "8b-4bit": lambda s: run_sequence(s, "8b", "4bit", PROMPTS, 3),
    "8b-4bit-ragged": lambda s: run_ragged(s, "8b", "4bit", [16], 1, slow=True),
    "steps": run_steps,
    "cold": run_cold,
    "profile": run_profile,
    "speculation": lambda s: run_sequence(s, "1b", "bfloat16", [(512, 256)], 3, [NGRAM]),
    "context": lambda s: run_sequence(
        s, "1b", "bfloat16", [(512, 64), (8192, 64), (LONG, 64)], 3, between=GROWING
    ),
    "context-8b": lambda s: run_sequence(s, "8b", "bfloat16", [(LONG, 64)], 2, between=GROWING),
    "1b-4bit": lambda s: run_sequence(s, "1b", "4bit", PROMPTS, 3),
    "1b-batches": lambda s: run_ragged(s, "1b", "bfloat16", [1, 4], 2),
    "8b-ragged-64": lambda s: run_ragged(s, "8b", "bfloat16", [64], 2),
    "families": run_families,
    "1b-trace": lambda s: run_trace(s, "1b", 16),
    "8b-trace": lambda s: run_trace(s, "8b", 16),
    "steps-trace": run_steps_trace,
    "transformers": lambda s: run_sequence(s, "1b", "bfloat16", PROMPTS[:1], 3, [TORCH]),
    "transformers-8b": lambda s: run_sequence(s, "8b", "bfloat16", PROMPTS[:1], 3, [TORCH]),
}


def show(name: str, result: Result) -> None:
    """Print what a step found."""
    if result["kind"] == "sequence":
        sequence.show(result)
    elif result["kind"] == "ragged":
        ragged.show(result)
    else:
        note(f"{name}: {result}")


def main() -> None:
    """Run the steps, and keep what each of them found as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", default=",".join(STEPS), help="names with commas between")
    parser.add_argument("--list", action="store_true", help="print the steps, run none")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, one round")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    names = options.steps.split(",")
    if unknown := set(names) - set(STEPS):
        parser.error(f"unknown steps: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    if options.list:
        print("\n".join(STEPS))
        return
    if options.tiny and options.out == RESULTS:
        parser.error("--tiny measures nothing: give it an --out of its own")
    failed = []
    for name in names:
        begin = time.perf_counter()
        note(f"--- {name}")
        try:
            result = STEPS[name](TINY if options.tiny else REAL)
            seconds = time.perf_counter() - begin
            described = {**describe_run("benchmarks.cuda"), "step": name, "seconds": seconds}
            write_json(options.out / f"cuda-{name}.json", {**described, **result})
            show(name, {**described, **result})
            note(f"--- {name}: {seconds:.0f} s")
        except Exception:  # noqa: BLE001 (the other steps are worth having)
            traceback.print_exc()
            failed.append(name)
    if failed:
        note(f"failed: {', '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
