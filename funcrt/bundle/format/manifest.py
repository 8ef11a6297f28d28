"""`manifest.json`: everything that a loader has to know about a bundle, in any language.

What is the same on every machine stands at the top; what was exported for one device class is a
`Target`, with the MLX version that made it. Graphs take arrays by position: the params group that
the entry names, in the order listed once; then the entry's own inputs; then, if it has one, the
cache state in the order of `cache`. They return the entry's outputs and then the state.
`manifest.json.sha256` holds the hash of the manifest's own bytes, in the form that
`sha256sum --check` reads.

Rules of `schema_version`: fields and functions may be added within a major version and readers pass
over those they do not know, golden calls of such functions included; another major version is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from funcrt.buckets import Bucket, BucketPlan
from funcrt.cache import CacheEntry, CacheLayout, CacheSpec
from funcrt.errors import BundleError
from funcrt.steps import STEPS, input_shape, output_shape

import mlx.core as mx

FORMAT = "funcrt-bundle"
SCHEMA_VERSION = "3.0"
MANIFEST = "manifest.json"
DIGEST = "manifest.json.sha256"
CERTIFICATE = "certificate.json"
PREPARE = "prepare"
GROW = "grow"
DEVICE_CLASSES = ("cpu", "cuda", "metal")
DTYPES = {
    str(dtype).rsplit(".", maxsplit=1)[-1]: dtype
    for dtype in (
        mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64,
        mx.float16, mx.bfloat16, mx.float32, mx.float64, mx.complex64,
    )
}  # fmt: skip
"""Those of arrays, by the names that specs have."""


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
        file: path inside the bundle.
        bucket: its shape; None for `prepare`. Axes that the function lacks are T = 1, S = 0.
        params: "stored" or "prepared", the group it takes first; "none" takes none.
        inputs: arrays after the params.
        state: whether the cache state is the last input and the last output.
        outputs: arrays before the state; `prepare` returns the prepared group instead.
        grown: capacity of the state that `grow` returns.
        primitives: nodes of the graph.
    """

    name: str
    file: str
    bucket: Bucket | None
    params: str
    inputs: tuple[ArraySpec, ...]
    state: bool
    outputs: tuple[ArraySpec, ...]
    grown: int | None = None
    primitives: int = 0

    @property
    def key(self) -> str:
        """`decode_b1_t1_s512`, or `prepare`."""
        return self.name if self.bucket is None else f"{self.name}_{self.bucket}"


@dataclass(frozen=True)
class ParamsEntry:
    """The weights as stored, in the order `prepare` takes them; no files if they are elsewhere."""

    files: tuple[str, ...]
    stored: tuple[ArraySpec, ...]


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
    eager: float = 0.0
    allowed: float = 0.0


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
    """How the export of one function went.

    `compiled` is the distance of the compiled run from the eager one, over the largest logit, where
    it was measured; that of the imported function stands in the certificate.
    """

    function: str
    seconds: float
    compiled: float | None = None


@dataclass(frozen=True)
class ExportReport:
    """How the export went, until its verification. For people; loaders do not need it."""

    seconds: float
    functions: tuple[FunctionReport, ...]


@dataclass(frozen=True)
class Target:
    """What was exported for one device class.

    Attributes:
        producer: "mlx" (the version that made the graphs, the only one that runs them), and for
            people "funcrt", "platform", "device".
        dtype: of logits, activations and cache.
        plan: the declared buckets.
        layout: how the cache was laid out, the largest T of rings included.
        cache: the arrays of a cache state, in order.
        prepared: what `prepare` returns, in order.
        functions: every graph.
        golden: recorded calls.
        report: for people.
    """

    producer: dict[str, str]
    dtype: str
    plan: BucketPlan
    layout: CacheLayout
    cache: tuple[StateArray, ...]
    prepared: tuple[ArraySpec, ...]
    functions: tuple[FunctionEntry, ...]
    golden: Golden
    report: ExportReport | None = None

    @property
    def cache_spec(self) -> CacheSpec:
        """The state's arrays."""
        return tuple(CacheEntry(a.name, a.shape, a.dtype, a.fill) for a in self.cache)

    @property
    def files(self) -> set[str]:
        """The files that only this target needs."""
        return {self.golden.file, *(entry.file for entry in self.functions)}

    def step_functions(self) -> dict[tuple[str, Bucket], FunctionEntry]:
        """The functions that this version of funcrt calls."""
        return {
            (entry.name, entry.bucket): entry
            for entry in self.functions
            if entry.name in STEPS and entry.bucket is not None
        }

    def prepare_function(self) -> FunctionEntry:
        """The entry of `prepare`. Raises BundleError without one."""
        for entry in self.functions:
            if entry.name == PREPARE:
                return entry
        raise BundleError(f"{MANIFEST}: no {PREPARE} function")


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 of one file.

    `header` is the sha256 of a safetensors file's first 8 bytes and the header whose length they
    give: what tells names, shapes and places of all weights without reading them.
    """

    size: int
    sha256: str
    header: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The whole file.

    Attributes:
        format: `funcrt-bundle`.
        schema_version: of this file's form.
        family: `model_type` whose code `funcrt.models` has; None where it came from elsewhere, and
            only whoever has it can export again.
        model: a `funcrt.ModelConfig` without its dtype. Loaders need not understand it.
        vocab_size: V.
        max_positions: longest text that the model was trained for.
        fingerprint: over the config and every weight.
        params: the weights.
        targets: by device class, of `DEVICE_CLASSES`.
        files: every file but the manifest, its hash and the certificate.
    """

    format: str
    schema_version: str
    family: str | None
    model: dict[str, Any]
    vocab_size: int
    max_positions: int
    fingerprint: str
    params: ParamsEntry
    targets: dict[str, Target]
    files: dict[str, FileEntry]


def describe_state(spec: CacheSpec) -> tuple[StateArray, ...]:
    """A cache spec as the manifest lists it."""
    return tuple(StateArray(e.name, e.kind, e.shape, e.dtype, e.fill) for e in spec)


def describe_step(
    name: str, bucket: Bucket, device: str, vocab_size: int, dtype: str, plan: BucketPlan
) -> FunctionEntry:
    """The entry that a row of `STEPS` must have, but for its primitives."""
    step, sizes = STEPS[name], (bucket, vocab_size, dtype)
    return FunctionEntry(
        name=name,
        file=f"functions/{device}/{name}_{bucket}.mlxfn",
        bucket=bucket,
        params="prepared" if step.has_params else "none",
        inputs=tuple(_spec(label, *input_shape(label, *sizes)) for label in step.inputs),
        state=step.has_state,
        outputs=tuple(_spec(label, *output_shape(step, label, *sizes)) for label in step.outputs),
        grown=plan.next_capacity(bucket.capacity) if step.grows else None,
    )


def describe_steps(
    device: str, vocab_size: int, dtype: str, plan: BucketPlan
) -> Iterator[FunctionEntry]:
    """Every function that a plan has, but `prepare`."""
    for step in STEPS.values():
        for bucket in step.buckets(plan.batch, plan.tokens, plan.capacity):
            yield describe_step(step.name, bucket, device, vocab_size, dtype, plan)


def describe_prepare(device: str) -> FunctionEntry:
    """The entry of `prepare`, but for its primitives."""
    file = f"functions/{device}/{PREPARE}.mlxfn"
    return FunctionEntry(PREPARE, file, None, "stored", (), False, ())


def describe_arrays(arrays: Mapping[str, mx.array]) -> tuple[ArraySpec, ...]:
    """Specs of a params dict, in its order."""
    return tuple(_spec(name, array.shape, array.dtype) for name, array in arrays.items())


def _spec(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> ArraySpec:
    return ArraySpec(name, tuple(shape), str(dtype).rsplit(".", maxsplit=1)[-1])
