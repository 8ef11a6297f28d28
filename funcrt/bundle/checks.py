"""Reading, checking and writing `manifest.json`, and checking the files that it lists."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath

from funcrt.bundle.manifest import (
    DEVICE_CLASSES,
    DIGEST,
    FORMAT,
    MANIFEST,
    PREPARE,
    SCHEMA_VERSION,
    FileEntry,
    FunctionEntry,
    Manifest,
    describe_prepare,
    describe_step,
)
from funcrt.bundle.records import decode, encode, parse_json
from funcrt.cache.layout import DTYPES, slot_axis
from funcrt.errors import BundleError
from funcrt.params import FLOATS
from funcrt.steps import STEPS
from funcrt.storage import save_json

_LARGEST = 2**31 - 1  # shapes and counts are int32 in MLX
_CHUNK = 1 << 20


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
        text = path.read_bytes()
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
    save_json(folder / MANIFEST, encode(manifest))
    (folder / DIGEST).write_text(f"{hash_file(folder / MANIFEST)}  {MANIFEST}\n", "utf-8")


def check_digest(folder: Path, digest: str) -> None:
    """Raise BundleError unless the manifest's bytes have the hash recorded beside it."""
    try:
        recorded = (folder / DIGEST).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read {folder / DIGEST}: {error}") from None
    if recorded != f"{digest}  {MANIFEST}\n":
        raise BundleError(f"{folder / MANIFEST} does not match {DIGEST}: damaged; export it again")


def _check_schema(found: object, version: object, folder: Path) -> None:
    if found != FORMAT:
        raise BundleError(f"{folder}: expected a manifest of format {FORMAT!r}, got {found!r}")
    major = SCHEMA_VERSION.split(".")[0]
    if not isinstance(version, str) or version.split(".")[0] != major:
        raise BundleError(
            f"{folder}: schema version {version!r} cannot be read, this funcrt reads {major}.x: "
            "use the funcrt that made it, or export it again"
        )


def check_manifest(manifest: Manifest) -> None:
    """Raise BundleError unless the manifest agrees with itself and with this funcrt's calls."""
    _check_numbers(manifest)
    _check_state(manifest)
    for path in manifest.files:
        _check_path(path)
    listed = [*manifest.params.files, manifest.golden.file]
    for path in [*listed, *(entry.file for entry in manifest.functions)]:
        if path not in manifest.files:
            raise BundleError(f"{MANIFEST}: {path} is used but not among `files`")
    for device in manifest.device_classes:
        _check_functions(manifest, device)
    _check_golden(manifest)


def _check_numbers(manifest: Manifest) -> None:
    plan = manifest.plan
    counts = [manifest.vocab_size, manifest.max_positions]
    if min(counts) < 1 or max(*counts, *plan.batch, *plan.tokens, *plan.capacity) > _LARGEST:
        raise BundleError(f"{MANIFEST}: sizes must be from 1 to {_LARGEST}")
    if manifest.dtype not in FLOATS:
        raise BundleError(f"{MANIFEST}: dtype {manifest.dtype!r} is not one of {', '.join(FLOATS)}")
    if not manifest.producer.get("mlx"):
        raise BundleError(f"{MANIFEST}: producer.mlx is missing")
    if not manifest.device_classes:
        raise BundleError(f"{MANIFEST}: no functions")


def _check_state(manifest: Manifest) -> None:
    if not manifest.cache or manifest.cache[0].name != "lengths":
        raise BundleError(f"{MANIFEST}: cache must begin with lengths, int32 [B]")
    if len({array.name for array in manifest.cache}) < len(manifest.cache):
        raise BundleError(f"{MANIFEST}: cache lists an array twice")
    for array, entry in zip(manifest.cache, manifest.cache_spec, strict=True):
        axis = slot_axis(array.name)
        sizes = [size for size in array.shape if isinstance(size, int)]
        sound = (
            array.kind == entry.kind
            and array.dtype in (("int32",) if array.kind in ("row", "positions") else DTYPES)
            and (array.kind != "row" or array.shape == ("B",))
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
    if not plain or path in ("", ".", MANIFEST, DIGEST) or set(path) & set("\\:\0"):
        raise BundleError(f"{MANIFEST}: unsafe file path {path!r}; paths stay inside the bundle")


def _check_functions(manifest: Manifest, device: str) -> None:
    if device not in DEVICE_CLASSES:
        raise BundleError(f"{MANIFEST}: unknown device class {device!r}")
    if device not in manifest.params.prepared:
        raise BundleError(f"{MANIFEST}: params.prepared has no list for {device}")
    _check_entry(manifest.prepare_function(device), describe_prepare(device))
    functions, plan = manifest.step_functions(device), manifest.plan
    known = [e for e in manifest.functions if e.device == device and e.name in (PREPARE, *STEPS)]
    if len(known) != len(functions) + 1:
        raise BundleError(f"{MANIFEST}: a function of {device} is listed twice or has no bucket")
    for step in STEPS.values():
        for bucket in step.buckets(plan.batch, plan.tokens, plan.capacity):
            if (step.name, bucket) not in functions:
                raise BundleError(
                    f"{MANIFEST}: {step.name}_{bucket} is missing for {device}: "
                    "export the bundle again"
                )
            expected = describe_step(step.name, bucket, device, manifest)
            _check_entry(functions[step.name, bucket], expected)


def _check_entry(entry: FunctionEntry, expected: FunctionEntry) -> None:
    if entry != replace(expected, file=entry.file):
        raise BundleError(
            f"{MANIFEST}: {entry.key}: its inputs and outputs are not those that this funcrt "
            "calls; export the bundle again"
        )


def _check_golden(manifest: Manifest) -> None:
    plan = manifest.plan
    for case in manifest.golden.cases:
        declared = case.batch in plan.batch and case.capacity in plan.capacity
        for call in case.calls:
            known = call.function in STEPS and (call.tokens == 1 or call.tokens in plan.tokens)
            if not declared or not known or not call.scale > 0:
                raise BundleError(
                    f"{MANIFEST}: golden call {call.function} of {call.tokens} tokens at batch "
                    f"{case.batch}, capacity {case.capacity} is not one of the plan"
                )
        if case.calls and not case.calls[0].fresh:
            raise BundleError(f"{MANIFEST}: a golden case must begin from a fresh cache")


# --- files ---------------------------------------------------------------------------------------


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file below `folder` but the manifest and its hash."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(hash_file, paths))
    return {
        name: FileEntry(path.stat().st_size, digest)
        for name, path, digest in zip(names, paths, hashes, strict=True)
        if name not in (MANIFEST, DIGEST)
    }


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise BundleError unless every listed file lies inside, with the listed size and hash."""
    root = folder.resolve()
    for name in (MANIFEST, DIGEST, *manifest.files):
        if not (folder / name).resolve().is_relative_to(root):
            raise BundleError(f"{folder / name} is a link out of the bundle; copy the file into it")
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{path} is missing: copy the bundle again, or export it again")
        if (size := path.stat().st_size) != entry.size:
            raise BundleError(
                f"{path} is damaged: expected {entry.size} bytes, got {size}; "
                "copy the bundle again, or export it again"
            )
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        hashes = pool.map(hash_file, [folder / name for name in manifest.files])
        for name, digest in zip(manifest.files, hashes, strict=True):
            check_hash(folder, name, digest, manifest)


def hash_file(path: Path) -> str:
    """sha256 of a file, in hexadecimal. Raises BundleError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_CHUNK):
                digest.update(block)
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def check_hash(folder: Path, name: str, digest: str, manifest: Manifest) -> None:
    """Raise BundleError unless `digest` is the listed one."""
    if digest != manifest.files[name].sha256:
        raise BundleError(
            f"{folder / name} is damaged: its sha256 does not match {MANIFEST}; "
            "copy the bundle again, or export it again"
        )


def read_file(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Contents of one file of known hash. Raises BundleError if they are not what was listed."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise BundleError(f"cannot read {folder / name}: {error.strerror}") from None
    check_hash(folder, name, hashlib.sha256(content).hexdigest(), manifest)
    return content
