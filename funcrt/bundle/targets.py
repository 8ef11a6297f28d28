"""Making a target: every function of a plan traced into a file, and golden calls recorded."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from funcrt._version import __version__
from funcrt.buckets import BucketPlan
from funcrt.bundle.format.manifest import (
    ExportReport,
    FunctionEntry,
    FunctionReport,
    Target,
    describe_arrays,
    describe_prepare,
    describe_state,
    describe_steps,
)
from funcrt.bundle.golden.recorder import Recorder, Tick
from funcrt.bundle.graphs import mlx_version
from funcrt.bundle.proof.invariances import count_invariances
from funcrt.cache import CacheLayout, state_bytes
from funcrt.errors import BundleError, CapacityError, ConfigError, FuncrtError
from funcrt.flat import FlatFunction, flatten
from funcrt.footprint import Footprint
from funcrt.machine import available_memory, device_name
from funcrt.model import Model
from funcrt.storage import save_arrays

import mlx.core as mx

# A graph of one function has nodes and names, no weights: some hundred bytes per input.
_GRAPH_BYTES, _GRAPH_BYTES_PER_INPUT = 1_000_000, 8_000


class TargetMaker:
    """Exports a model for the device class at hand.

    Args:
        model: what is exported.
        device: its device class.
        plan: the shapes to export.
        kv_bits: 8 or 4 packs the cache's keys and values.
        present: functions of an older target that need not be traced again.

    Raises:
        CapacityError: the largest shape cannot be tried here.
    """

    def __init__(
        self,
        model: Model,
        device: str,
        plan: BucketPlan,
        kv_bits: int | None,
        present: Collection[FunctionEntry] = (),
    ) -> None:
        self._model = model
        self._device = device
        self._plan = plan
        self.layout = model.choose_layout(plan, kv_bits)
        _check_memory(model, plan, self.layout)
        self._recorder = Recorder(model, plan, kv_bits)
        dtype = model.config.dtype
        steps = describe_steps(device, model.vocab_size, dtype, plan)
        self._entries = [describe_prepare(device), *steps]
        known = {replace(entry, primitives=0): entry for entry in present}
        self._present = {entry.key: known[entry] for entry in self._entries if entry in known}
        self.golden_file = f"golden/{device}.safetensors"

    @property
    def ticks(self) -> int:
        """How often `make` and the verification of what it made report progress."""
        traced = len(self._entries) - len(self._present)
        spec = self._model.cache_spec(self.layout)
        verified = 1 + self._recorder.calls + count_invariances(self._plan, spec)
        return traced + self._recorder.ticks + verified

    @property
    def kept(self) -> set[str]:
        """Files of the older target that stay as they are."""
        return {entry.file for entry in self._present.values()}

    def make(self, folder: Path, tick: Tick) -> Target:
        """Write the target's files into a bundle's folder; `tick` is called with each part done."""
        begin = time.perf_counter()
        model, entries, reports = self._model, [], []
        for wanted in self._entries:
            entry = self._present.get(wanted.key)
            if entry is None:
                entry, report = self._trace(wanted, folder)
                reports.append(report)
                tick(f"export {entry.key}")
            entries.append(entry)
        recording = self._recorder.record(self.golden_file, tick)
        (folder / self.golden_file).parent.mkdir(exist_ok=True)
        save_arrays(folder / self.golden_file, recording.arrays)
        compiled = recording.compiled
        reports = [replace(r, compiled=compiled.get(r.function)) for r in reports]
        return Target(
            producer={
                "funcrt": __version__,
                "mlx": mlx_version(),
                "platform": platform.platform(),
                "device": device_name(),
            },
            dtype=model.config.dtype,
            plan=self._plan,
            layout=self.layout,
            cache=describe_state(model.cache_spec(self.layout)),
            prepared=describe_arrays(model.prepared),
            functions=tuple(entries),
            golden=recording.golden,
            report=ExportReport(time.perf_counter() - begin, tuple(reports)),
        )

    def _trace(self, entry: FunctionEntry, folder: Path) -> tuple[FunctionEntry, FunctionReport]:
        begin = time.perf_counter()
        path = folder / entry.file
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            function, example = self._function(entry)
            mx.export_function(str(path), function, *example)
        except FuncrtError:
            raise
        except (
            ValueError,
            OverflowError,
        ) as error:  # a RuntimeError is about the file, such as a full disk
            raise BundleError(f"{entry.key} cannot be exported: {error}") from error
        size = path.stat().st_size
        if size > _GRAPH_BYTES + _GRAPH_BYTES_PER_INPUT * len(example):
            raise BundleError(
                f"{entry.key}: its graph takes {size} bytes, so it holds weights; the function "
                "must take every large array as an argument"
            )
        seconds = time.perf_counter() - begin
        counted = replace(entry, primitives=count_primitives(function, example))
        return counted, FunctionReport(entry.key, seconds)

    def _function(self, entry: FunctionEntry) -> tuple[FlatFunction, list[mx.array]]:
        """The flat function of an entry, and arguments of the right shapes."""
        model = self._model
        if entry.bucket is None:
            return flatten(model.prepare, model.params)[0], list(model.params.values())
        function = model.flat_step(entry.name, entry.bucket, self.layout, self._plan)
        return function, _leaves(model.example(entry.name, entry.bucket, self.layout))


def _check_memory(model: Model, plan: BucketPlan, layout: CacheLayout) -> None:
    """Raise CapacityError if there is no room to try the largest shape, instead of being killed."""
    batch, tokens, capacity = plan.batch[-1], plan.tokens[-1], plan.capacity[-1]
    spec = model.cache_spec(layout)
    state = call = state_bytes(spec, batch, capacity)
    with contextlib.suppress(ConfigError):  # a module whose config does not tell
        call = Footprint.of(model, spec).call(batch, tokens, capacity)
    if state + call > (free := available_memory()):
        raise CapacityError(
            f"batch {batch}, capacity {capacity}: the cache takes {state / 1e9:.1f} GB, a call of "
            f"{tokens} tokens up to {call / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free here, "
            "where every shape is tried: declare smaller ones, or export on a larger machine"
        )


def count_primitives(function: FlatFunction, example: Sequence[mx.array]) -> int:
    """Nodes of the graph that `mx.export_function` makes of a function."""
    count = 0

    def see(event: Mapping[str, Any]) -> None:
        nonlocal count
        count += event["type"] == "primitive"

    mx.export_function(see, function, *example)
    return count


def _leaves(example: Sequence[Mapping[str, mx.array] | mx.array]) -> list[mx.array]:
    return [
        leaf
        for item in example
        for leaf in ([item] if isinstance(item, mx.array) else item.values())
    ]
