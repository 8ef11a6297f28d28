"""The pure functions that are compiled and exported, each with its signature in one table.

`forward` is the contract itself; the others build the mask inside. `sample` and the two forms of
`decode` choose the next token; the two of `verify` choose one at every place of a call and keep the
guesses that were right; `top` gives alternatives; `grow` moves a state to more slots. Compiling,
exporting and loading all read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from funcrt import guesses, masks, sampling
from funcrt.buckets import Bucket
from funcrt.cache import (
    CacheState,
    Placement,
    Sight,
    grow,
    kind_of,
    place_causal,
    state_size,
)
from funcrt.params import FLOATS, Params
from funcrt.sampling import Sampled

import mlx.core as mx

if TYPE_CHECKING:
    from funcrt.config import ModelConfig
    from funcrt.models.family import Family

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
    "repetition_penalty": ("B", "float32"),
    "presence_penalty": ("B", "float32"),
    "frequency_penalty": ("B", "float32"),
    "bias": ("BV", "float32"),
    "history": ("BV", "int32"),
}
_OUTPUT_SHAPES: dict[str, tuple[str, str]] = {
    "logits": ("BV", "float"),
    "tokens": ("B", "int32"),
    "logprobs": ("B", "float32"),
    "finite": ("B", "bool"),
    "history": ("BV", "int32"),
    "accepted": ("B", "int32"),
    "top_tokens": ("BN", "int32"),
    "top_logprobs": ("BN", "float32"),
}
_BY_PLACE = ("logits", "tokens", "logprobs", "finite")


@dataclass(frozen=True)
class Step:
    """Signature of one function: the arrays before the cache state, on both sides.

    Attributes:
        name: of the function.
        inputs: between the params and the cache state.
        outputs: before the cache state.
        prefills: it exists per T; the others take one token per row.
        sizes: the least and the largest T that it exists for, of those that a plan declares.
        by_place: its logits, tokens, logprobs and finite have T axes, one entry per token.
        has_state: it takes and returns the cache state.
        has_params: it takes the params.
        grows: the state that it returns has the next capacity, so the largest has no such function.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    prefills: bool = False
    sizes: tuple[int, int] = (1, 2**31 - 1)
    by_place: bool = False
    has_state: bool = True
    has_params: bool = True
    grows: bool = False

    def choose_sizes(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The T that it exists for in a plan that declares `tokens`."""
        least, largest = self.sizes
        return tuple(t for t in tokens if least <= t <= largest) if self.prefills else (1,)

    def buckets(
        self, batch: tuple[int, ...], tokens: tuple[int, ...], capacity: tuple[int, ...]
    ) -> list[Bucket]:
        """The distinct shapes of this function within a plan (0 where it has no such axis)."""
        slots = capacity[: -1 if self.grows else None] if self.has_state else (0,)
        return [Bucket(b, t, s) for b in batch for s in slots for t in self.choose_sizes(tokens)]


_CHOSEN = ("tokens", "logprobs", "finite")
_SIZES_OF_GUESSES = (2, 16)
STEPS: dict[str, Step] = {
    step.name: step
    for step in (
        Step("forward", ("tokens", "mask"), ("logits",), prefills=True, by_place=True),
        Step("prefill", ("tokens", "valid"), ("logits",), prefills=True),
        Step("prefill_block", ("tokens", "block"), ("logits",), prefills=True),
        Step(
            "decode", ("token", "active", *sampling.SETTING_INPUTS),
            (*_CHOSEN, "logits", "history"),
        ),
        Step("decode_greedy", ("token", "active"), (*_CHOSEN, "logits")),
        Step(
            "verify", ("tokens", "valid", *sampling.SETTING_INPUTS),
            (*_CHOSEN, "logits", "history", "accepted"),
            prefills=True, sizes=_SIZES_OF_GUESSES, by_place=True,
        ),
        Step(
            "verify_greedy", ("tokens", "valid"), (*_CHOSEN, "logits", "accepted"),
            prefills=True, sizes=_SIZES_OF_GUESSES, by_place=True,
        ),
        Step(
            "sample", ("logits", "positions", *sampling.SETTING_INPUTS), (*_CHOSEN, "history"),
            has_state=False, has_params=False,
        ),
        Step(
            "top", ("logits",), ("top_tokens", "top_logprobs"), has_state=False, has_params=False
        ),
        Step("grow", (), (), has_params=False, grows=True),
    )
}  # fmt: skip


class ForwardOutput(NamedTuple):
    """What `f` returns: logits `[B, T, V]` in the caller's token order, and the new state."""

    logits: mx.array
    cache_state: CacheState


def forward(
    family: Family,
    config: ModelConfig,
    params: Params,
    tokens: mx.array,
    mask: Sight,
    cache_state: CacheState,
    positions: mx.array | None = None,
) -> ForwardOutput:
    """`f(params, tokens, mask, cache_state) -> (logits, cache_state)` of a family and a config."""
    x, state = family.hidden(config, params, tokens, mask, cache_state, positions)
    return ForwardOutput(family.unembed(config, params, x), state)


def make_step(
    name: str, family: Family, config: ModelConfig, grown: int | None = None
) -> StepFunction:
    """The pure function `(params?, *inputs, state?) -> (*outputs, state?)` of a row of `STEPS`.

    `grown` is the capacity that `grow` returns.
    """

    def run_forward(
        params: Params, tokens: mx.array, mask: mx.array, state: CacheState
    ) -> ForwardOutput:
        return forward(family, config, params, tokens, mask, state)

    def prefill(
        params: Params, tokens: mx.array, valid: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        return last_logits(params, tokens, valid, causal(valid, state), state)

    def prefill_block(
        params: Params, tokens: mx.array, block: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        mask = masks.from_block(block, state["lengths"], state_size(state)[1])
        return last_logits(params, tokens, mx.any(block, axis=2), mask, state)

    def last_logits(
        params: Params, tokens: mx.array, valid: mx.array, mask: Sight, state: CacheState
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
        call = causal(active[:, None], state)
        x, state = family.hidden(config, params, token[:, None], call, state)
        return family.unembed(config, params, x[:, 0]), state

    def decode(params: Params, token: mx.array, active: mx.array, *rest: Any) -> tuple[Any, ...]:
        *values, state = rest
        logits, state = next_logits(params, token, active, state)
        chosen = sampling.sample(logits, _settings(values), state["lengths"], active)
        return *_outputs("decode", chosen._replace(logits=logits)), state

    def decode_greedy(
        params: Params, token: mx.array, active: mx.array, state: CacheState
    ) -> tuple[Any, ...]:
        logits, state = next_logits(params, token, active, state)
        chosen = sampling.greedy(logits)._replace(logits=logits)
        return *_outputs("decode_greedy", chosen), state

    def verify(params: Params, tokens: mx.array, valid: mx.array, *rest: Any) -> tuple[Any, ...]:
        *values, state = rest
        logits, after = all_logits(params, tokens, valid, state)
        lengths = state["lengths"]
        chosen, emitted = guesses.judge(logits, tokens, valid, _settings(values), lengths)
        state = keep_emitted(params, tokens, emitted, state, after)
        return *_outputs("verify", chosen._replace(logits=logits)), state

    def verify_greedy(
        params: Params, tokens: mx.array, valid: mx.array, state: CacheState
    ) -> tuple[Any, ...]:
        logits, after = all_logits(params, tokens, valid, state)
        chosen, emitted = guesses.judge_greedy(logits, tokens, valid)
        state = keep_emitted(params, tokens, emitted, state, after)
        return *_outputs("verify_greedy", chosen._replace(logits=logits)), state

    def all_logits(
        params: Params, tokens: mx.array, valid: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        return forward(family, config, params, tokens, causal(valid, state), state)

    def keep_emitted(
        params: Params, tokens: mx.array, emitted: mx.array, before: CacheState, after: CacheState
    ) -> CacheState:
        """The state `after` a call with guesses, without the wrong ones."""
        if any(kind_of(name) == "recurrent" for name in before):
            # It has seen them all and cannot go back; nothing of the first run's state is used.
            call = causal(emitted, before)
            state: CacheState = family.hidden(config, params, tokens, call, before)[1]
            return state
        kept = before["lengths"] + mx.sum(emitted.astype(mx.int32), axis=1)
        return {**after, "lengths": kept}  # a `trim` that needs no check

    def causal(valid: mx.array, state: CacheState) -> Placement:
        return place_causal(valid, state["lengths"], state_size(state)[1])

    def sample(logits: mx.array, positions: mx.array, *values: mx.array) -> tuple[Any, ...]:
        return _outputs("sample", sampling.sample(logits, _settings(values), positions))

    def run_grow(state: CacheState) -> tuple[CacheState]:
        assert grown is not None
        return (grow(state, grown),)

    functions: dict[str, StepFunction] = {
        "forward": run_forward,
        "prefill": prefill,
        "prefill_block": prefill_block,
        "decode": decode,
        "decode_greedy": decode_greedy,
        "verify": verify,
        "verify_greedy": verify_greedy,
        "sample": sample,
        "top": sampling.top,
        "grow": run_grow,
    }
    return functions[name]


def _settings(values: Sequence[mx.array]) -> dict[str, mx.array]:
    return dict(zip(sampling.SETTING_INPUTS, values, strict=True))


def _outputs(name: str, chosen: Sampled) -> tuple[Any, ...]:
    return tuple(getattr(chosen, output) for output in STEPS[name].outputs)


def input_shape(
    name: str, bucket: Bucket, vocab_size: int, dtype: str
) -> tuple[tuple[int, ...], mx.Dtype]:
    """Shape and dtype of the step input `name` in `bucket`; `dtype` is that of the logits."""
    return _measure(_SHAPES[name], bucket, vocab_size, dtype)


def output_shape(
    step: Step, name: str, bucket: Bucket, vocab_size: int, dtype: str
) -> tuple[tuple[int, ...], mx.Dtype]:
    """Shape and dtype of the output `name` of `step` in `bucket`."""
    axes, kind = _OUTPUT_SHAPES[name]
    if step.by_place and name in _BY_PLACE:
        axes = axes.replace("B", "BT")
    return _measure((axes, kind), bucket, vocab_size, dtype)


def _measure(
    form: tuple[str, str], bucket: Bucket, vocab_size: int, dtype: str
) -> tuple[tuple[int, ...], mx.Dtype]:
    axes, kind = form
    sizes = {
        "B": bucket.batch,
        "T": bucket.tokens,
        "S": bucket.capacity,
        "V": vocab_size,
        "N": min(sampling.ALTERNATIVES, vocab_size),
        "1": 1,
    }
    kinds = {"int32": mx.int32, "uint32": mx.uint32, "bool": mx.bool_, "float32": mx.float32}
    return tuple(sizes[axis] for axis in axes), FLOATS[dtype] if kind == "float" else kinds[kind]
