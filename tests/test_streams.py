"""Any thread may run an imported graph, wherever it was imported, and several may at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from funcrt import streams
from funcrt.buckets import BucketPlan
from funcrt.bundle import Bundle, export, load_bundle
from tests.helpers import TOLERANCE, Array, make_model, random_tokens, relative_error, run_plain

import mlx.core as mx
import pytest

MODEL = make_model()
TEXTS = [random_tokens(count, count) for count in (3, 5, 8, 11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("streams") / "tiny.funcrt"
    export(MODEL, made, BucketPlan(batch=(2,), tokens=(8,), capacity=(16,)))
    return made


@pytest.fixture(scope="module")
def expected() -> list[Array]:
    return [run_plain(MODEL, text)[0] for text in TEXTS]


def in_thread(work: Callable[[], None]) -> None:
    """Run something in a new thread; what it raises is raised here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised again)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    for error in errors:
        raise error


def call(bundle: Bundle, expected: list[Array]) -> None:
    for text, reference in zip(TEXTS, expected, strict=True):
        assert relative_error(bundle([text])[0][0], reference) < TOLERANCE


def test_the_first_stream_is_anybodys():
    assert streams.is_reserved()
    in_thread(lambda: mx.eval(mx.arange(4) + 1))  # others make streams of their own


def test_a_bundle_may_be_called_first_by_a_thread_that_ends(folder, expected):
    bundle = load_bundle(folder)
    for _ in range(2):
        in_thread(lambda: call(bundle, expected))
    call(bundle, expected)


def test_a_bundle_may_be_loaded_by_a_thread_that_ends(folder, expected):
    loaded: list[Bundle] = []
    in_thread(lambda: loaded.append(load_bundle(folder)))
    call(loaded[0], expected)
    in_thread(lambda: call(loaded[0], expected))


def test_threads_take_turns_with_an_owner(folder, expected):
    """While a thread owns imported graphs, whatever others call is computed in their own turn."""
    bundle = load_bundle(folder)
    call(bundle, expected)
    stop = threading.Event()

    def own() -> None:
        with streams.owner(mx.default_device(), runs_imported=True):
            while not stop.is_set():
                with streams.turn():
                    call(bundle, expected)

    thread = threading.Thread(target=own)
    thread.start()
    for _ in range(10):
        call(bundle, expected)
    stop.set()
    thread.join(60)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call, bundle, expected).result(60)


def test_mlx_used_first_is_told_apart(folder):
    """A process that used MLX before funcrt was imported has no such stream, and says so."""
    script = """
import sys
import mlx.core as mx
mx.eval(mx.arange(3) + 1)
from funcrt import Engine, streams
from funcrt.bundle import load_bundle
from funcrt.errors import FuncrtError
assert not streams.is_reserved()
bundle = load_bundle(sys.argv[1])
mx.eval(bundle([[1, 2]])[0])  # in the thread that used it, all is well
try:
    with Engine(bundle) as engine:
        engine.generate([1, 2], max_tokens=2)
except FuncrtError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "import funcrt first" in done.stdout
