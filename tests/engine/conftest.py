"""One tiny bundle, exported once."""

from __future__ import annotations

from pathlib import Path

from funcrt.buckets import BucketPlan
from funcrt.bundle import Bundle, export, load_bundle
from tests.engine.harness import make_tokenizer
from tests.helpers import make_model

import pytest

# No batch or T of one: their graphs need kernels of their own, a minute's worth with a cold cache.
BUNDLE_PLAN = BucketPlan(batch=(2,), tokens=(4, 8), capacity=(16, 32))


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound bundle of `make_model()` with a tokenizer. Read only."""
    model = make_model()
    model.tokenizer = make_tokenizer()
    folder = tmp_path_factory.mktemp("engine") / "tiny.funcrt"
    export(model, folder, BUNDLE_PLAN)
    return folder


@pytest.fixture(scope="session")
def bundle(bundle_folder: Path) -> Bundle:
    return load_bundle(bundle_folder)
