"""Where the time of a decode step goes: the host, the products, the memory.

    python -m benchmarks.profiling                                  # SmolLM2 on a CPU
    python -m benchmarks.profiling llama-1b:bfloat16 llama-8b:4bit  # random weights, as on a GPU

For each model and batch, in ms, medians of greedy steps in one bucket that is half full:

| | |
|---|---|
| step | a step whose token is waited for |
| call | until the function has returned a graph |
| encode | from there until `mx.async_eval` has returned: what else the host does |
| pipelined | a step where the next one is begun before the last one's token is waited for |
| products | nothing but the step's products with its weights |
| memory | the bytes that the step has to read, at the bandwidth of a copy |

and the primitives of the step by kind. A step cannot be faster than `memory`; where `pipelined` is
near `call` + `encode`, the host bounds it, and where it is near `products`, the products do. Writes
benchmarks/results/profile.json (cuda-profile.json).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import funcrt
from benchmarks import graphs, weights
from benchmarks.common import RESULTS, describe_run, measure_bandwidth, note, write_json
from funcrt import ops
from funcrt.buckets import Bucket
from funcrt.model import Model
from funcrt.packing import quantization_of
from funcrt.params import FLOATS

import mlx.core as mx

ROUNDS, CAPACITY, BATCHES = 30, 512, (1, 16)


def profile(model: Model, batch: int, bandwidth: float) -> dict[str, Any]:
    """One model and batch.

    Args:
        model: any.
        batch: rows.
        bandwidth: of a copy, GB/s.
    """
    plan = funcrt.BucketPlan(batch=[batch], tokens=[8], capacity=[CAPACITY])
    compiled, layout = model.compiled(plan), model.choose_layout(plan)
    state = compiled.init_cache(batch, CAPACITY)
    filled = CAPACITY // 2
    state["lengths"] = mx.full((batch,), filled, mx.int32)
    token, active = mx.ones((batch,), mx.int32), mx.ones((batch,), mx.bool_)
    times: dict[str, list[float]] = {"step": [], "call": [], "encode": []}
    for _ in range(3 + ROUNDS):
        begin = time.perf_counter()
        sampled, state = compiled.decode_greedy(token, active, state)
        called = time.perf_counter()
        mx.async_eval(sampled.tokens, state)
        encoded = time.perf_counter()
        token = sampled.tokens
        mx.eval(token)
        for name, seconds in zip(
            times, (time.perf_counter() - begin, called - begin, encoded - called), strict=True
        ):
            times[name].append(1000 * seconds)
    found = {name: statistics.median(values[3:]) for name, values in times.items()}
    waiting: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        sampled, state = compiled.decode_greedy(token, active, state)
        mx.async_eval(sampled.tokens, state)
        mx.eval(token)
        token = sampled.tokens
        waiting.append(1000 * (time.perf_counter() - begin))
    config = model.config.to_hf()
    cached = weights.cache_bytes(config, FLOATS[model.config.dtype].size)
    sizes = {name: array.nbytes for name, array in model.prepared.items()}
    read = weights.read_bytes(config, sizes) + batch * filled * cached
    kinds = graphs.count_step(model, "decode_greedy", Bucket(batch, 1, CAPACITY), layout)
    return {
        **found,
        "pipelined": statistics.median(waiting),
        "products": time_products(model, batch),
        "memory": read / bandwidth / 1e6,
        "primitives": kinds.total(),
        "most_primitives": dict(kinds.most_common(12)),
    }


def time_products(model: Model, batch: int) -> float:
    """Median ms of every matrix that a step multiplies with, one after the other."""
    params, dtype = model.prepared, FLOATS[model.config.dtype]
    tied = not any(name.startswith("lm_head") for name in params)
    names = [
        name.removesuffix(".weight")
        for name, array in params.items()
        if name.endswith(".weight") and array.ndim == 2 and (tied or "embed_tokens" not in name)
    ]
    widths = {name: _width(params, name) for name in names}
    inputs = {width: mx.ones((batch, 1, width), dtype) for width in set(widths.values())}
    mx.eval(inputs)

    def run() -> list[mx.array]:
        return [ops.linear(params, name, inputs[widths[name]]) for name in names]

    function = mx.compile(run)
    times = []
    for _ in range(3 + ROUNDS):
        begin = time.perf_counter()
        mx.eval(function())
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def _width(params: dict[str, mx.array], name: str) -> int:
    """Inputs of a dense or packed matrix."""
    if f"{name}.scales" not in params:
        return int(params[f"{name}.weight"].shape[1])
    width = params[f"{name}.weight"].shape[1] * 32 // weights.BITS
    assert quantization_of(params, name, width) is not None
    return int(width)


def run(sources: Sequence[str], batches: Sequence[int]) -> dict[str, Any]:
    """All models and batches."""
    bandwidth = measure_bandwidth()
    models: dict[str, dict[str, Any]] = {}
    for source in sources:
        if source == "smollm2":
            with tempfile.TemporaryDirectory() as scratch:
                folders, _ = weights.make_smollm2(Path(scratch))
                model = weights.make_model(str(folders["packed"]))
        else:
            model = weights.make_model(source)
        for batch in batches:
            note(f"{source}, batch {batch}")
            models[f"{source}, batch {batch}"] = profile(model, batch, bandwidth["copy"])
        del model
        mx.clear_cache()
    return {**describe_run("benchmarks.profiling"), "bandwidth_gb_s": bandwidth, "models": models}


def main() -> None:
    """Run, print, and keep the result."""
    from funcrt.cli import terminal

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("sources", nargs="*", default=["smollm2"])
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    result = run(options.sources, [int(batch) for batch in options.batches.split(",")])
    name = "cuda-profile.json" if result["device"] == "gpu" else "profile.json"
    write_json(options.out / name, result)
    columns = ("step", "call", "encode", "pipelined", "products", "memory")
    terminal.table(
        "Decode steps, ms",
        ("", *columns, "primitives"),
        [
            (name, *(f"{found[column]:.2f}" for column in columns), str(found["primitives"]))
            for name, found in result["models"].items()
        ],
    )


if __name__ == "__main__":
    main()
