"""One sequence on the CPU: funcrt in its forms against mlx-lm, same weights, alternating, medians.

    python -m benchmarks.sequence           # part of `make bench`
    python -m benchmarks.sequence --long    # 128 and 2048 tokens, 256 new: `make bench-full`

Prints the tables and writes benchmarks/results/sequence.json (sequence-long.json).
`run_case` and `summarize` serve `benchmarks.cuda`, too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    RESULTS,
    Run,
    Runs,
    compare,
    describe_run,
    keep,
    measure_bandwidth,
    note,
    write_json,
)
from benchmarks.prompts import cut
from benchmarks.subjects import Prompts, Spec
from benchmarks.team import Team
from benchmarks.weights import make_smollm2

OURS, BFLOAT16, FLOAT32 = "funcrt-compiled", "mlx-lm-bfloat16", "mlx-lm-float32-same-blas"
FOUR_BIT = "mlx-lm-4bit"
Plan = dict[str, list[int]]
WARM_TOKENS = 39
# (prompt tokens, new tokens, rounds, plan)
SHORT = [(39, 32, 5, Plan(batch=[1], tokens=[40], capacity=[128]))]
LONG = [
    (128, 256, 2, Plan(batch=[1], tokens=[128], capacity=[512])),
    (2048, 256, 1, Plan(batch=[1], tokens=[512], capacity=[2560])),
]
FOUR_BIT_CASE = (6, 6, 1, Plan(batch=[1], tokens=[8], capacity=[128]))  # mlx-lm takes a minute
PAIRS = [
    ("decode_tok_s", OURS, BFLOAT16),
    ("first_token_s", OURS, BFLOAT16),
    ("decode_tok_s", OURS, FLOAT32),
    ("first_token_s", OURS, FLOAT32),
    ("decode_tok_s", "funcrt-bundle", FLOAT32),
    ("first_token_s", "funcrt-bundle", FLOAT32),
    ("peak_bytes", "funcrt-bundle", FLOAT32),
    ("decode_tok_s", OURS, "funcrt-eager"),
    ("decode_tok_s", "funcrt-bundle", OURS),
    ("decode_tok_s", "funcrt-cpp", "funcrt-bundle"),
    ("decode_tok_s", OURS, FOUR_BIT),
    ("first_token_s", OURS, FOUR_BIT),
]
LOWER_IS_BETTER = ("first_token_s", "peak_bytes")


def run_case(
    team: Team,
    rounds: Sequence[Prompts],
    new_tokens: int,
    bandwidth: Mapping[str, float],
    pairs: Sequence[tuple[str, str, str]],
) -> dict[str, Any]:
    """Measure prompts of one length, one at a time, on subjects that are warm.

    Args:
        team: the subjects.
        rounds: one prompt each.
        new_tokens: that each gets.
        bandwidth: GB/s by `benchmarks.bandwidth`.
        pairs: (what, ours, theirs) to compare.

    Returns:
        What was asked for, `subjects` summed up, `ratios`, and the `runs`.
    """
    runs = team.alternate(rounds, new_tokens)
    if "read" in bandwidth:  # a CPU, on which other work slows a copy down, too
        bandwidth = {name: max(bandwidth[name], now) for name, now in measure_bandwidth().items()}
    prompt_tokens = len(rounds[0][0])
    context = prompt_tokens + new_tokens // 2
    found = (
        compare(runs, what, ours, theirs, lower_is_better=what in LOWER_IS_BETTER)
        for what, ours, theirs in pairs
    )
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "bandwidth_gb_s": dict(bandwidth),
        "subjects": {
            name: summarize(measured, team.facts[name], context, bandwidth)
            for name, measured in runs.items()
        },
        "left_out": dict(team.left_out),
        "ratios": [ratio for ratio in found if ratio is not None],
        "same_tokens": agreements(runs),
        "runs": keep(runs),
    }


def summarize(
    runs: Sequence[Run], facts: Mapping[str, Any], context: int, bandwidth: Mapping[str, float]
) -> dict[str, Any]:
    """Medians of one subject.

    Args:
        runs: its runs, of one prompt each.
        facts: what is known of it.
        context: tokens in the cache, in the middle of the run.
        bandwidth: GB/s.

    Returns:
        `gb_s` counts the bytes that a step has to read, weights and cached tokens, and no other;
        `share` is its share of the bandwidth of a copy.
    """
    decode = statistics.median(run["decode_tok_s"] for run in runs)
    found = {
        "first_token_s": statistics.median(run["first_token_s"][0] for run in runs),
        "decode_tok_s": decode,
        "ms_step": 1000 / decode,
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        **facts,
    }
    if "read_bytes" in facts:
        read = facts["read_bytes"] + context * facts["cache_bytes"]
        found["gb_s"] = read * decode / 1e9
        found["share"] = found["gb_s"] / bandwidth["copy"]
    if "traces" in runs[-1]["report"]:
        found["traces"] = runs[-1]["report"]["traces"]
    return found


def agreements(runs: Runs) -> dict[str, str]:
    """How many of its prompts a subject continues like the first one of ours."""
    reference = next((runs[name] for name in (OURS, "funcrt") if name in runs), None)
    if reference is None:
        return {}
    return {
        name: f"{sum(a['tokens'] == b['tokens'] for a, b in zip(found, reference))} of {len(found)}"  # noqa: B905
        for name, found in runs.items()
    }


def make_specs(folders: Mapping[str, Path], plan: Plan) -> dict[str, Spec]:
    """The subjects that read SmolLM2."""
    dense, packed, bundle = (str(folders[name]) for name in ("dense", "packed", "bundle"))
    return {
        BFLOAT16: Spec("mlx-lm", dense, dtype="bfloat16"),
        FLOAT32: Spec("mlx-lm", dense, dtype="float32", same_blas=True),
        "funcrt-eager": Spec("eager", packed, plan),
        OURS: Spec("compiled", packed, plan),
        "funcrt-bundle": Spec("bundle", bundle),
        "funcrt-cpp": Spec("cpp", bundle),
    }


def run(cases: Sequence[tuple[int, int, int, Plan]], with_packed: bool) -> dict[str, Any]:
    """All cases, with another prompt in every round."""
    bandwidth = measure_bandwidth()
    results = []
    for prompt_tokens, new_tokens, rounds, plan in cases:
        with tempfile.TemporaryDirectory() as scratch:
            note(f"{prompt_tokens} + {new_tokens}: making the model's folders and the bundle")
            folders, ids = make_smollm2(Path(scratch), plan)
            warm, *measured = cut(repeat(ids, prompt_tokens), [prompt_tokens], 1 + rounds)
            with Team(make_specs(folders, plan)) as team:
                team.warm([warm[0][:WARM_TOKENS]], 4)
                if prompt_tokens > WARM_TOKENS:
                    team.warm(warm, 4, slow={BFLOAT16: (0, 0)})  # minutes for the same kernels
                results.append(run_case(team, measured, new_tokens, bandwidth, PAIRS))
            if with_packed:
                results.append(run_packed(folders["packed"], ids, bandwidth))
    return {**describe_run("benchmarks.sequence"), "model": "SmolLM2-135M", "cases": results}


def run_packed(folder: Path, ids: list[int], bandwidth: Mapping[str, float]) -> dict[str, Any]:
    """The 4-bit checkpoint as it is published, whose products mlx-lm computes packed."""
    prompt_tokens, new_tokens, rounds, plan = FOUR_BIT_CASE
    # Its scales and norms in float16, as 4-bit checkpoints are published.
    specs = {
        FOUR_BIT: Spec("mlx-lm", str(folder), dtype="float16"),
        OURS: Spec("compiled", str(folder), plan),
    }
    warm, *measured = cut(ids, [prompt_tokens], 1 + rounds)
    with Team(specs) as team:
        team.warm([warm[0][:2]], 2)
        team.warm(warm, new_tokens, slow={FOUR_BIT: (0, 0)})
        return run_case(team, measured, new_tokens, bandwidth, PAIRS)


def repeat(ids: list[int], count: int) -> list[int]:
    """`ids` again and again, at least `count` of them."""
    return ids * -(-count // len(ids))


def show(result: Mapping[str, Any]) -> None:
    """Print a table for each case, and its ratios."""
    from funcrt.cli import terminal

    def shown(subject: Mapping[str, Any], key: str, form: str) -> str:
        return form.format(subject[key]) if key in subject else ""

    for case in result["cases"]:
        terminal.table(
            f"{result['model']}, {case['prompt_tokens']}-token prompt + {case['new_tokens']} new, "
            f"{result['machine']}",
            ("subject", "first token, s", "tokens/s", "ms/step", "GB/s", "share of a copy",
             "peak", "primitives"),
            [
                (
                    name,
                    f"{s['first_token_s']:.3f}",
                    f"{s['decode_tok_s']:.2f}",
                    f"{s['ms_step']:.2f}",
                    shown(s, "gb_s", "{:.1f}"),
                    f"{100 * s['share']:.0f} %" if "share" in s else "",
                    f"{s['peak_bytes'] / 1e6:.0f} MB",
                    shown(s, "primitives", "{}"),
                )
                for name, s in case["subjects"].items()
            ],
        )  # fmt: skip
        show_ratios(case["ratios"])


def show_ratios(ratios: Sequence[Mapping[str, Any]]) -> None:
    """Print ratios, their lowest rounds and what they compare."""
    from funcrt.cli import terminal

    terminal.table(
        "Ratios (above 1: the first is better)",
        ("", "ratio", "lowest round"),
        [
            (f"{r['what']}: {r['of']} to {r['to']}", f"{r['ratio']:.2f}",
             f"{min(r['by_round']):.2f}")
            for r in ratios
        ],
    )  # fmt: skip


def main() -> None:
    """Run, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="long prompts instead")
    parser.add_argument("--skip-4bit", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with_packed = not (options.skip_4bit or options.long)
    result = run(LONG if options.long else SHORT, with_packed)
    name = "sequence-long.json" if options.long else "sequence.json"
    write_json(options.out or RESULTS / name, result)
    show(result)


if __name__ == "__main__":
    main()
