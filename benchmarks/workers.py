"""One subject of a benchmark in its own process: which BLAS MLX uses is settled per process.

    python -m benchmarks.workers SUBJECT FOLDER PLAN

reads one JSON request a line (`{"prompts": [[ids], ...], "max_tokens": n}`) and answers with one
line each, see `measure`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Plan = Mapping[str, Sequence[int]]


@dataclass
class Subject:
    """What is measured.

    Attributes:
        run: prompts that arrive together and how many new tokens each gets -> (row, token) as
            they come.
        report: what the subject itself says of the last run.
    """

    run: Callable[[Prompts, int], Iterator[tuple[int, int]]]
    report: Callable[[], dict[str, Any]] = field(default=dict)


def load_mlx_lm(folder: str, dtype: str, same_blas: bool) -> tuple[Any, list[int]]:
    """An mlx-lm model with its weights cast to `dtype` ("" keeps them), and its end tokens."""
    if same_blas:
        from funcrt import blas

        blas.load()
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    model, config = load_model(Path(folder))
    if dtype:
        kind = getattr(mx, dtype)

        def cast(array: mx.array) -> mx.array:
            return array.astype(kind) if mx.issubdtype(array.dtype, mx.floating) else array

        model.update(tree_map(cast, model.parameters()))
    mx.eval(model.parameters())
    ends: Any = config["eos_token_id"]
    return model, [int(token) for token in (ends if isinstance(ends, list) else [ends])]


def mlx_lm_subject(folder: str, dtype: str, same_blas: bool) -> Subject:
    """`mlx_lm.generate.generate_step`, greedy, one prompt after the other."""
    model, _ = load_mlx_lm(folder, dtype, same_blas)
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    def run(prompts: Prompts, max_tokens: int) -> Iterator[tuple[int, int]]:
        for row, prompt in enumerate(prompts):
            for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
                yield row, int(token)

    return Subject(run)


def mlx_lm_batch_subject(folder: str, dtype: str, same_blas: bool) -> Subject:
    """`mlx_lm.generate.BatchGenerator`, driven as `batch_generate` drives it, with its defaults.

    They suit eight requests: up to 8 prompts in one prefill, up to 32 rows decoded together.
    """
    model, ends = load_mlx_lm(folder, dtype, same_blas)
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator

    def run(prompts: Prompts, max_tokens: int) -> Iterator[tuple[int, int]]:
        generator: Any = BatchGenerator(model, stop_tokens=[[token] for token in ends])
        ids = generator.insert(prompts, [max_tokens] * len(prompts))
        rows = {uid: row for row, uid in enumerate(ids)}
        while responses := generator.next_generated():
            for response in responses:
                yield rows[response.uid], int(response.token)
        # It has begun one step more than it needs; whoever comes next shall not pay for that.
        mx.synchronize(generator.stream)
        generator.close()

    return Subject(run)


def funcrt_subject(folder: str, plan: Plan | None) -> Subject:
    """`funcrt.Engine` over a bundle (`plan` None) or over a model compiled in this process."""
    import funcrt

    if plan is None:
        engine = funcrt.Engine(funcrt.load_bundle(folder))
    else:
        engine = funcrt.Engine(funcrt.load_model(folder), funcrt.BucketPlan(**plan))

    last: dict[str, Any] = {}

    def run(prompts: Prompts, max_tokens: int) -> Iterator[tuple[int, int]]:
        before = engine.stats
        for chunk in engine.stream(prompts, max_tokens=max_tokens):
            yield chunk.index, chunk.token
        spent = engine.stats - before
        last["reused_tokens"] = spent.reused_tokens
        last["padding"] = {
            "tokens": spent.token_waste,
            "rows": spent.row_waste,
            "slots": spent.slot_waste,
        }

    return Subject(run, lambda: dict(last))


def measure(subject: Subject, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
    """Time prompts that arrive together.

    Returns:
        `seconds` until the last token; `first_token_s` of each prompt; `decode_tok_s`, tokens per
        second between the first and the last (None for a single one); `tokens` of each prompt;
        `peak_bytes` of MLX's allocator, weights included; `report` of the subject.
    """
    import mlx.core as mx

    mx.reset_peak_memory()
    begin = time.perf_counter()
    times: list[float] = []
    first: dict[int, float] = {}
    tokens: list[list[int]] = [[] for _ in prompts]
    for row, token in subject.run(prompts, max_tokens):
        times.append(time.perf_counter() - begin)
        first.setdefault(row, times[-1])
        tokens[row].append(token)
    after = times[-1] - times[0]
    return {
        "seconds": times[-1],
        "first_token_s": [first[row] for row in range(len(prompts))],
        "decode_tok_s": (len(times) - 1) / after if after else None,
        "tokens": tokens,
        "peak_bytes": mx.get_peak_memory(),
        "report": subject.report(),
    }


def make_subject(name: str, folder: str, plan: Plan) -> Subject:
    """The subject that `name` stands for."""
    if name == "funcrt-bundle":
        return funcrt_subject(folder, None)
    if name.startswith("funcrt-"):
        return funcrt_subject(folder, plan)
    dtypes = {
        "mlx-lm-bfloat16": "bfloat16",
        "mlx-lm-float32-same-blas": "float32",
        "mlx-lm-4bit": "float16",  # scales and norms, as 4-bit checkpoints are published
    }
    plain = name.removesuffix("-batch")
    make = mlx_lm_subject if plain == name else mlx_lm_batch_subject
    return make(folder, dtypes.get(plain, ""), plain.endswith("same-blas"))


def main() -> None:
    """Answer requests until standard input ends."""
    name, folder, plan = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries may print; answers must stay parseable
    subject = make_subject(name, folder, plan)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(subject, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
