"""Reading, checking and writing `manifest.json`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from funcrt.bundle.format.files import hash_file, read_small
from funcrt.bundle.format.manifest import (
    CERTIFICATE,
    DEVICE_CLASSES,
    DIGEST,
    DTYPES,
    FORMAT,
    GROW,
    MANIFEST,
    PREPARE,
    SCHEMA_VERSION,
    ArraySpec,
    FunctionEntry,
    Manifest,
    Target,
    describe_prepare,
    describe_steps,
)
from funcrt.bundle.format.records import decode, encode, parse_json
from funcrt.cache.layout import DTYPES as CACHE_DTYPES
from funcrt.cache.layout import check_layout, slot_axis
from funcrt.errors import BundleError, CacheError
from funcrt.params import FLOATS
from funcrt.steps import STEPS
from funcrt.storage import save_json

_LARGEST = 2**31 - 1  # shapes and counts are int32 in MLX
_AXES = {"row": 1, "positions": 2, "full": 4, "quantized": 4, "latent": 4, "ring": 4}
_LONGEST_PATH = 255  # bytes that every file system takes


def load_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of a bundle; other files are not looked at.

    Raises BundleError when it is missing, damaged, of another schema or contradicts itself.
    """
    manifest, digest = read_manifest(Path(folder))
    check_digest(Path(folder), digest)
    return manifest


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """A checked manifest and the sha256 of its bytes, which `check_digest` compares."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise BundleError(f"{folder} is not a folder; a bundle is one that `funcrt export` made")
    try:
        text = read_small(path)
    except OSError as error:
        raise BundleError(
            f"{folder} is not a bundle: cannot read {MANIFEST} ({error.strerror})"
        ) from None
    data = parse_json(text, str(path))
    _check_schema(data.get("format"), data.get("schema_version"), folder)
    manifest: Manifest = decode(Manifest, data, MANIFEST)
    check_manifest(manifest)
    return manifest, hashlib.sha256(text).hexdigest()


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Check a manifest, then write it and its hash. Raises BundleError, OSError."""
    check_manifest(manifest)
    for name in (MANIFEST, DIGEST):  # they may be links to those of another bundle
        (folder / name).unlink(missing_ok=True)
    save_json(folder / MANIFEST, encode(manifest))
    (folder / DIGEST).write_text(f"{hash_file(folder / MANIFEST)}  {MANIFEST}\n", "utf-8")


def check_digest(folder: Path, digest: str) -> None:
    """Raise BundleError unless the manifest's bytes have the hash recorded beside it."""
    try:
        recorded = read_small(folder / DIGEST)
    except OSError as error:
        raise BundleError(f"cannot read {folder / DIGEST}: {error.strerror}") from None
    if recorded != f"{digest}  {MANIFEST}\n".encode():
        raise BundleError(f"{folder / MANIFEST} does not match {DIGEST}: damaged; export it again")


def _check_schema(found: object, version: object, folder: Path) -> None:
    if found != FORMAT:
        raise BundleError(
            f"{folder}: expected a manifest of format {FORMAT!r}, got {_shown(found)}"
        )
    major = SCHEMA_VERSION.split(".")[0]
    if not isinstance(version, str) or not re.fullmatch(rf"{major}\.\d{{1,9}}", version):
        raise BundleError(
            f"{folder}: schema version {_shown(version)} cannot be read, "
            f"this funcrt reads {major}.x: "
            "use the funcrt that made it, or export it again"
        )


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, (dict, list)) else repr(value)[:40]


def check_manifest(manifest: Manifest) -> None:
    """Raise BundleError unless the manifest agrees with itself and with this funcrt's calls."""
    if not (min(manifest.vocab_size, manifest.max_positions) >= 1) or (
        max(manifest.vocab_size, manifest.max_positions) > _LARGEST
    ):
        raise BundleError(f"{MANIFEST}: sizes must be from 1 to {_LARGEST}")
    ends = manifest.model.get("eos_token_ids", [])
    if not isinstance(ends, (list, tuple)) or any(type(end) is not int for end in ends):
        raise BundleError(f"{MANIFEST}: model.eos_token_ids: expected a list of integers")
    for path, entry in manifest.files.items():
        _check_path(path)
        hashes = [entry.sha256] if entry.header is None else [entry.sha256, entry.header]
        if not 0 <= entry.size < 2**63 or not all(map(_is_hash, hashes)):
            raise BundleError(f"{MANIFEST}: files.{path}: size or sha256 is none")
    _check_params(manifest)
    if not manifest.targets:
        raise BundleError(f"{MANIFEST}: no targets")
    for device, target in manifest.targets.items():
        if device not in DEVICE_CLASSES:
            raise BundleError(
                f"{MANIFEST}: unknown device class {device!r}; known: {', '.join(DEVICE_CLASSES)}"
            )
        _check_listed(target.files, manifest)
        _check_numbers(target)
        _check_arrays("prepared", target.prepared)
        _check_state(target)
        _check_functions(manifest, device, target)
        _check_golden(target)


def _check_params(manifest: Manifest) -> None:
    """Whether the weights are those of safetensors files, each named once."""
    paths = manifest.params.files
    _check_listed(paths, manifest)
    if len(set(paths)) < len(paths) or any(manifest.files[path].header is None for path in paths):
        raise BundleError(f"{MANIFEST}: params.files: one is listed twice or has no header's hash")
    _check_arrays("params.stored", manifest.params.stored)


def _check_arrays(where: str, specs: Sequence[ArraySpec]) -> None:
    if len({spec.name for spec in specs}) < len(specs):
        raise BundleError(f"{MANIFEST}: {where} lists an array twice")
    for spec in specs:
        if spec.dtype not in DTYPES or not all(0 <= size <= _LARGEST for size in spec.shape):
            raise BundleError(
                f"{MANIFEST}: {where}: {spec.name} of {spec.dtype} {list(spec.shape)} is no array"
            )


def _check_listed(paths: Iterable[str], manifest: Manifest) -> None:
    for path in paths:
        if path not in manifest.files:
            raise BundleError(f"{MANIFEST}: {path} is used but not among `files`")


def _is_hash(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _check_numbers(target: Target) -> None:
    plan = target.plan
    if max(*plan.batch, *plan.tokens, *plan.capacity) > _LARGEST:
        raise BundleError(f"{MANIFEST}: sizes must be from 1 to {_LARGEST}")
    if target.dtype not in FLOATS:
        raise BundleError(f"{MANIFEST}: dtype {target.dtype!r} is not one of {', '.join(FLOATS)}")
    if not target.producer.get("mlx"):
        raise BundleError(f"{MANIFEST}: producer.mlx is missing")
    try:
        check_layout(target.layout)
    except CacheError as error:
        raise BundleError(f"{MANIFEST}: layout: {error}") from None


def _check_state(target: Target) -> None:
    if not target.cache or target.cache[0].name != "lengths":
        raise BundleError(f"{MANIFEST}: cache must begin with lengths, int32 [B]")
    if len({array.name for array in target.cache}) < len(target.cache):
        raise BundleError(f"{MANIFEST}: cache lists an array twice")
    for array, entry in zip(target.cache, target.cache_spec, strict=True):
        axis = slot_axis(array.name)
        sizes = [size for size in array.shape if isinstance(size, int)]
        sound = (
            array.kind == entry.kind
            and array.dtype in (("int32",) if array.kind in ("row", "positions") else CACHE_DTYPES)
            and len(array.shape) == _AXES.get(array.kind, len(array.shape))
            and array.shape[:1] == ("B",)
            and [i for i, size in enumerate(array.shape) if size == "S"] == ([axis] if axis else [])
            and array.shape.count("B") == 1
            and all(size == "S" or size == "B" or isinstance(size, int) for size in array.shape)
            and all(0 < size <= _LARGEST for size in sizes)
            and 0 <= array.fill <= _LARGEST
        )
        if not sound:
            raise BundleError(
                f"{MANIFEST}: cache {array.name}: kind {array.kind!r}, shape {list(array.shape)}, "
                f"{array.dtype} is not one that this funcrt knows; export the bundle again"
            )


def _check_path(path: str) -> None:
    pure = PurePosixPath(path)
    plain = str(pure) == path and not pure.is_absolute() and ".." not in pure.parts
    known = path in ("", ".", MANIFEST, DIGEST, CERTIFICATE)
    if not plain or known or set(path) & set("\\:\0") or len(path.encode()) > _LONGEST_PATH:
        raise BundleError(f"{MANIFEST}: unsafe file path {path!r}; paths stay inside the bundle")


def _check_functions(manifest: Manifest, device: str, target: Target) -> None:
    _check_entry(target.prepare_function(), describe_prepare(device))
    functions = target.step_functions()
    known = [entry for entry in target.functions if entry.name in (PREPARE, *STEPS)]
    if len(known) != len(functions) + 1:
        raise BundleError(f"{MANIFEST}: a function of {device} is listed twice or has no bucket")
    plan = target.plan  # every shape has a `forward`; before a list of all is made
    if len(plan.batch) * len(plan.tokens) * len(plan.capacity) > len(functions):
        raise BundleError(
            f"{MANIFEST}: the plan of {device} has more shapes than there are functions: "
            "export the bundle again"
        )
    names = {name for name, _ in functions}
    steps = list(describe_steps(device, manifest.vocab_size, target.dtype, plan))
    for expected in steps:
        assert expected.bucket is not None
        found = functions.get((expected.name, expected.bucket))
        if found is not None:
            _check_entry(found, expected)
        elif expected.name in names or not STEPS[expected.name].optional:
            raise BundleError(
                f"{MANIFEST}: {expected.key} is missing for {device}: export the bundle again"
            )
    if functions.keys() - {(step.name, step.bucket) for step in steps}:
        raise BundleError(f"{MANIFEST}: functions of {device} are not of its plan")


def _check_entry(entry: FunctionEntry, expected: FunctionEntry) -> None:
    if entry != replace(expected, primitives=entry.primitives):
        raise BundleError(
            f"{MANIFEST}: {entry.key}: its inputs and outputs are not those that this funcrt "
            "calls; export the bundle again"
        )


def _check_golden(target: Target) -> None:
    golden, plan, functions = target.golden, target.plan, target.step_functions()
    if golden.params_allowed < 0:
        raise BundleError(f"{MANIFEST}: golden.params_allowed is below 0")
    called = set()
    newer = {entry.name for entry in target.functions} - {PREPARE, *STEPS}
    for case in golden.cases:
        declared = case.batch in plan.batch and case.capacity in plan.capacity
        for call in case.calls:
            if call.function in newer:
                continue
            known = call.function in STEPS and (call.function, case.bucket(call)) in functions
            if not declared or not known:
                raise BundleError(
                    f"{MANIFEST}: golden call {call.function} of {call.tokens} tokens at batch "
                    f"{case.batch}, capacity {case.capacity} is not one of the plan"
                )
            if not call.scale > 0 or not (call.eager >= 0 <= call.allowed):
                raise BundleError(f"{MANIFEST}: golden call {call.function}: numbers below 0")
            called.add((call.function, case.bucket(call)))
        if case.calls and not case.calls[0].fresh:
            raise BundleError(f"{MANIFEST}: a golden case must begin from a fresh cache")
    for name, bucket in functions:
        if (name, bucket) not in called and name != GROW:  # without slots nothing grows
            raise BundleError(f"{MANIFEST}: {name}_{bucket} has no golden call")
