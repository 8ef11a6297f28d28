"""`funcrt pull`: a model or a bundle from the hub, complete and checked, or not there at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from converters import huggingface
from converters.hub import NOT_NEEDED, SMALL, WEIGHTS, download, is_hub_id
from converters.hub.parcel import BUNDLE, DOCUMENTS, MODEL, is_bundle
from funcrt.bundle.format.checks import check_digest, read_manifest
from funcrt.bundle.format.files import check_files
from funcrt.bundle.format.manifest import DIGEST, MANIFEST
from funcrt.errors import BundleError, InputError, PublishError, SourceError
from funcrt.publish import Kind, check_target, publish, staging
from funcrt.storage import load_json, save_json
from funcrt.user_cache import user_cache

RECORD = ".funcrt-pull.json"


def _was_pulled(folder: Path) -> bool:
    """Whether a folder holds what `pull` put there, and no file of anybody else."""
    try:
        names = load_json(folder / RECORD)["files"]
        ours = {RECORD, *names}
    except (SourceError, KeyError, TypeError):
        return False
    return all(
        path.relative_to(folder).as_posix() in ours
        for path in folder.rglob("*")
        if not path.is_dir()
    )


KIND = Kind("a folder of only the files that `funcrt pull` put there", _was_pulled)


@dataclass(frozen=True)
class Pulled:
    """What was pulled: its folder, `BUNDLE` or `MODEL`, its commit, and its bytes."""

    folder: Path
    kind: str
    commit: str
    nbytes: int


def pull(repo: str, target: str | Path | None = None, revision: str | None = None) -> Pulled:
    """Download a model or a bundle, or what is missing of it, and check it.

    Files arrive in the hub client's cache, where those stay that are complete when a download is
    interrupted. From there they are copied to `target`, which appears as a whole. Without a target
    a model stays in that cache; a bundle, which must not consist of links, is put together in
    funcrt's own.

    Args:
        repo: owner/name.
        target: folder to write; one that an earlier pull wrote is replaced.
        revision: branch, tag or commit; None is the default branch.

    Raises:
        InputError: `repo` is no hub id.
        PublishError: something else is at `target`, or no room for it.
        SourceError: no such repository, no access, no network, or neither a model nor a bundle.
        BundleError: a damaged bundle, or one of another schema.
    """
    if not is_hub_id(repo):
        raise InputError(f"expected owner/name, got {repo!r}")
    place = None if target is None else Path(os.path.abspath(target))  # noqa: PTH100 (keeps links)
    if place is not None:
        check_target(place, KIND)
    small = download(repo, (*SMALL, DIGEST, *DOCUMENTS), revision)
    commit = small.name
    if is_bundle(small):
        return _pull_bundle(repo, small, commit, place)
    return _pull_model(repo, small, commit, place)


def find_bundle(repo: str) -> Path | None:
    """A bundle's folder in the cache, pulled if need be; None if `repo` holds no bundle.

    Raises what `pull` raises.
    """
    return pull(repo).folder if is_bundle(download(repo, (*SMALL, DIGEST))) else None


def _pull_bundle(repo: str, small: Path, commit: str, target: Path | None) -> Pulled:
    manifest, digest = read_manifest(small)  # a bundle of another schema before its weights
    names = (MANIFEST, DIGEST, *manifest.files)
    snapshot = download(repo, tuple(map(glob.escape, names)), commit, ignore=())
    files = {name: snapshot / name for name in (*names, *_named(snapshot, DOCUMENTS))}
    missing = sorted(name for name, path in files.items() if not path.is_file())
    if missing:
        raise SourceError(f"{repo!r} lacks files that its {MANIFEST} lists: {', '.join(missing)}")
    own = user_cache() / "hub" / repo.replace("/", "--") / f"{commit}.funcrt"
    place = own if target is None else target

    def check(folder: Path) -> None:
        try:
            check_digest(folder, digest)
            check_files(folder, manifest)
        except BundleError as error:
            reason = str(error).replace(str(folder), repo)
            raise BundleError(
                f"{reason}; pull it again after `hf cache rm model/{repo}`, and if that changes "
                "nothing it was pushed so"
            ) from None

    if target is not None or not _is_sound(own, check):
        _put(repo, commit, files, place, check, link=target is None)
    return Pulled(place, BUNDLE, commit, sum(path.stat().st_size for path in files.values()))


def _is_sound(folder: Path, check: Callable[[Path], None]) -> bool:
    if not folder.is_dir():
        return False
    try:
        check(folder)
    except BundleError:
        return False
    return True


def _pull_model(repo: str, small: Path, commit: str, target: Path | None) -> Pulled:
    if not (small / huggingface.CONFIG).is_file():
        raise SourceError(
            f"{repo!r} holds neither a bundle ({MANIFEST}) nor a model ({huggingface.CONFIG} and "
            "safetensors); one file, of GGUF for example: `hf download "
            f"{repo} FILE`"
        )
    patterns = (*SMALL, *WEIGHTS, *DOCUMENTS)
    snapshot = download(repo, patterns, commit)
    huggingface.check_weights(snapshot)
    files = {name: snapshot / name for name in _named(snapshot, patterns)}
    if target is not None:
        _put(repo, commit, files, target, huggingface.check_weights)
    nbytes = sum(path.stat().st_size for path in files.values())
    return Pulled(target or snapshot, MODEL, commit, nbytes)


def _named(folder: Path, patterns: Collection[str]) -> list[str]:
    """Names at the top of a folder, which may hold files of other downloads, too."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return [
        name
        for name in names
        if any(fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch(name, pattern) for pattern in NOT_NEEDED)
    ]


def _put(
    repo: str,
    commit: str,
    files: Mapping[str, Path],
    place: Path,
    check: Callable[[Path], None],
    link: bool = False,
) -> None:
    """Files as a folder at `place`, all at once and only if `check` passes there.

    `link` makes hard links where it can: the two caches then hold one copy.
    """
    needed = 0 if link else sum(path.stat().st_size for path in files.values())
    try:
        with staging(place, KIND) as folder:
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise PublishError(
                    f"{place} needs {needed / 1e6:,.1f} MB, but only {free / 1e6:,.1f} MB are free "
                    "there: make room, or leave out the target to use it in the cache"
                )
            for name, source in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _copy(source.resolve(), folder / name, link)
            record = {"repository": repo, "commit": commit, "files": sorted(files)}
            save_json(folder / RECORD, record)
            check(folder)
            publish(folder, place, KIND)
    except (PublishError, SourceError):
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room" if full else "choose another place"
        raise PublishError(f"cannot write {place} ({error}): {advice}; nothing was left") from error


def _copy(source: Path, target: Path, link: bool) -> None:
    if link:
        with contextlib.suppress(OSError):  # another disk, or one without hard links
            target.hardlink_to(source)
            return
    shutil.copyfile(source, target)
