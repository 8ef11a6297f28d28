"""Counting what a step computes with, without computing anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcrt.buckets import Bucket
    from funcrt.cache import CacheLayout
    from funcrt.model import Model

    import mlx.core as mx


def count_primitives(function: Callable[..., Any], arrays: Sequence[mx.array]) -> Counter[str]:
    """How many of each primitive the graph of `function` has, as `mx.export_function` tells."""
    import mlx.core as mx

    found: Counter[str] = Counter()

    def hear(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            found[event["name"]] += 1

    mx.export_function(hear, function, *arrays)
    return found


def step_arguments(model: Model, name: str, bucket: Bucket, layout: CacheLayout) -> list[mx.array]:
    """Arrays that the flat form of a step takes, in order."""
    return [
        array
        for argument in model.example(name, bucket, layout)
        for array in (argument.values() if isinstance(argument, dict) else [argument])
    ]


def count_step(model: Model, name: str, bucket: Bucket, layout: CacheLayout) -> Counter[str]:
    """Primitives of a step of ours in a bucket, before `mx.compile` joins any."""
    arrays = step_arguments(model, name, bucket, layout)
    return count_primitives(model.flat_step(name, bucket, layout), arrays)


def count_mlx_lm_step(module: Any) -> Counter[str]:
    """Primitives of a step of mlx-lm's `generate_step`, one row, greedy."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(module)
    module(mx.array([[1, 2, 3]]), cache=cache)
    mx.eval([entry.state for entry in cache])

    def step(token: mx.array) -> list[mx.array]:
        logits = module(token[None], cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return [mx.argmax(logprobs, axis=-1), logprobs.squeeze(0)]

    return count_primitives(step, [mx.array([4])])
