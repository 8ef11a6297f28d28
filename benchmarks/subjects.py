"""What is measured: how a subject is described, what it has to do, and funcrt in its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import weights

Prompts = list[list[int]]
Tokens = Iterator[tuple[int, int]]
ROOT = Path(__file__).resolve().parent.parent
CPP_HOST = ROOT / "exported" / "hosts" / "cpp" / "build" / "funcrt_run"


@dataclass(frozen=True)
class Spec:
    """How a worker makes a subject.

    Attributes:
        kind: a key of `benchmarks.workers.KINDS`.
        source: of the weights, see `benchmarks.weights`, or a bundle.
        plan: the buckets of a subject that compiles in its process.
        dtype: that mlx-lm's weights are cast to; "" keeps them.
        same_blas: mlx-lm gets the BLAS that funcrt loads.
        batch: rows that a batch of mlx-lm decodes together.
        speculate: the option of that name.
    """

    kind: str
    source: str
    plan: Mapping[str, Sequence[int]] | None = None
    dtype: str = ""
    same_blas: bool = False
    batch: int = 32
    speculate: str | None = None


def _mlx_peak() -> int:
    import mlx.core as mx

    return int(mx.get_peak_memory())


def _reset_mlx_peak() -> None:
    import mlx.core as mx

    mx.reset_peak_memory()


@dataclass
class Subject:
    """A subject, ready to run.

    Attributes:
        run: prompts that arrive together and how many new tokens each gets -> (row, token) as
            they come.
        facts: what is known of it before it runs: `read_bytes` of weights in a step of one row,
            `cache_bytes` of one token, `primitives` of a step.
        report: what the subject itself says of the last run.
        peak, reset_peak: most bytes of arrays since the last reset.
    """

    run: Callable[[Prompts, int], Tokens]
    facts: dict[str, Any] = field(default_factory=dict)
    report: Callable[[], dict[str, Any]] = field(default=dict)
    peak: Callable[[], int] = _mlx_peak
    reset_peak: Callable[[], None] = _reset_mlx_peak


def funcrt_subject(spec: Spec) -> Subject:
    """`funcrt.Engine` over a bundle, or over a model that is compiled in this process or not."""
    import funcrt

    if spec.kind == "bundle":
        bundle = funcrt.load_bundle(spec.source)
        engine = funcrt.Engine(bundle, speculate=spec.speculate)
        facts = _bundle_facts(bundle)
    else:
        assert spec.plan is not None
        plan = funcrt.BucketPlan(**spec.plan)
        model = weights.make_model(spec.source)
        model = _eager(model) if spec.kind == "eager" else model
        engine = funcrt.Engine(model, plan, speculate=spec.speculate)
        facts = _model_facts(model, plan)
    last: dict[str, Any] = {}

    def run(prompts: Prompts, max_tokens: int) -> Tokens:
        before = engine.stats
        for chunk in engine.stream(prompts, max_tokens=max_tokens):
            yield chunk.index, chunk.token
        spent = engine.stats - before
        last["reused_tokens"] = spent.reused_tokens
        last["traces"] = engine.compiled.traces.total()
        last["steps"] = spent.steps
        last["acceptance"] = spent.acceptance
        last["padding"] = {
            "tokens": spent.token_waste,
            "rows": spent.row_waste,
            "slots": spent.slot_waste,
        }

    return Subject(run, facts, lambda: dict(last))


def _eager(model: Any) -> Any:
    """The same model, whose step functions run without `mx.compile`."""
    import funcrt

    class Eager(funcrt.Model):
        def compiled(self, plan: Any = None, kv_bits: Any = None, eager: bool = True) -> Any:
            return super().compiled(plan, kv_bits, eager=True)

    return Eager(model.config, model.params)


def primitives(count: Callable[[], Mapping[str, int]]) -> dict[str, int]:
    """How many primitives a step has, if it can be exported at all."""
    try:
        return {"primitives": sum(count().values())}
    except (RuntimeError, ValueError):
        return {}


def _model_facts(model: Any, plan: Any) -> dict[str, Any]:
    from benchmarks.graphs import count_step
    from funcrt.buckets import Bucket
    from funcrt.params import FLOATS

    config = model.config.to_hf()
    sizes = {name: array.nbytes for name, array in model.prepared.items()}
    bucket, layout = Bucket(plan.batch[0], 1, plan.capacity[0]), model.choose_layout(plan)
    return {
        "read_bytes": weights.read_bytes(config, sizes),
        "cache_bytes": weights.cache_bytes(config, FLOATS[model.config.dtype].size),
        **primitives(lambda: count_step(model, "decode_greedy", bucket, layout)),
    }


def _bundle_facts(bundle: Any) -> dict[str, Any]:
    import math

    import mlx.core as mx

    arrays = bundle.target.prepared
    sizes = {a.name: math.prod(a.shape) * getattr(mx, a.dtype).size for a in arrays}
    states = [
        math.prod(size for size in entry.shape if isinstance(size, int))
        * getattr(mx, entry.dtype).size
        for entry in bundle.cache_spec
        if "S" in entry.shape
    ]
    return {"read_bytes": weights.read_bytes({}, sizes), "cache_bytes": sum(states)}
