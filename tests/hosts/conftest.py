"""A tiny bundle for hosts that do without this package, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

from funcrt.buckets import BucketPlan
from funcrt.bundle import export
from tests.bundle.conftest import TINIEST, make_tokenizer
from tests.helpers import make_model
from tests.hosts.python_host import Command, sign

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


@pytest.fixture(scope="session")
def long_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has `prefill_first`, of calls long enough. Read only."""
    folder = tmp_path_factory.mktemp("hosts") / "long.funcrt"
    export(make_model(**TINIEST), folder, BucketPlan(batch=(2,), tokens=(4, 32), capacity=(64,)))
    return folder


@pytest.fixture
def without_prefill(long_calls: Path, tmp_path: Path) -> Path:
    """The same, where the long `prefill` is no function of these inputs at all."""
    copy = Path(shutil.copytree(long_calls, tmp_path / "without.funcrt"))
    functions = copy / "functions" / "cpu"
    shutil.copyfile(functions / "prepare.mlxfn", functions / "prefill_b2_t32_s64.mlxfn")
    sign(copy)
    return copy


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    """A bundle to change."""
    return Path(shutil.copytree(plain, tmp_path / "copy.funcrt"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)
