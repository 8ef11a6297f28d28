"""Running golden calls, the same way where they are recorded and where they are verified."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from funcrt import guesses, masks, sampling
from funcrt.bundle.format.manifest import GROW, Golden, GoldenCall, GoldenCase
from funcrt.cache import CacheState, restore, snapshot, state_size
from funcrt.cache.layout import slot_axis
from funcrt.compiled import Compiled
from funcrt.low_rank import take_last
from funcrt.sampling import Sampled
from funcrt.steps import FIRST, STEPS

import mlx.core as mx

Arrays = Mapping[str, mx.array]

# `[B, V]` arrays that are nearly all alike: a value per row, and places of others.
_SPARSE = ("bias.fill", "bias.places", "bias.values", "history.places", "history.values")
_SETTINGS = (*sampling.SETTING_NAMES, *_SPARSE)

# Inputs of each function as they are stored: `forward` builds its mask from two small arrays,
# `prefill_block` its causal block from one, and `top` takes the logits of the call before it.
STORED_INPUTS: dict[str, tuple[str, ...]] = {
    "forward": ("tokens", "valid", "hidden"),
    "prefill": ("tokens", "valid"),
    FIRST: ("tokens", "valid"),
    "prefill_block": ("tokens", "valid"),
    "decode_greedy": ("token", "active"),
    "decode": ("token", "active", *_SETTINGS),
    "verify_greedy": ("tokens", "valid"),
    "verify": ("tokens", "valid", *_SETTINGS),
    "sample": ("logits", "positions", *_SETTINGS),
    "top": (),
    GROW: (),
}
LOGPROB = -1
"""The column of a probe that asks for the log-probability of the chosen token."""


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
    """What is compared of one call's outputs; N probes, R = B rows (B*T where places answer).

    Attributes:
        values: float32 `[N]`, logits or log-probabilities at the probes.
        tokens: int32 `[R]`, the most likely or the chosen token of every row; for `top` all its
            tokens, row after row.
        lengths: int32 `[B]` after the call (functions without a state leave them as they are).
        accepted: int32 `[B]`, right guesses; 0 where there are none.
        strange: bool `[B]`, rows that contradict themselves in `"accepted"` or `"history"`: the
            count is not what their tokens and guesses make it, or other tokens were counted than
            chosen; or in `"moved"`: growing changed what they hold.
    """

    values: mx.array
    tokens: mx.array
    lengths: mx.array
    accepted: mx.array
    strange: dict[str, mx.array]


def places(golden: Golden) -> Iterator[Place]:
    """Every recorded call, in order, but for those of functions that only a newer funcrt knows.

    What they leave behind is not known, so calls that go on from it are left out, too.
    """
    for i, case in enumerate(golden.cases):
        follows = True
        for j, call in enumerate(case.calls):
            follows = call.function in STEPS and (call.fresh or follows)
            if follows:
                yield Place(case, call, f"{i}.{j}.")


def replay(
    compiled: Compiled, golden: Golden, arrays: Arrays
) -> Iterator[tuple[Place, Observation]]:
    """Run every recorded call and observe it."""
    state: CacheState = {}
    inputs: Arrays = {}
    for place in places(golden):
        inputs = take_inputs(place, arrays, compiled.vocab_size, inputs)
        if place.call.fresh:
            state = {}  # before the next one exists: two states are not held at once
            state = take_last(compiled.init_cache(place.case.batch, place.case.capacity))
        if place.call.function == GROW:
            yield place, observe_growth(state, compiled.grow(state))
            continue
        saved = snapshot(state) if place.call.undo else {}
        outputs, state = run_call(compiled, place.call.function, inputs, state)
        observed = observe(outputs, arrays[place.prefix + "probes"], inputs, state)
        mx.eval(observed, state)
        if place.call.undo:
            state = restore(state, saved)
        yield place, observed


def take_inputs(place: Place, arrays: Arrays, vocab_size: int, before: Arrays) -> Arrays:
    """The inputs of a call as they were recorded; `before` are those of the call before it."""
    function, prefix = place.call.function, place.prefix
    if function == GROW:
        return {}
    if function == "top":
        return {"logits": before["logits"]}
    inputs = {name: arrays[prefix + name] for name in STORED_INPUTS[function]}
    if "bias.fill" in inputs:
        inputs |= spread_settings(inputs, vocab_size)
    return inputs


def spread_settings(sparse: Arrays, vocab_size: int) -> dict[str, mx.array]:
    """`bias` and `history` `[B, V]` from a value per row and others at some places."""
    fill = sparse["bias.fill"][:, None]
    bias = mx.broadcast_to(fill, (fill.shape[0], vocab_size))
    history = mx.zeros((fill.shape[0], vocab_size), mx.int32)
    spread = {"bias": bias, "history": history}
    for name, array in spread.items():
        where, values = sparse[f"{name}.places"], sparse[f"{name}.values"]
        if values.size:
            array = array + 0  # a broadcast one is not written to
            array[where[:, 0], where[:, 1]] = values
        spread[name] = mx.contiguous(array)
    return spread


def run_call(
    compiled: Compiled, function: str, inputs: Arrays, state: CacheState
) -> tuple[dict[str, mx.array], CacheState]:
    """One call from its inputs: outputs before the state by name, and the state after it."""
    chosen: Sampled
    if STEPS[function].outputs == ("logits",):
        logits, state = _run_prefill(compiled, function, inputs, state)
        return {"logits": logits}, state
    if function == "top":
        ids, logprobs = compiled.top(inputs["logits"])
        return {"top_tokens": ids, "top_logprobs": logprobs}, state
    settings = {name: inputs[name] for name in sampling.SETTING_INPUTS if name in inputs}
    if function == "decode_greedy":
        chosen, state = compiled.decode_greedy(inputs["token"], inputs["active"], state)
    elif function == "decode":
        chosen, state = compiled.decode(inputs["token"], inputs["active"], settings, state)
    elif function == "verify_greedy":
        chosen, state = compiled.verify_greedy(inputs["tokens"], inputs["valid"], state)
    elif function == "verify":
        chosen, state = compiled.verify(inputs["tokens"], inputs["valid"], settings, state)
    else:
        chosen = compiled.sample(inputs["logits"], inputs["positions"], settings)
    named = zip(Sampled._fields, chosen, strict=True)
    return {name: array for name, array in named if array is not None}, state


def _run_prefill(
    compiled: Compiled, function: str, inputs: Arrays, state: CacheState
) -> tuple[mx.array, CacheState]:
    tokens, valid = inputs["tokens"], inputs["valid"]
    if function == "forward":
        mask = make_mask(valid, inputs["hidden"], state["lengths"], state_size(state)[1])
        return compiled.forward(tokens, mask, state)
    if function == "prefill":
        return compiled.prefill(tokens, valid, state)
    if function == FIRST:
        return compiled.prefill_first(tokens, valid, state)
    step = mx.arange(valid.shape[1])
    block = (step <= step[:, None]) & valid[:, None, :] & valid[..., None]
    return compiled.prefill_block(tokens, block, state)


def make_mask(valid: mx.array, hidden: mx.array, lengths: mx.array, capacity: int) -> mx.array:
    """Causal, but for one cached slot per row that nobody sees (`hidden` int32 `[B]`, -1 = none).

    A mask that only ever is causal would not show that a graph reads it.
    """
    slots = mx.arange(capacity, dtype=mx.int32)
    visible = slots[None, :] != hidden[:, None]  # [B,S]
    return masks.causal(valid, lengths, capacity) & visible[:, None, None, :]


def observe(outputs: Arrays, probes: mx.array, inputs: Arrays, state: CacheState) -> Observation:
    """Pick what is compared; `probes` int32 `[N, 2]` are pairs of row and column."""
    rows, columns = probes[:, 0], probes[:, 1]
    lengths = state["lengths"] + 0  # a copy: the state moves on
    accepted = outputs.get("accepted", mx.zeros_like(lengths))
    if "top_tokens" in outputs:
        values = outputs["top_logprobs"][rows, columns]
        return Observation(values, outputs["top_tokens"].reshape(-1), lengths, accepted, {})
    values = mx.zeros(rows.shape)
    if "logits" in outputs:
        logits = outputs["logits"].reshape(-1, outputs["logits"].shape[-1])
        values = logits[rows, mx.maximum(columns, 0)].astype(mx.float32)
    if "tokens" not in outputs:
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    else:
        tokens = outputs["tokens"].reshape(-1)
        logprobs = outputs["logprobs"].reshape(-1)[rows]
        values = mx.where(columns == LOGPROB, logprobs, values)
    return Observation(values, tokens, lengths, accepted, _find_strange(outputs, inputs))


def observe_growth(before: CacheState, after: CacheState) -> Observation:
    """Slots 0 to S - 2 of every array have to be what they were, and all behind them 0."""
    lengths = before["lengths"]
    moved = mx.zeros(lengths.shape, mx.bool_)
    for name, old in before.items():
        axis, new = slot_axis(name), after[name]
        if axis is not None:
            used = old.shape[axis] - 1
            head, tail = mx.split(new, [used], axis=axis)
            moved = moved | _any(tail != 0)
            old, new = mx.split(old, [used], axis=axis)[0], head
        moved = moved | _any(old != new)
    nothing = mx.zeros((0,))
    return Observation(
        nothing,
        nothing.astype(mx.int32),
        after["lengths"],
        mx.zeros_like(lengths),
        {"moved": moved},
    )


def _any(flags: mx.array) -> mx.array:
    """`[B, ...]` -> `[B]`. Not flattened: MLX's axes end at 2**31, caches may be larger."""
    return mx.any(flags, axis=list(range(1, flags.ndim)))


def _find_strange(outputs: Arrays, inputs: Arrays) -> dict[str, mx.array]:
    """Rows that contradict themselves, by what about them."""
    strange = {}
    counted = inputs.get("active")
    if "accepted" in outputs:
        chosen = Sampled(outputs["tokens"], outputs["logprobs"], outputs["finite"])
        counted = guesses.find_emitted(inputs["tokens"], inputs["valid"], chosen)
        differs = guesses.count_accepted(counted) != outputs["accepted"]
        strange["accepted"] = mx.array(differs)
    if "history" in outputs:
        batch = inputs["history"].shape[0]
        tokens, finite = (outputs[name].reshape(batch, -1) for name in ("tokens", "finite"))
        counted = finite if counted is None else counted.reshape(batch, -1) & finite
        expected = sampling.record(inputs["history"], tokens, counted)
        strange["history"] = mx.any(expected != outputs["history"], axis=1)
    return strange


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
        array = prepared[index]
        width = array.shape[-1] if array.ndim else 1
        # By rows: stacked experts may have more values than an axis of MLX.
        rows, columns = zip(*(divmod(place, width) for place in wanted), strict=True)
        picked = array.reshape(-1, width)[mx.array(rows), mx.array(columns)]
        packed = picked.dtype == mx.uint32
        values.append((picked & 0xFFFFFF if packed else picked).astype(mx.float32))
    return mx.concatenate(values)


def measure_error(values: mx.array, reference: mx.array, scale: float | mx.array) -> float:
    """Largest difference over `scale`; infinite if anything is not a number, 0 of nothing.

    Both may be -inf, as for ids that never come.
    """
    if not values.size:
        return 0.0
    error = mx.max(mx.where(values == reference, 0, mx.abs(values - reference)) / scale).item()
    assert isinstance(error, float)
    return error if math.isfinite(error) else math.inf
