"""Counters that do not depend on the machine: what tiny models of several kinds compute and keep.

    python -m benchmarks.counters       # remakes tests/counters.json, which a test compares with

They are exact, so that a step that got longer is noticed where no clock would: a change is either
meant, then this command is run and its result committed, or it is a mistake.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import converters
import funcrt
from benchmarks.common import write_json
from benchmarks.graphs import count_primitives, step_arguments
from benchmarks.subjects import ROOT
from funcrt.buckets import Bucket
from funcrt.model import Model
from tests.helpers import make_model
from tests.reference.golden import family_folder

import mlx.core as mx

FILE = ROOT / "tests" / "counters.json"
COMMAND = "python -m benchmarks.counters"
# Kind -> family whose tiny checkpoint stands for it.
FAMILIES = {
    "windows and soft caps": "gemma2",
    "sinks, windows and experts": "gpt_oss",
    "experts": "qwen3_moe",
    "latent attention, shared experts": "deepseek_v3",
    "short convolutions and attention": "lfm2",
    "recurrent": "mamba2",
    "delta rule, attention and experts": "qwen3_next",
    "learned positions": "gpt2",
}
LLAMAS = {"dense": ("float32", None), "16 bits": ("bfloat16", None), "packed cache": ("float32", 8)}
PLAN = funcrt.BucketPlan(batch=[2], tokens=[4, 8], capacity=[64])
STEPS = {  # name -> T
    "prefill": 8, "prefill_first": 8, "decode": 1, "decode_greedy": 1, "verify_greedy": 4,
}  # fmt: skip
Counters = dict[str, Any]


def kinds() -> list[str]:
    """What is counted."""
    return [*LLAMAS, *FAMILIES]


def count(kind: str) -> Counters:
    """The counters of one kind.

    Returns:
        `primitives` and `graph_bytes` of each step in one bucket, as exported; `state_bytes` of two
        rows and 64 slots; `traces` that two prompts and three steps of each kind of decoding made.
    """
    if kind in LLAMAS:
        weights, kv_bits = LLAMAS[kind]
        # Keys and values are packed in groups of 32.
        model = make_model(weights, **({"head_dim": 32} if kv_bits else {}))
    else:
        model, kv_bits = converters.load(family_folder(FAMILIES[kind]), dtype="float32"), None
    layout = model.choose_layout(PLAN, kv_bits)
    primitives, sizes = {}, {}
    for name, tokens in STEPS.items():
        bucket = Bucket(PLAN.batch[0], tokens, PLAN.capacity[0])
        function = model.flat_step(name, bucket, layout)
        arrays = step_arguments(model, name, bucket, layout)
        primitives[name] = count_primitives(function, arrays).total()
        sizes[name] = measure_graph(function, arrays)
    return {
        "primitives": primitives,
        "graph_bytes": sizes,
        "state_bytes": sum(
            array.nbytes
            for array in funcrt.cache.init_cache(
                model.cache_spec(layout), PLAN.batch[0], PLAN.capacity[0]
            ).values()
        ),
        "traces": count_traces(model, kv_bits),
    }


def measure_graph(function: Any, arrays: list[mx.array]) -> int:
    """Bytes of a graph's file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.mlxfn"
        mx.export_function(str(file), function, *arrays)
        return file.stat().st_size


def count_traces(model: Model, kv_bits: int | None) -> int:
    """Traces of a short generation: other values, lengths and idle rows must not add any."""
    compiled = model.compiled(PLAN, kv_bits)
    state = compiled.init_cache(2, 64)
    settings = [
        funcrt.sampling.make_settings(2, model.vocab_size, temperature=heat, seed=seed)
        for heat, seed in ((0.5, 1), (1.5, 2), (0.0, 3))
    ]
    for real in (8, 3):
        valid = mx.broadcast_to(mx.arange(8) < real, (2, 8))
        _, state = compiled.prefill(mx.full((2, 8), real, mx.int32), valid, state)
    for i in range(3):
        active = mx.array([True, i != 1])
        token = mx.array([5, 6 + i], dtype=mx.int32)
        greedy, state = compiled.decode_greedy(token, active, state)
        drawn, state = compiled.decode(greedy.tokens, active, settings[i], state)
        mx.eval(drawn.tokens, state)
    return compiled.traces.total()


def main() -> None:
    """Remake the file."""
    write_json(FILE, {kind: count(kind) for kind in kinds()})


if __name__ == "__main__":
    main()
