"""Adapters for the tiny llama of `tests.helpers`, and what models with them compute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from funcrt import adapters
from funcrt import cache as caches
from funcrt.adapters import Adapter, Change
from funcrt.buckets import BucketPlan
from funcrt.model import Model
from funcrt.packing import packed_shape
from tests.helpers import Array, make_model, random_tokens, run_plain

import mlx.core as mx
import numpy as np

PLAN = BucketPlan(batch=(2,), tokens=(8,), capacity=(16,))
ENDS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")  # some of those that are fused
PROMPT = random_tokens(8, 3)
Q = "model.layers.0.self_attn.q_proj"

model_of = cache(make_model)


def make_adapter(seed: int = 1, rank: int = 3, ends: Sequence[str] = ENDS) -> Adapter:
    """Changes about as large as what they change."""
    rng = np.random.default_rng(seed)
    changes = {}
    for name, shape in model_of("float32").spec.items():
        base = name.removesuffix(".weight")
        if len(shape) == 2 and base.endswith(tuple(ends)):
            outputs, inputs = packed_shape(shape)
            a = rng.normal(0, inputs**-0.5, (rank, inputs)).astype(np.float32)
            b = rng.normal(0, 0.5, (outputs, rank)).astype(np.float32)
            changes[base] = Change(mx.array(a), mx.array(b))
    return Adapter(f"made {seed}", changes)


def logits_of(model: Model, tokens: Sequence[int] = PROMPT) -> Array:
    return run_plain(model, tokens)[0]


@cache
def stacked(kind: str = "float32") -> Model:
    many = [make_adapter(1, 3), make_adapter(2, 5, ["k_proj", "up_proj", "down_proj"])]
    return adapters.stack(model_of(kind), many)


def alone(kind: str = "float32") -> list[Model]:
    """The model, and its fine-tunes, in the order in which rows choose them."""
    base = model_of(kind).in_float32()
    second = make_adapter(2, 5, ["k_proj", "up_proj", "down_proj"])
    return [base, adapters.fuse(base, make_adapter(1, 3)), adapters.fuse(base, second)]


def begin(choice: Sequence[int], capacity: int = 16) -> caches.CacheState:
    state = stacked().init_cache(len(choice), capacity)
    return {**state, "adapter": mx.array(choice, dtype=mx.int32)}
