"""What is measured: funcrt in its forms, and what a user would run instead."""

from __future__ import annotations

import os
import resource
import subprocess
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
        kind: a key of `KINDS`.
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


def _primitives(count: Callable[[], Mapping[str, int]]) -> dict[str, int]:
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
    bucket = Bucket(plan.batch[0], 1, plan.capacity[0])
    return {
        "read_bytes": weights.read_bytes(config, sizes),
        "cache_bytes": weights.cache_bytes(config, FLOATS[model.config.dtype].size),
        **_primitives(lambda: count_step(model, "decode_greedy", bucket)),
    }


def _bundle_facts(bundle: Any) -> dict[str, Any]:
    import math

    import mlx.core as mx

    arrays = bundle.manifest.params.prepared[bundle.device]
    sizes = {a.name: math.prod(a.shape) * getattr(mx, a.dtype).size for a in arrays}
    states = [
        math.prod(size for size in entry.shape if isinstance(size, int))
        * getattr(mx, entry.dtype).size
        for entry in bundle.cache_spec
        if "S" in entry.shape
    ]
    return {"read_bytes": weights.read_bytes({}, sizes), "cache_bytes": sum(states)}


def mlx_lm_subject(spec: Spec) -> Subject:
    """`mlx_lm.generate.generate_step`, greedy, one prompt after the other."""
    model = _load_mlx_lm(spec)
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    def run(prompts: Prompts, max_tokens: int) -> Tokens:
        for row, prompt in enumerate(prompts):
            for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
                yield row, int(token)

    return Subject(run, _mlx_lm_facts(model, spec))


def mlx_lm_batch_subject(spec: Spec) -> Subject:
    """`mlx_lm.generate.BatchGenerator`, driven as `batch_generate` drives it.

    `spec.batch` rows are decoded together; a prefill takes up to 8 prompts, its default.
    """
    model = _load_mlx_lm(spec)
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator

    def run(prompts: Prompts, max_tokens: int) -> Tokens:
        generator: Any = BatchGenerator(
            model, completion_batch_size=spec.batch, prefill_batch_size=min(8, spec.batch)
        )
        ids = generator.insert(prompts, [max_tokens] * len(prompts))
        rows = {uid: row for row, uid in enumerate(ids)}
        left = len(prompts) * max_tokens
        while left and (responses := generator.next_generated()):
            for response in responses:
                left -= 1
                yield rows[response.uid], int(response.token)
        # It has begun one step more than it needs; whoever comes next shall not pay for that.
        mx.synchronize(generator.stream)
        generator.close()

    return Subject(run, _mlx_lm_facts(model, spec))


def _load_mlx_lm(spec: Spec) -> Any:
    """The module; without `same_blas` the worker's environment keeps funcrt from loading a BLAS."""
    if spec.same_blas:
        from funcrt import blas

        blas.load()
    return weights.make_mlx_lm(spec.source, spec.dtype)


def _mlx_lm_facts(model: Any, spec: Spec) -> dict[str, Any]:
    from benchmarks.graphs import count_mlx_lm_step

    from mlx.utils import tree_flatten

    config = weights.read_config(spec.source)
    arrays = dict(tree_flatten(model.parameters()))
    norm = next(array for name, array in arrays.items() if name.endswith("norm.weight"))
    return {
        "read_bytes": weights.read_bytes(config, {n: a.nbytes for n, a in arrays.items()}),
        "cache_bytes": weights.cache_bytes(config, norm.dtype.size),
        **_primitives(lambda: count_mlx_lm_step(model)),
    }


def transformers_subject(spec: Spec) -> Subject:
    """The transformers package: static cache, `torch.compile` of the decode step, greedy, one row."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    config = weights.read_config(spec.source)
    assert spec.plan is not None
    capacity = max(spec.plan["capacity"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = dict(config)
    settings = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def run(prompts: Prompts, max_tokens: int) -> Tokens:
        for row, prompt in enumerate(prompts):
            cache = StaticCache(config=settings, max_cache_len=capacity)
            ids = torch.tensor([prompt], device=device)
            places = torch.arange(len(prompt), device=device)
            logits = model(
                ids, past_key_values=cache, cache_position=places, logits_to_keep=1
            ).logits
            for i in range(max_tokens):
                token = logits[:, -1].argmax(-1, keepdim=True)
                yield row, int(token.item())
                if i + 1 < max_tokens:
                    place = torch.tensor([len(prompt) + i], device=device)
                    logits = step(token.clone(), past_key_values=cache, cache_position=place).logits

    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    on_gpu = device == "cuda"
    return Subject(
        run,
        {
            "read_bytes": weights.read_bytes(config, sizes),
            "cache_bytes": weights.cache_bytes(config, 2),
        },
        peak=torch.cuda.max_memory_allocated if on_gpu else lambda: 0,
        reset_peak=torch.cuda.reset_peak_memory_stats if on_gpu else lambda: None,
    )


def cpp_subject(spec: Spec) -> Subject:
    """The C++ host, a process for each prompt: its first token includes starting and loading."""
    if not CPP_HOST.exists():
        raise FileNotFoundError(f"{CPP_HOST.relative_to(ROOT)} is not built: make cpp")

    def run(prompts: Prompts, max_tokens: int) -> Tokens:
        for row, prompt in enumerate(prompts):
            command = [
                str(CPP_HOST), spec.source, "--prompt-ids", ",".join(map(str, prompt)),
                "--max-tokens", str(max_tokens),
            ]  # fmt: skip
            with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                for token in _numbers(child.stdout.fileno()):
                    yield row, token
            if child.returncode:
                raise RuntimeError(f"{CPP_HOST.name} ended with exit code {child.returncode}")

    return Subject(
        run,
        peak=lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        reset_peak=lambda: None,
    )


def _numbers(descriptor: int) -> Iterator[int]:
    """Numbers between white space, each as soon as it has been written."""
    word = b""
    while piece := os.read(descriptor, 1):
        if not piece.isspace():
            word += piece
        elif word:
            yield int(word)
            word = b""
    if word:
        yield int(word)


KINDS: Mapping[str, Callable[[Spec], Subject]] = {
    "compiled": funcrt_subject,
    "eager": funcrt_subject,
    "bundle": funcrt_subject,
    "mlx-lm": mlx_lm_subject,
    "mlx-lm-batch": mlx_lm_batch_subject,
    "transformers": transformers_subject,
    "cpp": cpp_subject,
}
