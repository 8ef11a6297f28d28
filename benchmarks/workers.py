"""One subject in its own process: which BLAS MLX uses is settled per process, and so is memory.

    python -m benchmarks.workers SPEC     # a `benchmarks.subjects.Spec` as JSON

says what is known of the subject, then reads one JSON request a line (`{"prompts": [[ids], ...],
"max_tokens": n}`) and answers with one line each, see `measure`. A subject that cannot be made
answers `{"failed": REASON}` once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks import rivals
from benchmarks.subjects import Prompts, Spec, Subject, funcrt_subject

KINDS: Mapping[str, Callable[[Spec], Subject]] = {
    "compiled": funcrt_subject,
    "eager": funcrt_subject,
    "bundle": funcrt_subject,
    "mlx-lm": rivals.mlx_lm_subject,
    "mlx-lm-batch": rivals.mlx_lm_batch_subject,
    "transformers": rivals.transformers_subject,
    "cpp": rivals.cpp_subject,
}


def measure(subject: Subject, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
    """Time prompts that arrive together.

    Returns:
        `seconds` until the last token; `first_token_s` of each prompt; `decode_tok_s`, see
        `decode_rate`; `token_s`, the time from each token to the next (empty for several prompts);
        `tokens` of each prompt; `peak_bytes` of arrays, weights included; `report` of the subject.
    """
    subject.reset_peak()
    begin = time.perf_counter()
    times: list[float] = []
    first: dict[int, float] = {}
    tokens: list[list[int]] = [[] for _ in prompts]
    for row, token in subject.run(prompts, max_tokens):
        times.append(time.perf_counter() - begin)
        first.setdefault(row, times[-1])
        tokens[row].append(token)
    return {
        "seconds": times[-1],
        "first_token_s": [first[row] for row in range(len(prompts))],
        "decode_tok_s": decode_rate(times),
        "token_s": [b - a for a, b in pairwise(times)] if len(prompts) == 1 else [],
        "tokens": tokens,
        "peak_bytes": subject.peak(),
        "report": subject.report(),
    }


def decode_rate(times: Sequence[float]) -> float | None:
    """Tokens per second between tokens that came at these times; None for a single one.

    Who works ahead hands the first token out when the second is nearly there, and the last one
    without delay: of four or more tokens, neither counts.
    """
    inner = times[1:-1] if len(times) >= 4 else times
    return (len(inner) - 1) / (inner[-1] - inner[0]) if len(inner) > 1 else None


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print, in C too; answers must stay parseable

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    spec = Spec(**json.loads(sys.argv[1]))
    try:
        subject = KINDS[spec.kind](spec)
    except (ImportError, FileNotFoundError) as error:  # what is not installed is no fault
        answer({"failed": str(error)})
        return
    answer(subject.facts)
    for line in sys.stdin:
        answer(measure(subject, **json.loads(line)))


if __name__ == "__main__":
    main()
