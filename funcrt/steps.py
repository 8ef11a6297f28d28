"""The pure functions that are compiled and exported, each with its signature in one table.

`forward` is the contract itself; `prefill` and `decode` build the mask inside; `sample` and the two
forms of `decode` choose the next token. Compiling, exporting and loading all read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from funcrt import masks, sampling
from funcrt.buckets import Bucket
from funcrt.cache import CacheState, state_size
from funcrt.config import ModelConfig
from funcrt.params import FLOATS, Params

import mlx.core as mx

StepFunction = Callable[..., tuple[Any, ...]]

_SHAPES: dict[str, tuple[str, str]] = {
    "tokens": ("BT", "int32"),
    "mask": ("B1TS", "bool"),
    "valid": ("BT", "bool"),
    "block": ("BTT", "bool"),
    "token": ("B", "int32"),
    "active": ("B", "bool"),
    "logits": ("BV", "float"),
    "positions": ("B", "int32"),
    "temperature": ("B", "float32"),
    "top_k": ("B", "int32"),
    "top_p": ("B", "float32"),
    "min_p": ("B", "float32"),
    "seed": ("B", "uint32"),
}
_OUTPUT_SHAPES: dict[str, tuple[str, str]] = {
    "logits": ("BV", "float"),  # of the last real token; `forward` gives them for all
    "tokens": ("B", "int32"),
    "logprobs": ("B", "float32"),
    "finite": ("B", "bool"),
}


@dataclass(frozen=True)
class Step:
    """Signature of one function: the arrays before the cache state, on both sides.

    `prefills` functions exist per T; the others take one token per row.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    prefills: bool = False
    has_state: bool = True
    has_params: bool = True

    def buckets(
        self, batch: tuple[int, ...], tokens: tuple[int, ...], capacity: tuple[int, ...]
    ) -> list[Bucket]:
        """The distinct shapes of this function within a plan (0 where it has no such axis)."""
        return [
            Bucket(b, t, s)
            for b in batch
            for s in (capacity if self.has_state else (0,))
            for t in (tokens if self.prefills else (1,))
        ]


_SAMPLED = ("tokens", "logprobs", "finite")
STEPS: dict[str, Step] = {
    step.name: step
    for step in (
        Step("forward", ("tokens", "mask"), ("logits",), prefills=True),
        Step("prefill", ("tokens", "valid"), ("logits",), prefills=True),
        Step("prefill_block", ("tokens", "block"), ("logits",), prefills=True),
        Step("decode", ("token", "active", *sampling.SETTING_NAMES), _SAMPLED),
        Step("decode_greedy", ("token", "active"), _SAMPLED),
        Step(
            "sample", ("logits", "positions", *sampling.SETTING_NAMES), _SAMPLED,
            has_state=False, has_params=False,
        ),
    )
}  # fmt: skip


class ForwardOutput(NamedTuple):
    """What `f` returns: logits `[B, T, V]` in the caller's token order, and the new state."""

    logits: mx.array
    cache_state: CacheState


def forward(
    family: ModuleType,
    config: ModelConfig,
    params: Params,
    tokens: mx.array,
    mask: mx.array,
    cache_state: CacheState,
    positions: mx.array | None = None,
) -> ForwardOutput:
    """`f(params, tokens, mask, cache_state) -> (logits, cache_state)` of a family and a config."""
    x, state = family.hidden(config, params, tokens, mask, cache_state, positions)
    return ForwardOutput(family.unembed(config, params, x), state)


def make_step(name: str, family: ModuleType, config: ModelConfig) -> StepFunction:
    """The pure function `(params?, *inputs, state?) -> (*outputs, state?)` of a row of `STEPS`."""

    def run_forward(
        params: Params, tokens: mx.array, mask: mx.array, state: CacheState
    ) -> ForwardOutput:
        return forward(family, config, params, tokens, mask, state)

    def prefill(
        params: Params, tokens: mx.array, valid: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        mask = masks.causal(valid, state["lengths"], state_size(state)[1])
        return last_logits(params, tokens, valid, mask, state)

    def prefill_block(
        params: Params, tokens: mx.array, block: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        mask = masks.from_block(block, state["lengths"], state_size(state)[1])
        return last_logits(params, tokens, mx.any(block, axis=2), mask, state)

    def last_logits(
        params: Params, tokens: mx.array, valid: mx.array, mask: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        x, state = family.hidden(config, params, tokens, mask, state)
        # The last real token of each row: only its logits are wanted, V is wide.
        step = mx.arange(tokens.shape[1], dtype=mx.int32)
        last = mx.max(mx.where(valid, step, 0), axis=1)  # [B]
        x = mx.take_along_axis(x, last[:, None, None], axis=1)[:, 0]  # [B,E]
        return family.unembed(config, params, x), state

    def next_logits(
        params: Params, token: mx.array, active: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        mask = masks.causal(active[:, None], state["lengths"], state_size(state)[1])
        x, state = family.hidden(config, params, token[:, None], mask, state)
        return family.unembed(config, params, x[:, 0]), state

    def decode(
        params: Params, token: mx.array, active: mx.array, *rest: Any
    ) -> tuple[mx.array, mx.array, mx.array, CacheState]:
        *values, state = rest
        logits, state = next_logits(params, token, active, state)
        settings = dict(zip(sampling.SETTING_NAMES, values, strict=True))
        return *sampling.sample(logits, settings, state["lengths"]), state

    def decode_greedy(
        params: Params, token: mx.array, active: mx.array, state: CacheState
    ) -> tuple[mx.array, mx.array, mx.array, CacheState]:
        logits, state = next_logits(params, token, active, state)
        return *sampling.greedy(logits), state

    def sample(
        logits: mx.array, positions: mx.array, *values: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        settings = dict(zip(sampling.SETTING_NAMES, values, strict=True))
        return sampling.sample(logits, settings, positions)

    functions: dict[str, StepFunction] = {
        "forward": run_forward,
        "prefill": prefill,
        "prefill_block": prefill_block,
        "decode": decode,
        "decode_greedy": decode_greedy,
        "sample": sample,
    }
    return functions[name]


def input_shape(
    name: str, bucket: Bucket, vocab_size: int, dtype: str
) -> tuple[tuple[int, ...], mx.Dtype]:
    """Shape and dtype of the step input `name` in `bucket`; `dtype` is that of the logits."""
    return _measure(_SHAPES[name], bucket, vocab_size, dtype)


def output_shape(
    step: Step, name: str, bucket: Bucket, vocab_size: int, dtype: str
) -> tuple[tuple[int, ...], mx.Dtype]:
    """Shape and dtype of the output `name` of `step` in `bucket`."""
    if name == "logits" and step.name == "forward":
        return _measure(("BTV", "float"), bucket, vocab_size, dtype)
    return _measure(_OUTPUT_SHAPES[name], bucket, vocab_size, dtype)


def _measure(
    form: tuple[str, str], bucket: Bucket, vocab_size: int, dtype: str
) -> tuple[tuple[int, ...], mx.Dtype]:
    axes, kind = form
    sizes = {"B": bucket.batch, "T": bucket.tokens, "S": bucket.capacity, "V": vocab_size, "1": 1}
    kinds = {"int32": mx.int32, "uint32": mx.uint32, "bool": mx.bool_, "float32": mx.float32}
    return tuple(sizes[axis] for axis in axes), FLOATS[dtype] if kind == "float" else kinds[kind]
