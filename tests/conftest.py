"""Settings for all tests: the BLAS is chosen before any test imports mlx, and nothing is random."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import funcrt  # before mlx: it picks the host BLAS
from funcrt.model import Model

import pytest
from hypothesis import settings

# A shell starts background jobs with Ctrl-C ignored, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that one process should run: all of them use a slow fixture, or build in one folder.
SHARED = ("test_smollm2", "test_cpp_host")

settings.register_profile("repository", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("repository")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, or one worker would be left alone with it."""
    items.sort(key=lambda item: SHARED[0] not in item.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes whole files, for what is made once for a file; some share more."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((shared for shared in SHARED if shared in file), file)

    config.option.loadscopereorder = False
    return Files(config, log)


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
