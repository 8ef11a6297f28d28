"""What a user would run instead of funcrt in Python: mlx-lm, transformers, and our own C++ host."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from typing import Any

from benchmarks import weights
from benchmarks.subjects import CPP_HOST, ROOT, Prompts, Spec, Subject, Tokens, primitives


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
        **primitives(lambda: count_mlx_lm_step(model)),
    }


def transformers_subject(spec: Spec) -> Subject:
    """The transformers package: static cache, `torch.compile` of the decode step, one row."""
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
