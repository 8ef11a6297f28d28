"""Exporting a model, and adding to what was exported: traced, verified elsewhere, then published.

Whatever is written is a new folder beside the bundle that takes its place as a whole; files that
stay are linked into it. So a bundle in use never changes, and a failure leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from funcrt.buckets import BucketPlan
from funcrt.bundle.bundle import Bundle
from funcrt.bundle.elsewhere import verify_elsewhere
from funcrt.bundle.format import checks, files
from funcrt.bundle.format.manifest import (
    CERTIFICATE,
    DIGEST,
    FORMAT,
    MANIFEST,
    SCHEMA_VERSION,
    Manifest,
    ParamsEntry,
    Target,
    describe_arrays,
)
from funcrt.bundle.graphs import device_class, mlx_version
from funcrt.bundle.loader import open_bundle
from funcrt.bundle.proof.verifier import Progress
from funcrt.bundle.rebuilding import check_same, rebuild
from funcrt.bundle.refreshed import check_expected, remember_refreshed
from funcrt.bundle.targets import TargetMaker
from funcrt.bundle.weights import Weights, save_stored
from funcrt.errors import BundleError, FuncrtError
from funcrt.model import Model
from funcrt.models import is_own
from funcrt.publish import Kind, publish, staging
from funcrt.storage import save_arrays


def _is_bundle(folder: Path) -> bool:
    """Whether a folder holds a bundle, damaged perhaps, and no file of anybody else."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        ours = {MANIFEST, DIGEST, CERTIFICATE, *manifest["files"]}
        if manifest["format"] != FORMAT:
            return False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    found = {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()}
    # A certificate that was being written when its process was killed is ours, too.
    return all(name.as_posix() in ours or name.match(f".{CERTIFICATE}.*.tmp") for name in found)


KIND = Kind("a folder of only a bundle's files", _is_bundle)


def export(
    model: Model,
    folder: str | Path,
    plan: BucketPlan,
    progress: Progress | None = None,
    kv_bits: int | None = None,
    *,
    weights: bool = True,
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
        weights: False leaves them out; whoever loads the bundle brings some of the same names.

    Returns:
        The bundle; its `digest` is what `load_bundle(expected_digest=...)` takes.

    Raises:
        PublishError: what is at `folder` is not a bundle.
        BundleError: the folder cannot be written, the disk is full, or a check failed. What was at
            `folder` is then unchanged.
    """
    maker = TargetMaker(model, device_class(), plan, kv_bits)
    tick = _Ticker(progress, 1 + maker.ticks)
    with _writing(Path(folder)) as (place, target):
        names = save_stored(place, model.params) if weights else []
        if model.tokenizer is not None:
            model.tokenizer.save(place)
        tick("weights")
        made = maker.make(place, tick)
        manifest = _describe(model, names, {device_class(): made})
        return _finish(place, target, manifest, model, tick)


def extend(
    folder: str | Path,
    plan: BucketPlan | None = None,
    progress: Progress | None = None,
    kv_bits: int | None = None,
    *,
    model: Model | None = None,
    dtype: str | None = None,
    params: Weights | None = None,
) -> Bundle:
    """Add to a bundle: the device class at hand, or buckets to the one that it has.

    Other files stay as they are. Where a window's ring depends on the largest T, a larger one means
    that every function of this device class is exported again.

    Args:
        folder: of the bundle.
        plan: shapes to add to those of this device class; for a new one None takes those of the
            first device class in the bundle.
        progress: called with `(done, total, item)`.
        kv_bits: 8 or 4 packs the cache of a new device class.
        model: the one that the bundle was made of; None builds it from the bundle.
        dtype: compute dtype of a new device class; None chooses as `load_model` does.
        params: weights of a bundle without any.

    Raises:
        PublishError, BundleError: as `export`; the model's code is not part of funcrt; the model or
            the options do not fit the bundle; its graphs are of another MLX version.
    """
    folder = Path(folder).resolve()
    manifest = checks.load_manifest(folder)
    old = manifest.targets.get(device_class())
    if old is not None:
        _check_options(folder, old, dtype, kv_bits)
        dtype, kv_bits = old.dtype, old.layout.kv_bits
        plan = old.plan if plan is None else old.plan.joined(plan)
    elif plan is None:
        plan = next(iter(manifest.targets.values())).plan
    model = model or rebuild(folder, manifest, dtype, params)
    check_same(folder, manifest, model, old)
    same = old is not None and model.choose_layout(plan, kv_bits) == old.layout
    present = old.functions if old is not None and same else ()
    maker = TargetMaker(model, device_class(), plan, kv_bits, present)
    return _change(folder, manifest, model, maker, progress)


def refresh(
    folder: str | Path,
    progress: Progress | None = None,
    *,
    params: Weights | None = None,
    expected_digest: str | None = None,
) -> Bundle:
    """Export a bundle again for the MLX and the device class at hand, from what is in it.

    The functions of this device class are replaced as a whole; a device class that the bundle does
    not have is added, with the shapes of the first that it has. Others stay as they are.

    Args:
        folder: of the bundle.
        progress: called with `(done, total, item)`.
        params: weights of a bundle without any.
        expected_digest: of the bundle, or of one that it was made of on this machine.

    Raises:
        PublishError, BundleError: as `export`; the model's code is not part of funcrt.
    """
    folder = Path(folder).resolve()
    manifest, digest = checks.read_manifest(folder)
    check_expected(folder, digest, expected_digest, refreshed=True)
    checks.check_digest(folder, digest)
    old = manifest.targets.get(device_class())
    like = old or next(iter(manifest.targets.values()))
    model = rebuild(folder, manifest, old.dtype if old else None, params)
    maker = TargetMaker(model, device_class(), like.plan, like.layout.kv_bits)
    bundle = _change(folder, manifest, model, maker, progress)
    remember_refreshed(digest, bundle.digest)
    return bundle


def _check_options(folder: Path, old: Target, dtype: str | None, kv_bits: int | None) -> None:
    if (made_by := old.producer["mlx"]) != mlx_version():
        raise BundleError(
            f"{folder} has graphs of MLX {made_by}, this process runs {mlx_version()}: first "
            f"`funcrt export --refresh {folder}`"
        )
    for name, given, present in (
        ("dtype", dtype, old.dtype),
        ("kv_bits", kv_bits, old.layout.kv_bits),
    ):
        if given is not None and given != present:
            raise BundleError(
                f"{folder} was exported for {device_class()} with {name} {present}, and all its "
                f"buckets share that; got {given}: leave it out, or export another bundle"
            )


def _change(
    folder: Path, manifest: Manifest, model: Model, maker: TargetMaker, progress: Progress | None
) -> Bundle:
    """Put another target into a bundle that takes the old one's place."""
    device = device_class()
    old = manifest.targets.get(device)
    gone = old.files - maker.kept if old is not None else set()
    kept = {name: entry for name, entry in manifest.files.items() if name not in gone}
    before = files.hash_file(folder / MANIFEST)
    tick = _Ticker(progress, maker.ticks)
    with _writing(folder) as (place, target):
        for name in kept:
            _link(folder / name, place / name)
        targets = {**manifest.targets, device: maker.make(place, tick)}
        changed = replace(manifest, targets=targets, files=kept)
        return _finish(place, target, changed, model, tick, before)


def _finish(
    place: Path, target: Path, manifest: Manifest, model: Model, tick: _Ticker, before: str = ""
) -> Bundle:
    """Describe, verify and publish a new folder; the bundle that it returns is open.

    `before` is the digest of the bundle that it was made of, which must still be there.
    """
    manifest = replace(manifest, files=files.describe_files(place, manifest.files))
    checks.save_manifest(place, manifest)
    own = bool(manifest.params.files)
    borrowed = place / "borrowed.safetensors"
    if not own:  # a bundle without weights is verified with those of its model
        save_arrays(borrowed, model.params)
    verify_elsewhere(place, () if own else (borrowed,), tick)
    borrowed.unlink(missing_ok=True)
    bundle = open_bundle(place, params=None if own else model.params)

    def check() -> None:
        if before and files.hash_file(target / MANIFEST) != before:
            raise BundleError(f"{target} was replaced while this added to it: do it again")

    publish(place, target, KIND, check)
    bundle.folder = target
    return bundle


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A new folder, and where it is to go."""
    target = Path(os.path.abspath(folder))  # noqa: PTH100 (resolve() would follow a link)
    try:
        with staging(target, KIND) as place:
            yield place, target
    except FuncrtError:
        raise
    except (OSError, RuntimeError, OverflowError) as error:  # the last: sizes beyond an int32
        hint = " Is the disk full?" if "[write]" in str(error) else ""  # MLX does not say why
        raise BundleError(f"cannot export to {folder}: {error}{hint}") from error


def _link(file: Path, to: Path) -> None:
    """The same file twice where the file system can; nobody writes to it in either place."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file.resolve(), to)
    except OSError:
        shutil.copyfile(file, to)


class _Ticker:
    """Counts parts done and passes the count on."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress or (lambda done, total, item: None)
        self._done, self._total = 0, total

    def __call__(self, item: str) -> None:
        self._done += 1
        self._progress(self._done, self._total, item)


def _describe(model: Model, weights: list[str], targets: dict[str, Target]) -> Manifest:
    """The manifest but for its files."""
    config = model.config.to_dict()
    del config["dtype"]  # it belongs to the targets
    return Manifest(
        format=FORMAT,
        schema_version=SCHEMA_VERSION,
        family=model.config.model_type if is_own(model.family) else None,
        model=config,
        vocab_size=model.vocab_size,
        max_positions=model.config.max_positions,
        fingerprint=model.fingerprint,
        params=ParamsEntry(tuple(weights), describe_arrays(model.params)),
        targets=targets,
        files={},
    )
