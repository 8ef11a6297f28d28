"""One subject of a benchmark in its own process: which BLAS MLX uses is settled per process.

    python -m benchmarks.workers SUBJECT FOLDER

reads one JSON request a line (`{"prompt": [ids], "max_tokens": n}`) and answers with one line each:
seconds to the first token, tokens per second after it, and the ids.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Subject = Callable[[list[int], int], Iterator[int]]


def mlx_lm_subject(folder: str, dtype: str, same_blas: bool) -> Subject:
    """`mlx_lm.generate.generate_step`, greedy, with weights cast to `dtype` ("" keeps them)."""
    if same_blas:
        from funcrt import blas

        blas.load()
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(folder))
    if dtype:
        kind = getattr(mx, dtype)

        def cast(array: mx.array) -> mx.array:
            return array.astype(kind) if mx.issubdtype(array.dtype, mx.floating) else array

        model.update(tree_map(cast, model.parameters()))
    mx.eval(model.parameters())

    def run(prompt: list[int], max_tokens: int) -> Iterator[int]:
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
            yield int(token)

    return run


def funcrt_subject(folder: str, plan: dict[str, list[int]] | None) -> Subject:
    """`funcrt.Engine` over a bundle (`plan` None) or over a model compiled in this process."""
    import funcrt

    if plan is None:
        engine = funcrt.Engine(funcrt.load_bundle(folder))
    else:
        engine = funcrt.Engine(funcrt.load_model(folder), funcrt.BucketPlan(**plan))

    def run(prompt: list[int], max_tokens: int) -> Iterator[int]:
        for chunk in engine.stream([prompt], max_tokens=max_tokens):
            yield chunk.token

    return run


def measure(subject: Subject, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Time one request."""
    begin = time.perf_counter()
    times: list[float] = []
    tokens: list[int] = []
    for token in subject(prompt, max_tokens):
        times.append(time.perf_counter() - begin)
        tokens.append(token)
    after = times[-1] - times[0]
    return {
        "first_token_s": times[0],
        "decode_tok_s": (len(times) - 1) / after if after else None,
        "tokens": tokens,
    }


def make_subject(name: str, folder: str, plan: dict[str, list[int]]) -> Subject:
    """The subject that `name` stands for."""
    if name == "funcrt-bundle":
        return funcrt_subject(folder, None)
    if name == "funcrt-compiled":
        return funcrt_subject(folder, plan)
    dtypes = {
        "mlx-lm-bfloat16": "bfloat16",
        "mlx-lm-float32-same-blas": "float32",
        "mlx-lm-4bit": "float16",  # scales and norms, as 4-bit checkpoints are published
    }
    return mlx_lm_subject(folder, dtypes.get(name, ""), name.endswith("same-blas"))


def main() -> None:
    """Answer requests until standard input ends."""
    name, folder, plan = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    subject = make_subject(name, folder, plan)
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries may print; answers must stay parseable
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(subject, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
