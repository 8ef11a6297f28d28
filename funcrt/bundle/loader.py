"""Loading a bundle: check everything, then give the graphs and the weights to a `Bundle`.

Neither the models' code nor converters are imported here, unless `refresh` has to export again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from funcrt.bundle.bundle import Bundle
from funcrt.bundle.format import checks, files
from funcrt.bundle.format.manifest import Manifest, Target
from funcrt.bundle.graphs import device_class, mlx_version
from funcrt.bundle.refreshed import check_expected
from funcrt.bundle.weights import Weights, load_stored, read_weights
from funcrt.errors import BundleError, InputError, TextError

if TYPE_CHECKING:
    from funcrt.text import Tokenizer

_ATTEMPTS = 20


class OtherMachineError(BundleError):
    """A bundle is sound, but has no graphs for this MLX or device class."""


def load_bundle(
    folder: str | Path,
    *,
    params: Weights | None = None,
    expected_digest: str | None = None,
    verify: Literal["once"] | None = None,
    refresh: bool = False,
) -> Bundle:
    """Load an exported model.

    Everything is checked before MLX sees it: schema, digest, MLX version, device class, paths,
    sizes and hashes (of weights at the first load on a machine; later their size and header).
    Weights are prepared once (dequantized, cast, fused); graphs are imported when used.

    Args:
        folder: of the bundle.
        params: weights instead of the bundle's own, or for a bundle without any: one safetensors
            file or several, or arrays by name. What a bundle with weights is not given it reads.
        expected_digest: what `funcrt export` printed. Hashes inside a bundle show accidents; only
            this shows that it is the one that was exported.
        verify: "once" repeats the recorded calls and the invariances the first time that these
            files meet this device and MLX, and remembers that they passed.
        refresh: where the graphs are for another MLX or device class, export them again for this
            one, into the folder. Needs the model's code to be part of funcrt, and `params` that a
            bundle without weights was exported with. It changes the digest; `expected_digest` then
            also fits what was made of that bundle on this machine.

    Raises:
        BundleError: in one line, what is wrong and what to do.
        ParamsError: `params` do not fit.
    """
    if verify not in (None, "once"):
        raise InputError(f'verify: expected None or "once", got {verify!r}')
    try:
        bundle = open_bundle(
            folder, params=params, expected_digest=expected_digest, refreshed=refresh
        )
    except OtherMachineError:
        if not refresh:
            raise
        from funcrt.bundle.exporter import refresh as export_again  # not needed to load

        own = checks.load_manifest(folder).params.files
        made_of = None if own else params
        bundle = export_again(folder, params=made_of, expected_digest=expected_digest)
        if own and params is not None:
            bundle = bundle.with_params(read_weights(params))
    if verify == "once":
        from funcrt.bundle.proof.verifier import ensure_verified

        ensure_verified(bundle)
    _ = bundle.prepared
    return bundle


def open_bundle(
    folder: str | Path,
    *,
    params: Weights | None = None,
    expected_digest: str | None = None,
    refreshed: bool = False,
) -> Bundle:
    """`load_bundle` that leaves the weights on disk until they are used.

    `refreshed` takes what was made on this machine of the expected bundle, too.
    """
    folder = Path(folder).absolute()
    for _ in range(_ATTEMPTS):
        before = _identity(folder)
        try:
            bundle = _open(folder, params, expected_digest, refreshed)
            if _identity(folder) == before:
                return bundle
        except BundleError:
            if _identity(folder) == before:
                raise
        # An export has replaced the whole folder while it was read: what was read is a mixture.
    raise BundleError(f"{folder} is replaced by others again and again; load it again")


def _open(folder: Path, params: Weights | None, expected: str | None, refreshed: bool) -> Bundle:
    manifest, digest = checks.read_manifest(folder)
    check_expected(folder, digest, expected, refreshed=refreshed)
    device = device_class()
    target = _find_target(folder, manifest, device)
    checks.check_digest(folder, digest)
    entries = [target.prepare_function(), *target.step_functions().values()]
    graph_files = {entry.file for entry in entries}
    files.check_files(folder, manifest, digest, full=False, read_later=graph_files)
    # Held in memory, so that a bundle that is replaced later still runs.
    graphs = {entry.key: files.read_file(folder, entry.file, manifest) for entry in entries}
    tokenizer = _tokenizer(folder, manifest)
    if params is None and not manifest.params.files:
        raise BundleError(
            f"{folder} was exported without weights: give some (params=..., --params FILE)"
        )
    stored = load_stored(folder, manifest) if manifest.params.files else {}
    bundle = Bundle(folder, manifest, digest, device, stored, graphs, tokenizer)
    return bundle if params is None else bundle.with_params(read_weights(params))


def _find_target(folder: Path, manifest: Manifest, device: str) -> Target:
    """What was exported for this device class and MLX. Raises OtherMachineError."""
    again = (
        f"`funcrt export --refresh {folder}` exports it again for this machine"
        if manifest.family is not None
        else "export it again from its checkpoint (its model's code is not part of funcrt)"
    )
    target = manifest.targets.get(device)
    if target is None:
        raise OtherMachineError(
            f"{folder} has functions for {', '.join(sorted(manifest.targets))}, this process runs "
            f"on {device}: choose another default device, or {again}"
        )
    made_by, running = target.producer["mlx"], mlx_version()
    if made_by != running:
        raise OtherMachineError(
            f"{folder} was made by MLX {made_by}, this process runs {running}, and graphs do "
            f"not survive a change of version: pip install mlx=={made_by}, or {again}"
        )
    return target


def _tokenizer(folder: Path, manifest: Manifest) -> Tokenizer | None:
    if "tokenizer.json" not in manifest.files:
        return None
    from funcrt.text import Tokenizer  # a model of ids only does not need it

    try:
        return Tokenizer.from_folder(folder)
    except TextError as error:
        raise BundleError(f"{folder}: {error}") from None


def _identity(folder: Path) -> tuple[int, ...] | None:
    """What differs when another folder has taken the place, even one that was there before."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns
