"""What was set out to be reached, and where each number of it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import ragged, sequence

Result = Mapping[str, Any]
Pick = Callable[[Result], float]
GPU = "python -m benchmarks.cuda --steps"


@dataclass(frozen=True)
class Goal:
    """One number to reach.

    Attributes:
        goal: what it is.
        target: the number.
        file: the result that has the value.
        pick: finds the value in it; raises LookupError or StopIteration where it is not.
        command: that makes the file.
        at_most: it must not exceed the target; else it must reach it.
        unit: of both.
        note: what bounds it, if it is missed; why it was not run, if it was not.
    """

    goal: str
    target: float
    file: str
    pick: Pick
    command: str
    at_most: bool = False
    unit: str = "times"
    note: str = ""


def ratio(what: str, ours: str, theirs: str, place: int = 0) -> Pick:
    """A ratio of a case that compares two subjects."""

    def pick(result: Result) -> float:
        found = result["cases"][place]["ratios"]
        key = (what, ours, theirs)
        return next(r["ratio"] for r in found if (r["what"], r["of"], r["to"]) == key)

    return pick


def inverse(pick: Pick) -> Pick:
    """Ours over theirs, where the ratio is above 1 if ours is better."""
    return lambda result: 1 / pick(result)


def worst(pick: Callable[..., Pick], *arguments: str) -> Pick:
    """The least of what a pick gives for both cases of a result, a short and a long prompt."""
    return lambda result: min(pick(*arguments, 0)(result), pick(*arguments, 1)(result))


def share(subject: str, of: str, place: int = 0) -> Pick:
    """Percent of a measured bandwidth that a subject's decode steps reach."""

    def pick(result: Result) -> float:
        case = result["cases"][place]
        return 100.0 * case["subjects"][subject]["gb_s"] / case["bandwidth_gb_s"][of]

    return pick


def _cpu(goal: str, target: float, pick: Pick, file: str, **more: Any) -> Goal:
    return Goal(
        f"CPU, {goal}", target, f"{file}.json", pick, f"python -m benchmarks.{file}", **more
    )


def _gpu(goal: str, target: float, pick: Pick, step: str, **more: Any) -> Goal:
    return Goal(f"H200, {goal}", target, f"cuda-{step}.json", pick, f"{GPU} {step}", **more)


_S = (sequence.OURS, sequence.BFLOAT16)
_SAME = (sequence.OURS, sequence.FLOAT32)
_GPU = ("funcrt", "mlx-lm")
_BUNDLE = "funcrt-bundle"

GOALS = [
    _cpu("SmolLM2, one sequence: decode", 2.2, ratio("decode_tok_s", *_S), "sequence"),
    _cpu("SmolLM2, one sequence: first token", 8, ratio("first_token_s", *_S), "sequence"),
    _cpu(
        "SmolLM2, one sequence (stretch): share of the read bandwidth", 70,
        share(sequence.OURS, "read"), "sequence", unit="%",
        note="Products take seven tenths of a step (profile.json); a loop of them in C reads the "
        "weights at nine tenths of the bandwidth. Beside them MLX's host keeps a core busy for 4 "
        "to 6 ms of each step, 4 to 5 us for each of a thousand nodes, a quarter of it in malloc: "
        "with two cores that is time which the products do not have. The read bandwidth of this "
        "run, 38.6 GB/s, is low: with the 58 to 64 of others the share is 36 to 40 %. Tried: "
        "weights stored transposed (1 to 2 %), settings of malloc (4 % at most), huge pages (4 % "
        "of the products in C). But for profile.json, these were scripts that are not kept.",
    ),
    _cpu(
        "SmolLM2 against mlx-lm float32 with the same BLAS: decode", 1.2,
        ratio("decode_tok_s", *_SAME), "sequence",
        note="Both multiply alike, two thirds of our step; the rest is what MLX does on the host "
        "for each node. Single rounds differ as the memory of a shared machine does.",
    ),
    _cpu(
        "SmolLM2 against mlx-lm float32 with the same BLAS: first token", 1.2,
        ratio("first_token_s", *_SAME), "sequence",
    ),
    _cpu(
        "4-bit checkpoint as published, one sequence: decode", 30,
        ratio("decode_tok_s", sequence.OURS, sequence.FOUR_BIT, 1), "sequence",
    ),
    _cpu(
        "ragged 8 requests, mlx-lm in bfloat16", 5,
        ratio("tokens_per_s", ragged.OURS, ragged.BFLOAT16), "ragged",
    ),
    _gpu(
        "1B bf16, one sequence of 128 and one of 2048 tokens, the worse: decode", 1.4,
        worst(ratio, "decode_tok_s", *_GPU), "1b",
    ),
    _gpu(
        "8B bf16, one sequence of 128 and one of 2048 tokens, the worse: decode", 1.1,
        worst(ratio, "decode_tok_s", *_GPU), "8b",
    ),
    _gpu(
        "8B bf16, the same (stretch): share of the copy bandwidth", 80,
        worst(share, "funcrt", "copy"), "8b", unit="%",
    ),
    _gpu("1B bf16, ragged 64x128, batch 16", 2.5, ratio("tokens_per_s", *_GPU), "1b-ragged"),
    _gpu("8B bf16, ragged 64x128, batch 16", 1.9, ratio("tokens_per_s", *_GPU), "8b-ragged"),
    _gpu("8B 4-bit, ragged 64x128, batch 16", 5, ratio("tokens_per_s", *_GPU), "8b-4bit-ragged"),
    _gpu("8B bf16, prefill of 2048 tokens", 1.0, ratio("first_token_s", *_GPU, 1), "8b"),
    _gpu("8B 4-bit, prefill of 2048 tokens", 3, ratio("first_token_s", *_GPU, 1), "8b-4bit"),
    _cpu(
        "speculation on repetitive text against our own plain decode", 2,
        ratio("decode_tok_s", "funcrt-ngram", "funcrt-compiled"), "speculation",
    ),
    _cpu("cold start, bundle to first token", 0.3, lambda r: r["ratio"], "cold", at_most=True),
    _gpu(
        "cold start, bundle to first token", 0.3, lambda r: r["ratio"], "cold", at_most=True,
    ),
    _cpu("step 8,000 against step 100", 1.02, lambda r: r["ratio"], "steps", at_most=True),
    _gpu(
        "step 8,000 against step 100", 1.02, lambda r: r["ratio"], "steps", at_most=True,
        note="The kernels of step 8,000 take 65 us more than those of step 100, of 940 "
        "(cuda-steps-trace.json); what else differs is the host's.",
    ),
    _cpu(
        "peak memory, SmolLM2 from a bundle, mlx-lm in float32 too", 1.05,
        inverse(ratio("peak_bytes", _BUNDLE, sequence.FLOAT32)), "sequence", at_most=True,
    ),
    _gpu(
        "peak memory, 1B bf16, one sequence of 128 and one of 2048 tokens, the worse", 1.05,
        inverse(worst(ratio, "peak_bytes", *_GPU)), "1b", at_most=True,
    ),
]  # fmt: skip


def judge(goal: Goal, result: Result | None) -> dict[str, Any]:
    """A row of summary.json; a goal that was not measured has no value and is not met.

    Args:
        goal: what was to be reached.
        result: the content of its file; None if there is none.
    """
    value = None
    on_h200 = result is not None and "H200" in result["machine"]
    if result is not None and on_h200 != goal.goal.startswith("H200"):
        result = None  # somebody else's machine
    if result is not None:
        try:
            value = goal.pick(result)
        except (LookupError, StopIteration):
            result = None
    met = value is not None and (value <= goal.target if goal.at_most else value >= goal.target)
    row: dict[str, Any] = {
        "goal": goal.goal,
        "target": f"{'≤' if goal.at_most else '≥'} {goal.target:g}",
        "value": None if value is None else round(value, 3),
        "unit": goal.unit,
        "machine": None if result is None else result["machine"],
        "command": goal.command,
        "date": None if result is None else result["date"],
        "met": met,
    }
    if value is None:
        row["note"] = f"not run: {goal.note}" if goal.note else "not run"
    elif not met and goal.note:
        row["note"] = goal.note
    return row
