"""The Python host as a command within this process, and bundles changed by hand."""

from __future__ import annotations

import hashlib
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from funcrt.bundle.format.checks import load_manifest, save_manifest
from funcrt.bundle.format.files import describe_files

import pytest

HOST = Path(__file__).parents[2] / "exported" / "hosts" / "python" / "run.py"


class Command:
    """Runs the host with these arguments; MLX is loaded already, with funcrt's BLAS."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path) -> str:
        """What it prints. Raises SystemExit as it ends in an error."""
        self._monkeypatch.setattr("sys.argv", [str(HOST), *map(str, arguments)])
        runpy.run_path(str(HOST), run_name="__main__")
        return self._capsys.readouterr().out


def listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sign(folder: Path) -> None:
    """Write the manifest again, with the hashes of the files as they are."""
    manifest = load_manifest(folder)
    save_manifest(folder, replace(manifest, files=describe_files(folder)))


def rewrite(folder: Path, old: str, new: str) -> None:
    """Change the manifest's text, and its hash."""
    file = folder / "manifest.json"
    text = file.read_text("utf-8")
    assert old in text
    file.write_text(text.replace(old, new), "utf-8")
    (folder / "manifest.json.sha256").write_text(f"{hash_of(file)}  manifest.json\n")
