"""Bundles in all kinds of places, with several processes at them, and weights that change there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from funcrt import publish
from funcrt.buckets import BucketPlan
from funcrt.bundle import Bundle, export, load_bundle, load_manifest, verify
from funcrt.bundle.exporter import extend, refresh
from funcrt.bundle.format import files
from funcrt.errors import BundleError
from funcrt.model import Model
from tests.bundle.conftest import SMALL, TINIEST
from tests.bundle.test_bundle_fuzz import PARAMS
from tests.helpers import make_model, random_tokens, relative_error, run_plain

import pytest

ROOT = Path(__file__).parents[2]
TOKENS = random_tokens(7)
MORE = BucketPlan(batch=2, tokens=4, capacity=16)


@pytest.fixture
def place(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy.funcrt"))


def computes(bundle: Bundle, model: Model) -> bool:
    return relative_error(bundle(TOKENS)[0][0], run_plain(model, TOKENS)[0]) <= 2e-5


# --- names ---------------------------------------------------------------------------------------

NAMES = [
    "with a space", " both ends ", "日本語 🦙", "é", "e\u0301", "-x", "--help", "a'b\"c", "1% #1?",
    "$HOME", "a;b&c", "tab\there", "line\nbreak", "x" * 200, ".hidden", "a\\b", "*",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:12]))
def test_names_that_need_care(tiny: Path, tiny_model: Model, tmp_path: Path, name: str) -> None:
    target = Path(shutil.copytree(tiny, tmp_path / "folder" / name))
    assert computes(load_bundle(str(target)), tiny_model)
    (target / PARAMS).unlink()
    with pytest.raises(BundleError, match=r"params.safetensors is missing"):
        load_bundle(target)


@pytest.mark.parametrize("name", ["日本語 🦙 'x' -y", "line\nbreak"])
def test_exports_to_names_that_need_care(tiny_model: Model, tmp_path: Path, name: str) -> None:
    target = tmp_path / name / name
    bundle = export(tiny_model, target, SMALL)
    assert bundle.folder == target
    assert all(check.passed for check in verify(extend(target, MORE)))
    assert [path.name for path in target.parent.iterdir()] == [name]


# --- folders that cannot be written --------------------------------------------------------------


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without the administrator's right to write anywhere."""
    if (user := os.geteuid()) != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def closed(tiny: Path) -> Iterator[Path]:
    """A bundle in a folder that others may only read."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        target = Path(shutil.copytree(tiny, folder / "tiny.funcrt"))
        for path in [target, *target.rglob("*"), folder]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield target
        for path in [folder, target, *target.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_read_only_folder(closed: Path, tiny_model: Model, own_cache: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in closed.parent.rglob("*")}
    with as_nobody():
        assert not os.access(closed, os.W_OK) or os.getuid() == 0
        bundle = load_bundle(closed)
        assert computes(bundle, tiny_model)
        assert all(check.passed for check in verify(bundle))
        for change in (
            lambda: export(tiny_model, closed, SMALL),
            lambda: export(tiny_model, closed.with_name("new.funcrt"), SMALL),
            lambda: extend(closed, MORE),
            lambda: refresh(closed),
        ):
            with pytest.raises(
                BundleError, match=r"cannot export to .*Permission denied"
            ) as caught:
                change()
            assert str(caught.value).isprintable()
    assert {path: path.stat().st_mtime_ns for path in closed.parent.rglob("*")} == before


# --- others at work ------------------------------------------------------------------------------

READER = """
import sys
from funcrt.bundle import load_bundle
from tests.bundle.test_bundle_places import TOKENS
from tests.helpers import to_numpy
print("ready", flush=True)
while sys.stdin.readline():
    bundle = load_bundle(sys.argv[1])
    print(bundle.manifest.fingerprint, hash(to_numpy(bundle(TOKENS)[0]).tobytes()), flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip


def heard(process: subprocess.Popen[str]) -> str:
    """Its next line. Fails with what it said of its error instead."""
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        pytest.fail(process.communicate()[1])
    return line.rstrip("\n")


def release(process: subprocess.Popen[str]) -> None:
    """Let one that waits go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_readers_of_a_bundle_that_is_replaced(place: Path) -> None:
    """Each load is one of the two as a whole: its manifest, its graphs and its weights."""
    other = place.with_name("other.funcrt")
    export(make_model(seed=5, **TINIEST), other, SMALL)
    known = {load_manifest(folder).fingerprint for folder in (place, other)}
    begin = time.perf_counter()
    load_bundle(place)
    load = max(0.02, time.perf_counter() - begin)
    readers = [start(READER, place) for _ in range(3)]
    seen: dict[str, set[str]] = {}
    with contextlib.ExitStack() as ended:
        for reader in readers:
            ended.enter_context(reader)
            ended.callback(reader.kill)
            assert heard(reader) == "ready"
        for turn in range(12):
            for reader in readers:
                release(reader)
            # In the middle of their loads, wherever that is today, but never so often that one of
            # them gives up: the next load begins when all have ended this one.
            for pause in (load / 4, load / 2, load):
                publish.exchange(other, place)
                time.sleep(pause * (1 + turn % 4))
            for reader in readers:
                fingerprint, logits = heard(reader).split()
                seen.setdefault(fingerprint, set()).add(logits)
    assert {*seen} <= known
    assert all(len(logits) == 1 for logits in seen.values())


@pytest.mark.parametrize("moment", ["check_files", "read_file", "load_stored"])
def test_a_bundle_that_is_replaced_while_it_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """At any step; the weights come last, and nothing in them says whose they are."""
    other, model = place.with_name("other.funcrt"), make_model(seed=5, **TINIEST)
    export(model, other, SMALL)
    from funcrt.bundle import loader

    module = loader if moment == "load_stored" else files
    real, calls = getattr(module, moment), []

    def replace_first(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(moment)
            publish.exchange(other, place)
        return real(*arguments, **options)

    monkeypatch.setattr(module, moment, replace_first)
    bundle = load_bundle(place)
    assert bundle.fingerprint == model.fingerprint
    assert computes(bundle, model)


def test_two_extensions_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one in the last moment before this one takes the place is not lost."""
    other = BucketPlan(batch=3, tokens=8, capacity=16)
    sync = publish._sync_tree

    def extend_first(folder: Path) -> None:
        monkeypatch.setattr(publish, "_sync_tree", sync)
        extend(place, other)
        sync(folder)

    monkeypatch.setattr(publish, "_sync_tree", extend_first)
    with pytest.raises(BundleError, match="was replaced while this added to it: do it again"):
        extend(place, MORE)
    assert load_bundle(place).plan == SMALL.joined(other)
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert extend(place, MORE).plan == SMALL.joined(other).joined(MORE)


EXTENDER = """
import sys
from funcrt.buckets import BucketPlan
from funcrt.bundle.exporter import extend
from funcrt.errors import BundleError
print("ready", flush=True)
sys.stdin.readline()
try:
    extend(sys.argv[1], BucketPlan(batch=2, tokens=int(sys.argv[2]), capacity=16))
except BundleError as error:
    print(error)
else:
    print("done")
"""


def test_two_processes_extend_at_once(place: Path) -> None:
    writers = {tokens: start(EXTENDER, place, tokens) for tokens in (4, 6)}
    for act in (heard, release):  # all begin at once
        for writer in writers.values():
            act(writer)
    said = {tokens: writer.communicate()[0].strip() for tokens, writer in writers.items()}
    done = [tokens for tokens, text in said.items() if text == "done"]
    assert done
    assert all(
        text == "done" or "was replaced while this added to it: do it again" in text
        for text in said.values()
    )
    bundle = load_bundle(place)
    assert bundle.plan.tokens == tuple(sorted({8, *done}))
    assert all(check.passed for check in verify(bundle))
    assert [path.name for path in place.parent.iterdir()] == [place.name]
