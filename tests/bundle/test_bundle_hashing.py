"""Weights are hashed at the first load and by `verify`, else compared by size and header."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from funcrt.bundle import load_bundle, verify
from funcrt.bundle.format import files
from funcrt.bundle.format.manifest import Manifest
from funcrt.bundle.loader import open_bundle
from funcrt.errors import BundleError
from tests.bundle.test_bundle_fuzz import PARAMS

import pytest


@pytest.fixture
def place(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy.funcrt"))


def flip_last(path: Path) -> None:
    """Another value of the last weight: same size, same header."""
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        (value,) = file.read(1)
        file.seek(-2, os.SEEK_END)
        file.write(bytes([value ^ 16]))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that are hashed in full."""
    names, real = [], files.hash_file

    def spy(path: Path) -> str:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(files, "hash_file", spy)
    return names


def refuse(folder: Path) -> None:
    with pytest.raises(BundleError, match=r"params.safetensors is damaged"):
        load_bundle(folder)


def test_weights_are_hashed_at_the_first_load(place: Path, hashed: list[str]) -> None:
    flip_last(place / PARAMS)
    for _ in range(2):  # what failed is not remembered
        refuse(place)
    flip_last(place / PARAMS)
    hashed.clear()
    load_bundle(place)
    load_bundle(place)
    assert hashed.count(PARAMS) == 1
    flip_last(place / PARAMS)
    with pytest.raises(BundleError, match=r"params.safetensors is damaged"):
        verify(place)


def test_graphs_are_hashed_once(
    place: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are read, so that what MLX gets is what was hashed."""
    read, real = [], files.read_file

    def spy(folder: Path, name: str, manifest: Manifest) -> bytes:
        read.append(name)
        return real(folder, name, manifest)

    monkeypatch.setattr(files, "read_file", spy)
    bundle = load_bundle(place)
    graphs = [entry.file for entry in bundle.target.functions]
    assert sorted(read) == sorted(graphs)
    assert sorted(hashed) == sorted(
        Path(name).name for name in bundle.manifest.files if name not in graphs
    )


def test_weights_that_were_touched_are_hashed_again(place: Path, hashed: list[str]) -> None:
    load_bundle(place)
    (place / PARAMS).touch()
    load_bundle(place)
    assert hashed.count(PARAMS) == 2
    load_bundle(place)
    assert hashed.count(PARAMS) == 2


def test_weights_that_were_changed_with_their_old_time(place: Path) -> None:
    load_bundle(place)
    before = (place / PARAMS).stat()
    flip_last(place / PARAMS)
    os.utime(place / PARAMS, ns=(before.st_atime_ns, before.st_mtime_ns))
    refuse(place)


def test_weights_that_change_while_they_are_hashed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered is what the file was before it was read."""
    real = files.hash_file

    def hash_first(path: Path) -> str:
        digest = real(path)
        if path.name == PARAMS:
            flip_last(path)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(files, "hash_file", hash_first)
        load_bundle(place)
    refuse(place)


def test_weights_that_were_replaced(place: Path) -> None:
    load_bundle(place)
    copy = Path(shutil.copy2(place / PARAMS, place.parent))
    flip_last(copy)
    copy.replace(place / PARAMS)
    refuse(place)


def test_verify_hashes_weights_whatever_is_remembered(
    place: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_bundle(place)
    monkeypatch.setattr(files, "_state_of", lambda path: [1])  # a file system without times
    load_bundle(place)
    load_bundle(place)
    hashed.clear()
    flip_last(place / PARAMS)
    open_bundle(place)
    assert PARAMS not in hashed
    for what in (bundle, place):
        with pytest.raises(BundleError, match=r"params.safetensors is damaged"):
            verify(what)


@pytest.mark.parametrize(
    "record",
    [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"x": NaN}', b"null", b'{"a": {"b": [1e999]}}'],
    ids=lambda record: repr(record[:6]),
)
def test_a_damaged_record_is_as_none(
    place: Path, hashed: list[str], own_cache: Path, record: bytes
) -> None:
    digest = load_bundle(place).digest
    path = own_cache / "hashed" / f"{digest}.json"
    assert json.loads(path.read_text())
    hashed.clear()
    path.write_bytes(record)
    load_bundle(place)
    assert hashed.count(PARAMS) == 1
    load_bundle(place)  # and it is a record again
    assert hashed.count(PARAMS) == 1


@pytest.mark.parametrize("kind", ["file", "folder in its place", "closed"])
def test_a_cache_folder_that_cannot_be_written(
    place: Path, hashed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    digest = load_bundle(place).digest
    cache = tmp_path / "own cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    if kind == "file":
        cache.write_text("")
    elif kind == "closed":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    else:
        (cache / "funcrt" / "hashed" / f"{digest}.json").mkdir(parents=True)
    hashed.clear()
    for _ in range(2):
        load_bundle(place)
    assert hashed.count(PARAMS) == 2  # nothing remembered, nothing harmed
