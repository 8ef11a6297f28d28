"""Recording golden calls: what the reference says, and how near the plain eager run comes to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from funcrt.buckets import BucketPlan
from funcrt.bundle.format.manifest import GROW, Golden, GoldenCall, GoldenCase
from funcrt.bundle.golden.calls import Call, make_layout
from funcrt.bundle.golden.choices import expect_choice, expect_top
from funcrt.bundle.golden.reference import Reference, References
from funcrt.bundle.golden.replay import STORED_INPUTS, measure_error, observe_params, replay
from funcrt.compiled import Compiled
from funcrt.errors import BundleError
from funcrt.model import Model
from funcrt.params import FLOATS
from funcrt.steps import STEPS

import mlx.core as mx

_MOST_SPOTS = 256  # rows of one call whose logits are compared
_PARAM_PROBES = 2048
_FLOAT32_ALLOWED = 2e-5  # of the largest logit
_EAGER_ALLOWED = 1.25  # of the eager run's error
_ROUNDING = {"float32": _FLOAT32_ALLOWED, "float16": 4e-3, "bfloat16": 3e-2}
_PACKED_ROUNDING = {None: 0.0, 8: 1e-2, 4: 5e-2}  # of a cache in so many bits
_PARAM_ROUNDING = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}

Arrays = dict[str, mx.array]
Tick = Callable[[str], None]


class Recording(NamedTuple):
    """The golden section, its arrays, and how far the compiled run is from eager, by function.

    Only the first case runs compiled here: compiling is slow, and what a loader runs are the
    imported functions, all of which the verification compiles.
    """

    golden: Golden
    arrays: Arrays
    compiled: dict[str, float]


class Recorder:
    """Makes the golden section of a model and a plan."""

    def __init__(self, model: Model, plan: BucketPlan, kv_bits: int | None) -> None:
        self._model = model
        self._plan = plan
        self._kv_bits = kv_bits
        spec = model.cache_spec(model.choose_layout(plan, kv_bits))
        is_recurrent = any(entry.kind == "recurrent" for entry in spec)
        has_slots = any("S" in entry.shape for entry in spec)
        self._cases = make_layout(plan, model.vocab_size, hides=not is_recurrent, grows=has_slots)
        self._references = References(self._cases)

    @property
    def calls(self) -> int:
        """How many calls are recorded."""
        return sum(len(case.calls) for case in self._cases)

    @property
    def ticks(self) -> int:
        """How often `record` reports progress."""
        computed = [[c for c in case.calls if c.function != GROW] for case in self._cases]
        return self._references.count + sum(map(len, computed)) + len(computed[0])

    def record(self, file: str, tick: Tick) -> Recording:
        """Run everything.

        Args:
            file: where the arrays will be.
            tick: called with the name of each part done.
        """
        self._references.run(self._model, tick)
        golden, arrays = self._expect(file)
        golden = self._measure_eager(golden, arrays, tick)
        compiled = self._measure_compiled(golden, arrays, tick)
        arrays |= _probe_params(list(self._model.prepared.values()))
        return Recording(golden, arrays, compiled)

    def _expect(self, file: str) -> tuple[Golden, Arrays]:
        arrays: Arrays = {}
        cases = []
        for i, case in enumerate(self._cases):
            calls = []
            for j, call in enumerate(case.calls):
                if call.function == GROW:  # it has to keep what is there, whatever that is
                    calls.append(GoldenCall(GROW, 1, fresh=False, undo=False, scale=1.0))
                    continue
                found = [self._references.of(spot.row) for spot in call.spots]
                ids = self._references.fill(call)
                before = arrays.get(f"{i}.{j - 1}.logits")
                scale, expected = _expect(self._model, call, ids, found, self._kv_bits, before)
                arrays |= {f"{i}.{j}.{name}": array for name, array in expected.items()}
                form = (call.function, call.tokens, call.fresh, call.undo)
                calls.append(GoldenCall(*form, scale, 0.0, 0.0))
            cases.append(GoldenCase(case.batch, case.capacity, tuple(calls)))
        return Golden(file, _PARAM_ROUNDING[self._model.config.dtype], tuple(cases)), arrays

    def _measure_eager(self, golden: Golden, arrays: Arrays, tick: Tick) -> Golden:
        """Record the eager run, its error, and so the error that is allowed."""
        measured = {}
        for place, seen in replay(self._compiled(eager=True), golden, arrays):
            prefix, call = place.prefix, place.call
            if call.function == GROW:
                measured[prefix] = call
                continue
            error = measure_error(seen.values, arrays[f"{prefix}reference"], call.scale)
            arrays[f"{prefix}eager"] = seen.values
            if STEPS[call.function].outputs != ("logits",):
                # A choice on which even the plain run differs proves nothing.
                tokens = arrays[f"{prefix}expected_tokens"]
                arrays[f"{prefix}expected_tokens"] = mx.where(seen.tokens == tokens, tokens, -1)
            measured[prefix] = replace(call, eager=error)
            tick(f"eager {place.key}")
        worst = max(call.eager for call in measured.values())
        if not math.isfinite(worst):
            dtype = self._model.config.dtype
            raise BundleError(f"the model's logits are not finite in {dtype}: use another dtype")
        numbered = [
            replace(
                case,
                calls=tuple(
                    self._allow(measured[f"{i}.{j}."], worst) for j in range(len(case.calls))
                ),
            )
            for i, case in enumerate(golden.cases)
        ]
        return replace(golden, cases=tuple(numbered))

    def _measure_compiled(self, golden: Golden, arrays: Arrays, tick: Tick) -> dict[str, float]:
        measured = {}
        first = replace(golden, cases=golden.cases[:1])
        for place, seen in replay(self._compiled(eager=False), first, arrays):
            if place.call.function == GROW:
                continue
            eager = arrays[f"{place.prefix}eager"]
            measured[place.key] = measure_error(seen.values, eager, place.call.scale)
            tick(f"compiled {place.key}")
        return measured

    def _allow(self, call: GoldenCall, worst: float) -> GoldenCall:
        """Limit one call by the eager run's largest error, since that of a few values is chance."""
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        if call.function == GROW:
            return call
        plain = self._model.config.dtype == "float32" and self._kv_bits is None
        exact = not STEPS[call.function].has_state or (on_cpu and plain)
        # Other devices may multiply float32 in fewer bits; eager runs there do, too.
        allowed = 0.0 if exact else _EAGER_ALLOWED * worst
        return replace(call, allowed=max(_FLOAT32_ALLOWED, allowed))

    def _compiled(self, eager: bool) -> Compiled:
        return self._model.compiled(self._plan, self._kv_bits, eager)


def _expect(
    model: Model,
    call: Call,
    ids: list[list[int]],
    found: Sequence[Reference],
    kv_bits: int | None,
    logits: mx.array | None,
) -> tuple[float, Arrays]:
    """Scale, inputs and expected outputs of one call.

    `found` is the reference of each spot, `logits` are those of the call before, for `top`.
    """
    dtype = model.config.dtype
    scale = max(ref.peaks[spot.index] for ref, spot in zip(found, call.spots, strict=True)) or 1.0
    tokens, valid = mx.array(ids, dtype=mx.int32), mx.array(call.valid)
    if not math.isfinite(scale):
        raise BundleError("the model's logits are not finite in float32: check its weights")
    lengths = mx.array(call.lengths, dtype=mx.int32)
    inputs: Arrays = {
        "tokens": tokens,
        "valid": valid,
        "hidden": mx.array(call.hidden, dtype=mx.int32),
        "token": tokens[:, 0],
        "active": valid[:, 0],
        "positions": lengths,
    }
    if STEPS[call.function].outputs == ("logits",):
        expected = _expect_logits(call, found, scale, dtype)
    elif call.function == "top":
        assert logits is not None
        expected = expect_top(logits)
    else:
        rounding = max(_ROUNDING[dtype], _PACKED_ROUNDING[kv_bits])
        if call.function == "sample":  # its logits are recorded, not computed
            rounding = _FLOAT32_ALLOWED
        more, expected = expect_choice(call, ids, found, rounding * scale, FLOATS[dtype])
        inputs |= more
    stored = {name: inputs[name] for name in STORED_INPUTS[call.function]}
    return scale, {**stored, **expected, "expected_lengths": lengths}


def _expect_logits(call: Call, found: Sequence[Reference], scale: float, dtype: str) -> Arrays:
    """The most likely token of every spot, and the logits at some ids of some spots."""
    rows = len(call.ids) * (call.tokens if call.function == "forward" else 1)
    tokens, gaps = [-1] * rows, [0.0] * rows
    pairs = list(zip(found, call.spots, strict=True))
    for reference, spot in pairs:
        gaps[spot.output] = gap = reference.gaps[spot.index]
        # float32 has to agree everywhere, so ties beyond its precision are left out beforehand.
        if dtype != "float32" or gap > 2 * _FLOAT32_ALLOWED * scale:
            tokens[spot.output] = reference.tokens[spot.index]
    chosen = pairs[:: -(-len(pairs) // _MOST_SPOTS)]
    probes = [[spot.output, id_] for ref, spot in chosen for id_ in ref.probes[spot.index]]
    values = [value for ref, spot in chosen for value in ref.values[spot.index]]
    return {
        "probes": mx.array(probes, dtype=mx.int32),
        "reference": mx.array(values),
        "expected_tokens": mx.array(tokens, dtype=mx.int32),
        "gaps": mx.array(gaps),
    }


def _probe_params(prepared: Sequence[mx.array]) -> Arrays:
    """Values of every prepared array at arbitrary places, and what their errors are divided by."""
    random, each = Random(0), max(1, _PARAM_PROBES // len(prepared))
    probes = [
        [index, random.randrange(min(array.size, 2**31 - 1))]
        for index, array in enumerate(prepared)
        for _ in range(min(each, array.size))
    ]
    peaks = mx.stack([_peak(array) for array in prepared])
    where = mx.array(probes, dtype=mx.int32)
    return {
        "prepare.probes": where,
        "prepare.reference": observe_params(prepared, where),
        "prepare.scale": peaks[where[:, 0]],
    }


def _peak(array: mx.array) -> mx.array:
    peak = mx.max(mx.abs(array)).astype(mx.float32)
    return mx.where(peak > 0, peak, 1.0)
