"""The files of a bundle: what the manifest says of them, and whether that is so.

All but weights is hashed whenever a bundle is loaded, since MLX crashes on damaged graphs. Weights
may be large: they are hashed at the first load on a machine, which the user's cache folder
remembers, and by `verify`; otherwise their size and the hash of their header are compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from funcrt.bundle.format.manifest import CERTIFICATE, DIGEST, MANIFEST, FileEntry, Manifest
from funcrt.errors import BundleError
from funcrt.user_cache import user_cache, write_atomically

_CHUNK = 1 << 20
_MOST_BYTES = 100_000_000
_QUICKLY_HASHED = 8_000_000  # bytes, in less time than threads take to start
_AGAIN = "copy the bundle again, or export it again"


def describe_files(
    folder: Path, known: Mapping[str, FileEntry] | None = None
) -> dict[str, FileEntry]:
    """Size and hash of every file below `folder` but the manifest, its hash and the certificate.

    What `known` has is not read again.
    """
    known = known or {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    found = [name for name in names if name not in (MANIFEST, DIGEST, CERTIFICATE)]
    fresh = [name for name in found if name not in known]
    sizes = {name: (folder / name).stat().st_size for name in fresh}
    hashes = _hash_files(folder, sizes)
    return {
        name: known[name]
        if name in known
        else FileEntry(sizes[name], hashes[name], hash_header(folder / name))
        for name in found
    }


def check_files(
    folder: Path,
    manifest: Manifest,
    digest: str = "",
    full: bool = True,
    read_later: Collection[str] = (),
) -> None:
    """Raise BundleError unless the files are those that the manifest lists.

    Args:
        folder: of the bundle.
        manifest: checked.
        digest: of the manifest.
        full: hash everything. Otherwise weights that were hashed before on this machine and have
            not been touched since are compared by size and header.
        read_later: files that are not hashed here, since `read_file` will do it.
    """
    root = folder.resolve()
    for name in (MANIFEST, DIGEST, *manifest.files):
        # Not `resolve`, which raises RuntimeError where links lead in a circle.
        if not Path(os.path.realpath(folder / name)).is_relative_to(root):
            raise BundleError(f"{folder / name} is a link out of the bundle; copy the file into it")
    for name, entry in manifest.files.items():
        path = folder / name
        if (size := _status(path).st_size) != entry.size:
            raise BundleError(
                f"{path} is damaged: expected {entry.size} bytes, got {size}; {_AGAIN}"
            )
    weights = manifest.params.files
    states = {name: _state_of(folder / name) for name in weights}  # before they are read
    seen = not full and _was_hashed(folder, states, digest)
    known = {*read_later, *(weights if seen else ())}
    _check_hashes(folder, manifest, {*manifest.files} - known)
    if not seen:
        _remember_hashed(folder, states, digest)
        return
    for name in weights:
        if hash_header(folder / name) != manifest.files[name].header:
            raise BundleError(
                f"{folder / name} is damaged: its header does not match {MANIFEST}; {_AGAIN}"
            )


def _status(path: Path) -> os.stat_result:
    """That of a file. Raises BundleError where there is none, or none any more."""
    try:
        status = path.stat()
    except OSError:
        status = None
    if status is None or not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path} is missing: {_AGAIN}")
    return status


def _check_hashes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    sizes = {name: manifest.files[name].size for name in sorted(names)}
    for name, digest in _hash_files(folder, sizes).items():
        check_hash(folder, name, digest, manifest)


def _hash_files(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """`hash_file` of each file whose size is given."""
    paths = [folder / name for name in sizes]
    if sum(sizes.values()) <= _QUICKLY_HASHED:
        return dict(zip(sizes, map(hash_file, paths), strict=True))
    from concurrent.futures import ThreadPoolExecutor  # most loads do without it

    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        return dict(zip(sizes, pool.map(hash_file, paths), strict=True))


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


def hash_header(path: Path) -> str | None:
    """sha256 of a safetensors file's first 8 bytes and its header; None for other files.

    Raises BundleError when it cannot be read.
    """
    if path.suffix != ".safetensors":
        return None
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            # A damaged length is some other header, never more than the file.
            length = min(int.from_bytes(prefix, "little"), path.stat().st_size)
            return hashlib.sha256(prefix + file.read(length)).hexdigest()
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from None


def check_hash(folder: Path, name: str, digest: str, manifest: Manifest) -> None:
    """Raise BundleError unless `digest` is the listed one."""
    if digest != manifest.files[name].sha256:
        raise BundleError(
            f"{folder / name} is damaged: its sha256 does not match {MANIFEST}; {_AGAIN}"
        )


def read_small(path: Path) -> bytes:
    """Contents of a file that describes a bundle. Raises OSError, or BundleError if it is none."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
        raise BundleError(f"{path} is not a file")
    if status.st_size > _MOST_BYTES:
        raise BundleError(f"{path} is damaged: it has more than {_MOST_BYTES} bytes")
    return path.read_bytes()


def read_file(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Contents of one file of known hash. Raises BundleError if they are not what was listed."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise BundleError(f"cannot read {folder / name}: {error.strerror}") from None
    check_hash(folder, name, hashlib.sha256(content).hexdigest(), manifest)
    return content


# --- what was hashed before ----------------------------------------------------------------------


def _was_hashed(folder: Path, states: Mapping[str, list[int]], digest: str) -> bool:
    seen = _read_record(digest)
    return all(seen.get(str((folder / n).resolve())) == state for n, state in states.items())


def _remember_hashed(folder: Path, states: Mapping[str, list[int]], digest: str) -> None:
    """Does nothing where the user's cache folder cannot be written."""
    if digest and states:
        found = {str((folder / name).resolve()): state for name, state in states.items()}
        write_atomically(_record(digest), json.dumps({**_read_record(digest), **found}))


def _read_record(digest: str) -> dict[str, object]:
    try:
        seen = json.loads(_record(digest).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return seen if isinstance(seen, dict) else {}


def _record(digest: str) -> Path:
    return user_cache() / "hashed" / f"{digest}.json"


def _state_of(path: Path) -> list[int]:
    """What changes when a file is written or replaced."""
    status = _status(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino]
