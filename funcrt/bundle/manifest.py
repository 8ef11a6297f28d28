"""`manifest.json`: everything that a loader has to know about a bundle, in any language.

Graphs take arrays by position: the params group that the entry names, in the order listed once
for the bundle; then the entry's own inputs; then, if it has one, the cache state in the order of
`cache`. They return the entry's outputs and then the state. `manifest.json.sha256` holds the hash
of the manifest's own bytes, in the form that `sha256sum --check` reads.

Rules of `schema_version`: fields may be added within a major version and readers pass over those
they do not know; another major version is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from funcrt.buckets import Bucket, BucketPlan
from funcrt.cache import CacheEntry, CacheSpec
from funcrt.errors import BundleError
from funcrt.steps import STEPS, input_shape, output_shape

import mlx.core as mx

FORMAT = "funcrt-bundle"
SCHEMA_VERSION = "2.0"
MANIFEST = "manifest.json"
DIGEST = "manifest.json.sha256"
PREPARE = "prepare"
DEVICE_CLASSES = ("cpu", "cuda", "metal")


@dataclass(frozen=True)
class ArraySpec:
    """Name, shape and dtype of one array."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StateArray:
    """One array of the cache state; "B" and "S" in its shape stand for batch and capacity.

    An empty state holds `fill` everywhere.
    """

    name: str
    kind: str
    shape: tuple[int | str, ...]
    dtype: str
    fill: int = 0


@dataclass(frozen=True)
class FunctionEntry:
    """One exported function.

    Attributes:
        name: `prepare`, or a row of `funcrt.steps.STEPS`; unknown ones are passed over.
        device: device class that the graph runs on.
        file: path inside the bundle.
        bucket: its shape; None for `prepare`. Axes that the function lacks are T = 1, S = 0.
        params: "stored" or "prepared", the group it takes first; "none" takes none.
        inputs: arrays after the params.
        state: whether the cache state is the last input and the last output.
        outputs: arrays before the state; `prepare` returns the prepared group instead.
    """

    name: str
    device: str
    file: str
    bucket: Bucket | None
    params: str
    inputs: tuple[ArraySpec, ...]
    state: bool
    outputs: tuple[ArraySpec, ...]

    @property
    def key(self) -> str:
        """`decode_b1_t1_s512`, or `prepare`."""
        return self.name if self.bucket is None else f"{self.name}_{self.bucket}"


@dataclass(frozen=True)
class ParamsEntry:
    """The weights: as stored, in the order `prepare` takes them, and as it returns them."""

    files: tuple[str, ...]
    stored: tuple[ArraySpec, ...]
    prepared: dict[str, tuple[ArraySpec, ...]]  # by device class


@dataclass(frozen=True)
class GoldenCall:
    """One recorded call; its arrays are named `CASE.CALL.NAME` in the golden file.

    Attributes:
        function: a row of `STEPS`.
        tokens: T.
        fresh: start from an empty cache state instead of the one the call before returned.
        undo: the next call goes on from the state before this one.
        scale: largest |logit| of the float32 reference; errors are divided by it.
        eager: error of the exporting process's own plain run.
        allowed: largest error that passes.
    """

    function: str
    tokens: int
    fresh: bool
    undo: bool
    scale: float
    eager: float
    allowed: float


@dataclass(frozen=True)
class GoldenCase:
    """Calls of one batch and capacity that pass their cache state on."""

    batch: int
    capacity: int
    calls: tuple[GoldenCall, ...]

    def bucket(self, call: GoldenCall) -> Bucket:
        """The bucket that a call runs in."""
        return Bucket(self.batch, call.tokens, self.capacity * STEPS[call.function].has_state)


@dataclass(frozen=True)
class Golden:
    """Inputs and outputs to check a loader against; `params_allowed` is for prepared weights."""

    file: str
    params_allowed: float
    cases: tuple[GoldenCase, ...]


@dataclass(frozen=True)
class FunctionReport:
    """How the export of one function went; errors are relative to the eager run in `dtype`."""

    function: str
    seconds: float
    bytes: int
    compiled: float | None = None
    imported: float | None = None


@dataclass(frozen=True)
class ExportReport:
    """How the export went. For people; loaders do not need it."""

    seconds: float
    verify_seconds: float
    functions: tuple[FunctionReport, ...]


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The whole file. `model` is a `funcrt.ModelConfig`, which loaders need not understand."""

    format: str
    schema_version: str
    producer: dict[str, str]
    model: dict[str, Any]
    vocab_size: int
    max_positions: int
    dtype: str
    plan: BucketPlan
    cache: tuple[StateArray, ...]
    params: ParamsEntry
    functions: tuple[FunctionEntry, ...]
    golden: Golden
    files: dict[str, FileEntry]
    fingerprint: str = ""
    report: ExportReport | None = None

    @property
    def device_classes(self) -> tuple[str, ...]:
        """Device classes that functions exist for."""
        return tuple(sorted({entry.device for entry in self.functions}))

    @property
    def cache_spec(self) -> CacheSpec:
        """The state's arrays."""
        return tuple(CacheEntry(a.name, a.shape, a.dtype, a.fill) for a in self.cache)

    def step_functions(self, device: str) -> dict[tuple[str, Bucket], FunctionEntry]:
        """The functions of a device class that this version of funcrt calls."""
        return {
            (entry.name, entry.bucket): entry
            for entry in self.functions
            if entry.device == device and entry.name in STEPS and entry.bucket is not None
        }

    def prepare_function(self, device: str) -> FunctionEntry:
        """The entry of `prepare`. Raises BundleError without one."""
        for entry in self.functions:
            if entry.device == device and entry.name == PREPARE:
                return entry
        raise BundleError(f"{MANIFEST}: no {PREPARE} function for {device}")


def describe_state(spec: CacheSpec) -> tuple[StateArray, ...]:
    """A cache spec as the manifest lists it."""
    return tuple(StateArray(e.name, e.kind, e.shape, e.dtype, e.fill) for e in spec)


def describe_step(name: str, bucket: Bucket, device: str, manifest: Manifest) -> FunctionEntry:
    """The entry that a row of `STEPS` must have."""
    step, sizes = STEPS[name], (bucket, manifest.vocab_size, manifest.dtype)
    return FunctionEntry(
        name=name,
        device=device,
        file=f"functions/{device}/{name}_{bucket}.mlxfn",
        bucket=bucket,
        params="prepared" if step.has_params else "none",
        inputs=tuple(_spec(label, *input_shape(label, *sizes)) for label in step.inputs),
        state=step.has_state,
        outputs=tuple(_spec(label, *output_shape(step, label, *sizes)) for label in step.outputs),
    )


def describe_prepare(device: str) -> FunctionEntry:
    """The entry of `prepare`."""
    file = f"functions/{device}/{PREPARE}.mlxfn"
    return FunctionEntry(PREPARE, device, file, None, "stored", (), False, ())


def describe_arrays(arrays: Mapping[str, mx.array]) -> tuple[ArraySpec, ...]:
    """Specs of a params dict, in its order."""
    return tuple(_spec(name, array.shape, array.dtype) for name, array in arrays.items())


def _spec(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> ArraySpec:
    return ArraySpec(name, tuple(shape), str(dtype).rsplit(".", maxsplit=1)[-1])
