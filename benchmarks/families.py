"""Other kinds of model on the CPU, random weights: a small MoE, a hybrid, a llama of 1B.

    python -m benchmarks.families               # part of `make bench`: the small ones
    python -m benchmarks.families --llama-1b    # make bench-full

Writes benchmarks/results/families.json (families-llama-1b.json).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks import sequence
from benchmarks.common import RESULTS, describe_run, measure_bandwidth, write_json
from benchmarks.prompts import draw
from benchmarks.subjects import Spec
from benchmarks.team import Team
from benchmarks.weights import SHAPES

OURS, THEIRS = "funcrt-compiled", "mlx-lm-float32-same-blas"
PAIRS = [("decode_tok_s", OURS, THEIRS), ("first_token_s", OURS, THEIRS)]
# (shape, form, prompt tokens, new tokens, rounds). A CPU multiplies experts in float32 alone.
SMALL = [("moe", "float32", 64, 64, 3), ("hybrid", "float32", 64, 64, 3)]
LLAMA = [("llama-1b", "float32", 32, 16, 2), ("llama-1b", "4bit", 32, 16, 2)]


def run(cases: Sequence[tuple[str, str, int, int, int]]) -> dict[str, Any]:
    """Every case against mlx-lm's module, with the same BLAS in both."""
    bandwidth = measure_bandwidth()
    results = []
    for shape, form, prompt_tokens, new_tokens, rounds in cases:
        source = f"{shape}:{form}"
        plan = {"batch": [1], "tokens": [prompt_tokens], "capacity": [256]}
        # mlx-lm multiplies packed matrices of a CPU packed: minutes for what takes seconds here.
        dense = f"{shape}:float32"
        specs = {
            OURS: Spec("compiled", source, plan),
            THEIRS: Spec("mlx-lm", dense, same_blas=True),
        }
        warm, *measured = draw([prompt_tokens], 1 + rounds, SHAPES[shape]["vocab_size"])
        with Team(specs) as team:
            team.warm(warm, 4)
            case = sequence.run_case(team, measured, new_tokens, bandwidth, PAIRS)
        results.append({"model": f"{shape} {form}", **case})
    return {**describe_run("benchmarks.families"), "model": "random weights", "cases": results}


def main() -> None:
    """Run, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-1b", action="store_true", help="a llama of 1B instead")
    options = parser.parse_args()
    result = run(LLAMA if options.llama_1b else SMALL)
    name = "families-llama-1b.json" if options.llama_1b else "families.json"
    write_json(RESULTS / name, result)
    sequence.show(result)


if __name__ == "__main__":
    main()
