"""A tiny bundle for hosts that do without this package, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

from funcrt.buckets import BucketPlan
from funcrt.bundle import export
from tests.bundle.conftest import make_tokenizer
from tests.helpers import make_model
from tests.hosts.python_host import Command

import pytest

PLAN = BucketPlan(batch=(2,), tokens=(4, 8), capacity=(16, 32))


def make_bundle(folder: Path, kind: str = "float32") -> Path:
    """Export a tiny llama of such weights."""
    model = make_model(kind)
    model.tokenizer = make_tokenizer()
    export(model, folder, PLAN)
    return folder


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in float32. Read only."""
    return make_bundle(tmp_path_factory.mktemp("hosts") / "plain é.funcrt")


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    """A bundle to change."""
    return Path(shutil.copytree(plain, tmp_path / "copy.funcrt"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)
