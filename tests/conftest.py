"""Settings for all tests: the BLAS is chosen before any test imports mlx, and nothing is random."""

from __future__ import annotations

import signal
from pathlib import Path

import funcrt  # before mlx: it picks the host BLAS
from funcrt.model import Model

import pytest
from hypothesis import settings

# A shell starts background jobs with Ctrl-C ignored, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile("repository", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("repository")


@pytest.fixture(scope="session")
def smollm2_model() -> Model:
    """A real trained model, fetched once and loaded once."""
    import converters
    from converters import smollm2

    return converters.load(smollm2.fetch())


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, exported once for all tests in as few and small buckets as they need. Read only.

    An export runs every function many times: this takes a minute.
    """
    folder = tmp_path_factory.mktemp("smollm2") / "bundle.funcrt"
    plan = funcrt.BucketPlan(batch=(1, 6), tokens=(32,), capacity=(800,))
    funcrt.export(smollm2_model, folder, plan)
    return folder
