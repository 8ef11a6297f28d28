"""A fake hub that the real client talks to, and a model and a bundle to send there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import funcrt
from funcrt.model import Model
from funcrt.text import Tokenizer
from tests.commands import save_model
from tests.converters.hub.fake_hub import FakeHub
from tests.helpers import TINY, make_params

import huggingface_hub
import pytest
from huggingface_hub import constants

PLAN = funcrt.BucketPlan(batch=(1, 2), tokens=(4,), capacity=(16,))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """The hub, and everything of the client's that would leave this folder."""
    fake = FakeHub()
    template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "cache" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # before the client tries again
    huggingface_hub.close_session()
    yield fake
    huggingface_hub.close_session()
    fake.close()


@pytest.fixture(scope="session")
def sound_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture(scope="session")
def sound_bundle(sound_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.from_folder(sound_model)
    model = Model(TINY, make_params(TINY, "affine"), tokenizer)
    folder = tmp_path_factory.mktemp("hub") / "tiny.funcrt"
    funcrt.export(model, folder, PLAN)
    return folder


@pytest.fixture
def model(sound_model: Path, tmp_path: Path) -> Path:
    """A model folder to change."""
    return Path(shutil.copytree(sound_model, tmp_path / "tiny"))


@pytest.fixture
def bundle(sound_bundle: Path, tmp_path: Path) -> Path:
    """A bundle to change."""
    return Path(shutil.copytree(sound_bundle, tmp_path / "tiny.funcrt"))


@pytest.fixture
def read() -> Callable[[Path], dict[str, bytes]]:
    """All files of a folder by name."""

    def run(folder: Path) -> dict[str, bytes]:
        paths = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}

    return run
