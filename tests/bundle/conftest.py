"""Tiny exported bundles, made once; tests that change one get a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from funcrt.buckets import BucketPlan
from funcrt.bundle import Bundle, export, load_bundle
from funcrt.bundle.format.checks import load_manifest, save_manifest
from funcrt.bundle.format.files import describe_files
from funcrt.bundle.format.manifest import Manifest, Target
from funcrt.model import Model
from funcrt.text import Tokenizer
from funcrt.user_cache import user_cache
from tests.helpers import TINY, make_model

import mlx.core as mx
import pytest
import tokenizers

# No batch or T of one: their graphs need kernels of their own, a minute's worth with a cold cache.
PLAN = BucketPlan(batch=(2,), tokens=(4, 8), capacity=(16, 32))
SMALL = BucketPlan(batch=(2,), tokens=(8,), capacity=(16,))
TINIEST: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_layers": 1,
    "head_dim": 8,
}
Edit = Callable[[Path, Callable[[Manifest], Manifest]], None]


def make_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(TINY.vocab_size)}, unk_token="w0")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(backend, {"eos_token": "w1"}, "{{ messages[0].content }}", (1,))


class Exports:
    """A model and its bundle's folder by kind of weights, exported when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, Model] = {}

    def __call__(self, kind: str = "float32") -> tuple[Model, Path]:
        folder = self._root / f"tiny {kind}é.funcrt"  # a name that needs care
        if kind not in self._models:
            model = make_model(kind)
            model.tokenizer = make_tokenizer()
            export(model, folder, PLAN if kind != "bfloat16" else SMALL)
            self._models[kind] = model
        return self._models[kind], folder


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place of the user's cache folder, but with the BLAS that is kept there."""
    made = tmp_path_factory.mktemp("cache")
    (made / "funcrt").mkdir()
    (user_cache() / "blas").mkdir(parents=True, exist_ok=True)
    (made / "funcrt" / "blas").symlink_to(user_cache() / "blas")
    return made


@pytest.fixture(autouse=True)
def own_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is remembered of these bundles does not stay in the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))
    return cache_folder / "funcrt"


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session")
def model(exports: Exports) -> Model:
    return exports()[0]


@pytest.fixture(scope="session")
def folder(exports: Exports) -> Path:
    """A sound bundle. Read only."""
    return exports()[1]


@pytest.fixture(scope="session")
def bundle(folder: Path) -> Bundle:
    return load_bundle(folder)


@pytest.fixture(scope="session")
def tiny_model() -> Model:
    return make_model(**TINIEST)


@pytest.fixture(scope="session")
def tiny(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound bundle, as small as they get. Read only."""
    folder = tmp_path_factory.mktemp("tiniest") / "tiny.funcrt"
    export(tiny_model, folder, SMALL)
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return Path(shutil.copytree(folder, tmp_path / "copy.funcrt"))


@pytest.fixture
def edit() -> Edit:
    """Rewrite a manifest, its own hash included, as somebody who means it would."""

    def run(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
        manifest = load_manifest(folder)
        save_manifest(folder, change(replace(manifest, files=describe_files(folder))))

    return run


def edit_target(manifest: Manifest, change: Callable[[Target], Target]) -> Manifest:
    """The manifest with its only target changed."""
    ((device, target),) = manifest.targets.items()
    return replace(manifest, targets={device: change(target)})


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything reaches MLX's readers, which crash on damaged files."""

    def fail(*arguments: object) -> None:
        raise AssertionError("a damaged bundle reached MLX")

    monkeypatch.setattr(mx, "import_function", fail)
    monkeypatch.setattr(mx, "load", fail)
