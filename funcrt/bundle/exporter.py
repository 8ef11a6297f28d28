"""Exporting a model: trace every function, record golden calls, verify elsewhere, publish."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import funcrt
from funcrt._version import __version__
from funcrt.buckets import BucketPlan
from funcrt.bundle.checks import describe_files, save_manifest
from funcrt.bundle.golden import FILE as GOLDEN_FILE
from funcrt.bundle.golden import Recorder
from funcrt.bundle.loader import Bundle, device_class, mlx_version, open_bundle
from funcrt.bundle.manifest import (
    DIGEST,
    FORMAT,
    MANIFEST,
    SCHEMA_VERSION,
    ExportReport,
    FunctionEntry,
    FunctionReport,
    Golden,
    Manifest,
    ParamsEntry,
    describe_arrays,
    describe_prepare,
    describe_state,
    describe_step,
)
from funcrt.bundle.verifier import Progress
from funcrt.cache import CacheLayout
from funcrt.errors import BundleError, FuncrtError, some_of
from funcrt.flat import flatten
from funcrt.model import Model
from funcrt.params import Params
from funcrt.publish import Kind, publish, staging
from funcrt.steps import STEPS
from funcrt.storage import save_arrays

import mlx.core as mx


def _is_bundle(folder: Path) -> bool:
    """Whether a folder holds a bundle, damaged perhaps, and no file of anybody else."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        ours = {MANIFEST, DIGEST, *manifest["files"]}
        if manifest["format"] != FORMAT:
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all(
        path.relative_to(folder).as_posix() in ours
        for path in folder.rglob("*")
        if not path.is_dir()
    )


KIND = Kind("a folder of only a bundle's files", _is_bundle)

_SHARD_BYTES = 5_000_000_000
# A graph of one function has nodes and names, no weights: some hundred bytes per input.
_GRAPH_BYTES, _GRAPH_BYTES_PER_INPUT = 1_000_000, 8_000


def export(
    model: Model,
    folder: str | Path,
    plan: BucketPlan,
    progress: Progress | None = None,
    kv_bits: int | None = None,
) -> Bundle:
    """Write `model` as a bundle that runs without the model's code.

    Every function of the plan is traced, checked against a float32 reference in a new process, and
    only then does the bundle appear at `folder`, replacing an older one as a whole.

    Args:
        model: what `load_model` or `converters.load` returned.
        folder: where the bundle goes; by habit its name ends in `.funcrt`.
        plan: the shapes to export.
        progress: called with `(done, total, item)`.
        kv_bits: 8 or 4 packs the cache's keys and values.

    Returns:
        The bundle; `bundle.manifest.report` has times, sizes and errors per function.

    Raises:
        PublishError: what is at `folder` is not a bundle.
        BundleError: the folder cannot be written, the disk is full, or a check failed. What was at
            `folder` is then unchanged.
    """
    target = Path(os.path.abspath(folder))  # noqa: PTH100 (resolve() would follow a link)
    try:
        with staging(target, KIND) as place:
            bundle = _write(model, plan, kv_bits, place, progress or _silent)
            publish(place, target, KIND)
    except FuncrtError:
        raise
    except (OSError, RuntimeError) as error:
        raise BundleError(f"cannot export to {folder}: {error}") from error
    bundle.folder = target
    return bundle


def _write(
    model: Model, plan: BucketPlan, kv_bits: int | None, folder: Path, progress: Progress
) -> Bundle:
    """Fill and verify an empty folder; the bundle that it returns is open, but not yet in place."""
    begin = time.perf_counter()
    layout = model.choose_layout(plan, kv_bits)
    recorder = Recorder(model, plan, kv_bits)
    manifest = _describe(model, plan, layout)
    # Weights and every function; golden calls; every function again when it is verified.
    tick = _Ticker(progress, 1 + 2 * len(manifest.functions) + recorder.ticks)
    _save_weights(model, manifest, folder)
    tick("weights")
    reports = [_export_function(model, layout, entry, folder, tick) for entry in manifest.functions]
    recording = recorder.record(tick)
    save_arrays(folder / recording.golden.file, recording.arrays)
    manifest = replace(manifest, golden=recording.golden, files=describe_files(folder))
    save_manifest(folder, manifest)

    verify_begin = time.perf_counter()
    imported = _verify_elsewhere(folder, tick)
    end = time.perf_counter()
    errors = [
        replace(r, compiled=recording.compiled.get(r.function), imported=imported[r.function])
        for r in reports
    ]
    report = ExportReport(end - begin, end - verify_begin, tuple(errors))
    save_manifest(folder, replace(manifest, report=report))
    return open_bundle(folder)


class _Ticker:
    """Counts parts done and passes the count on."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, item: str) -> None:
        self._done += 1
        self._progress(self._done, self._total, item)


def _describe(model: Model, plan: BucketPlan, layout: CacheLayout) -> Manifest:
    """The manifest without what is only known at the end: golden calls, files, report."""
    device = device_class()
    shards = _shard(model.params)
    manifest = Manifest(
        format=FORMAT,
        schema_version=SCHEMA_VERSION,
        producer={"funcrt": __version__, "mlx": mlx_version(), "platform": platform.platform()},
        model=model.config.to_dict(),
        vocab_size=model.vocab_size,
        max_positions=model.config.max_positions,
        dtype=model.config.dtype,
        plan=plan,
        cache=describe_state(model.cache_spec(layout)),
        params=ParamsEntry(
            files=tuple(_shard_name(i, len(shards)) for i in range(len(shards))),
            stored=describe_arrays(model.params),
            prepared={device: describe_arrays(model.prepared)},
        ),
        functions=(),
        golden=Golden(GOLDEN_FILE, 0.0, ()),
        files={},
        fingerprint=model.fingerprint,
    )
    entries = [
        describe_step(step.name, bucket, device, manifest)
        for step in STEPS.values()
        for bucket in step.buckets(plan.batch, plan.tokens, plan.capacity)
    ]
    return replace(manifest, functions=(describe_prepare(device), *entries))


def _save_weights(model: Model, manifest: Manifest, folder: Path) -> None:
    """Weights as stored and the tokenizer's files."""
    for name, shard in zip(manifest.params.files, _shard(model.params), strict=True):
        save_arrays(folder / name, shard, {"format": "mlx"})
    if model.tokenizer is not None:
        model.tokenizer.save(folder)


def _shard(params: Params) -> list[Params]:
    shards: list[Params] = [{}]
    size = 0
    for name, array in params.items():
        if shards[-1] and size + array.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    return shards


def _shard_name(index: int, count: int) -> str:
    """One file, or numbered ones; the manifest lists them, so no other index is needed."""
    return (
        "params.safetensors" if count == 1 else f"params-{index + 1:05}-of-{count:05}.safetensors"
    )


def _export_function(
    model: Model, layout: CacheLayout, entry: FunctionEntry, folder: Path, tick: _Ticker
) -> FunctionReport:
    begin = time.perf_counter()
    path = folder / entry.file
    path.parent.mkdir(parents=True, exist_ok=True)
    if entry.bucket is None:
        function = flatten(model.prepare, model.params)[0]
        example = list(model.params.values())
    else:
        function = model.flat_step(entry.name, entry.bucket, layout)
        example = _leaves(model.example(entry.name, entry.bucket, layout))
    mx.export_function(str(path), function, *example)
    size = path.stat().st_size
    if size > _GRAPH_BYTES + _GRAPH_BYTES_PER_INPUT * len(example):
        raise BundleError(
            f"{entry.key}: its graph takes {size} bytes, so it holds weights; the function must "
            "take every large array as an argument"
        )
    tick(f"export {entry.key}")
    return FunctionReport(entry.key, time.perf_counter() - begin, size)


def _leaves(example: Sequence[Mapping[str, mx.array] | mx.array]) -> list[mx.array]:
    return [
        leaf
        for item in example
        for leaf in ([item] if isinstance(item, mx.array) else item.values())
    ]


# --- verification in a process of its own --------------------------------------------------------


def _verify_elsewhere(folder: Path, tick: _Ticker) -> dict[str, float]:
    """Verify in a new process; distance from the eager run by function.

    Raises BundleError naming the checks that failed.
    """
    device = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"
    module = "funcrt.bundle.verifier"
    command = [sys.executable, "-m", module, "--json", "--device", device, str(folder)]
    # The same packages, wherever this process found them; not what lies in the current folder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    root = Path(funcrt.__file__).parents[1]
    checks: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=root
        ) as process,
    ):
        try:
            checks = _follow(process.stdout or (), tick)
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    failed = [check for check in checks if not check["passed"]]
    if failed:
        raise BundleError(
            f"the exported functions are wrong, nothing is published: {_list(failed)}"
        )
    if status or not checks:
        reason = said[-1] if said else f"exit status {status}"
        raise BundleError(f"the exported functions do not run, nothing is published: {reason}")
    return {c["function"]: c["eager"] for c in checks if c["check"] == "error"}


def _follow(lines: Iterable[str], tick: _Ticker) -> list[dict[str, Any]]:
    for line in lines:
        message = json.loads(line)
        if "checks" in message:
            checks: list[dict[str, Any]] = message["checks"]
            return checks
        tick(f"verify {message['item']}")
    return []


def _list(failed: Sequence[dict[str, Any]], most: int = 4) -> str:
    listed = [
        f"{check['function']} {check['check']} {check['measured']} (at most {check['allowed']})"
        for check in failed
    ]
    return some_of(listed, most, "; ")


def _silent(done: int, total: int, item: str) -> None:
    pass
