"""Running golden calls, the same way where they are recorded and where they are verified."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from funcrt import masks, sampling
from funcrt.bundle.manifest import Golden, GoldenCall, GoldenCase
from funcrt.cache import CacheState, state_size
from funcrt.compiled import Compiled

import mlx.core as mx

Arrays = Mapping[str, mx.array]

# Inputs of each function as they are stored: `forward` builds its mask from two small arrays,
# `prefill_block` its causal block from one.
STORED_INPUTS: dict[str, tuple[str, ...]] = {
    "forward": ("tokens", "valid", "hidden"),
    "prefill": ("tokens", "valid"),
    "prefill_block": ("tokens", "valid"),
    "decode_greedy": ("token", "active"),
    "decode": ("token", "active", *sampling.SETTING_NAMES),
    "sample": ("logits", "positions", *sampling.SETTING_NAMES),
}


class Place(NamedTuple):
    """Where a call stands in the golden section."""

    case: GoldenCase
    call: GoldenCall
    prefix: str  # of its arrays' names

    @property
    def key(self) -> str:
        """Key of the function that it calls."""
        return f"{self.call.function}_{self.case.bucket(self.call)}"


class Observation(NamedTuple):
    """What is compared of one call's outputs; N probes, R = B (or B*T for `forward`) rows.

    Attributes:
        values: float32 `[N]`, logits (log-probabilities where a token is chosen) at the probes.
        tokens: int32 `[R]`, the most likely or the chosen token of every row.
        lengths: int32 `[B]` after the call (`sample` leaves them as they are).
    """

    values: mx.array
    tokens: mx.array
    lengths: mx.array


def places(golden: Golden) -> Iterator[Place]:
    """Every recorded call, in order."""
    for i, case in enumerate(golden.cases):
        for j, call in enumerate(case.calls):
            yield Place(case, call, f"{i}.{j}.")


def replay(
    compiled: Compiled, golden: Golden, arrays: Arrays
) -> Iterator[tuple[Place, Observation]]:
    """Run every recorded call and observe it."""
    state: CacheState = {}
    for place in places(golden):
        inputs = {name: arrays[place.prefix + name] for name in STORED_INPUTS[place.call.function]}
        if place.call.fresh:
            state = {}  # before the next one exists: two states are not held at once
            state = compiled.init_cache(place.case.batch, place.case.capacity)
        outputs, state = run_call(compiled, place.call.function, inputs, state)
        observed = observe(outputs, arrays[place.prefix + "probes"], state)
        mx.eval(observed, state)
        yield place, observed


def run_call(
    compiled: Compiled, function: str, inputs: Arrays, state: CacheState
) -> tuple[tuple[mx.array, ...], CacheState]:
    """One call from its stored inputs: outputs before the state, and the state after it."""
    settings = {name: inputs[name] for name in sampling.SETTING_NAMES if name in inputs}
    if function == "forward":
        capacity = state_size(state)[1]
        mask = make_mask(inputs["valid"], inputs["hidden"], state["lengths"], capacity)
        logits, state = compiled.forward(inputs["tokens"], mask, state)
        return (logits,), state
    if function == "prefill":
        logits, state = compiled.prefill(inputs["tokens"], inputs["valid"], state)
        return (logits,), state
    if function == "prefill_block":
        valid = inputs["valid"]
        step = mx.arange(valid.shape[1])
        block = (step <= step[:, None]) & valid[:, None, :] & valid[..., None]
        logits, state = compiled.prefill_block(inputs["tokens"], block, state)
        return (logits,), state
    if function == "decode_greedy":
        *outputs, state = compiled.decode_greedy(inputs["token"], inputs["active"], state)
        return tuple(outputs), state
    if function == "decode":
        *outputs, state = compiled.decode(inputs["token"], inputs["active"], settings, state)
        return tuple(outputs), state
    return compiled.sample(inputs["logits"], inputs["positions"], settings), state


def make_mask(valid: mx.array, hidden: mx.array, lengths: mx.array, capacity: int) -> mx.array:
    """Causal, but for one cached slot per row that nobody sees (`hidden` int32 `[B]`, -1 = none).

    A mask that only ever is causal would not show that a graph reads it.
    """
    slots = mx.arange(capacity, dtype=mx.int32)
    visible = slots[None, :] != hidden[:, None]  # [B,S]
    return masks.causal(valid, lengths, capacity) & visible[:, None, None, :]


def observe(outputs: tuple[mx.array, ...], probes: mx.array, state: CacheState) -> Observation:
    """Pick what is compared; `probes` int32 `[N, 2]` are pairs of row and column."""
    rows, columns = probes[:, 0], probes[:, 1]
    if len(outputs) == 1:
        logits = outputs[0].reshape(-1, outputs[0].shape[-1])
        values = logits[rows, columns].astype(mx.float32)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    else:
        tokens, logprobs, _ = outputs
        values = logprobs[rows]
    return Observation(values, tokens, state["lengths"] + 0)  # a copy: the state moves on


def observe_params(prepared: Sequence[mx.array], probes: mx.array) -> mx.array:
    """Values float32 `[N]` at `probes` int32 `[N, 2]`: array, place in it, sorted by array.

    Of packed integers the lower 24 bits, which float32 holds exactly.
    """
    pairs: Any = probes.tolist()
    found: dict[int, list[int]] = {}
    for index, place in pairs:
        found.setdefault(index, []).append(place)
    values = []
    for index, wanted in found.items():
        picked = prepared[index].reshape(-1)[mx.array(wanted)]
        packed = picked.dtype == mx.uint32
        values.append((picked & 0xFFFFFF if packed else picked).astype(mx.float32))
    return mx.concatenate(values)


def measure_error(values: mx.array, reference: mx.array, scale: float | mx.array) -> float:
    """Largest difference over `scale`; infinite if anything is not a number."""
    error = mx.max(mx.abs(values - reference) / scale).item()
    assert isinstance(error, float)
    return error if math.isfinite(error) else math.inf
