"""Killed at random moments, a writer leaves the bundle that was there or the new one, whole."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from funcrt import publish
from funcrt.bundle import load_manifest, verify
from funcrt.bundle.exporter import KIND

import pytest

ROOT = Path(__file__).parents[2]

WRITER = """
import sys
from funcrt.buckets import BucketPlan
from funcrt.bundle import export, exporter
from tests.bundle.conftest import SMALL, TINIEST
from tests.helpers import make_model
target, action = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
if action == "export":
    export(make_model("float32", seed=1, **TINIEST), target, SMALL)
elif action == "extend":
    exporter.extend(target, BucketPlan(batch=2, tokens=4, capacity=16))
else:
    exporter.refresh(target)
print("done", flush=True)
"""


class Writer:
    """A process that has imported everything and waits for its start."""

    def __init__(self, target: Path, action: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(target), action],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, cwd=ROOT,
        )  # fmt: skip

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self) -> None:
        assert self._read() == "ready"
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        assert self._read() == "done"
        self._process.communicate()
        assert self._process.returncode == 0

    def kill(self) -> bool:
        """Whether it was still at work."""
        self._process.kill()
        said, _ = self._process.communicate()
        return "done" not in said and self._process.returncode == -signal.SIGKILL


def measure(tiny: Path, target: Path, action: str) -> tuple[float, dict[str, str]]:
    """How long it takes, and what each of the two bundles is called by its digest."""
    names = {state_of(tiny): "old"}
    shutil.copytree(tiny, target)
    writer = Writer(target, action)
    writer.start()
    begin = time.perf_counter()
    writer.wait()
    return time.perf_counter() - begin, {**names, state_of(target): "new"}


def state_of(folder: Path) -> str:
    """What tells the old bundle from the new one; dates and times of making differ each time."""
    manifest = load_manifest(folder)
    return f"{manifest.fingerprint} {manifest.targets['cpu'].plan}"


def run(tiny: Path, place: Path, action: str, count: int) -> Counter[str]:
    """Kill a writer `count` times; how many were at work, and which bundle they left."""
    target = place / "tiny.funcrt"
    seconds, names = measure(tiny, target, action)
    chance, seen = random.Random(action), Counter[str]()
    writer = Writer(target, action)
    for number in range(count):
        moment = (number + chance.random()) / count * seconds  # one in each of `count` parts
        shutil.rmtree(target)
        shutil.copytree(tiny, target)
        writer.start()
        time.sleep(moment)
        seen["at work"] += writer.kill()
        writer = Writer(target, action)  # it imports what it needs while this one's work is checked
        seen[names[state_of(target)]] += 1
        assert all(check.passed for check in verify(target)), f"{action} killed at {moment} s"
    writer.start()
    writer.wait()
    assert names[state_of(target)] == "new"
    assert [path.name for path in place.iterdir()] == [target.name]
    return seen


@pytest.mark.parametrize(("action", "count"), [("export", 6), ("extend", 3), ("refresh", 3)])
def test_kills(tiny: Path, tmp_path: Path, action: str, count: int) -> None:
    assert run(tiny, tmp_path, action, count)["at work"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("action", "count"), [("export", 50), ("extend", 25), ("refresh", 25)])
def test_many_kills(tiny: Path, tmp_path: Path, action: str, count: int) -> None:
    seen = run(tiny, tmp_path, action, count)
    assert seen["at work"] > count // 5  # the first run, which is measured, may be slow


def test_a_kill_while_a_certificate_is_written(tiny: Path, tmp_path: Path) -> None:
    """Its half is no file of somebody else: the next export takes the place."""
    target = Path(shutil.copytree(tiny, tmp_path / "tiny.funcrt"))
    (target / ".certificate.json.0a1b2c3d.tmp").write_text('{"format"')
    with publish.staging(target, KIND):
        pass
    (target / ".certificate.json").write_text("{}")
    with pytest.raises(publish.PublishError), publish.staging(target, KIND):
        pass
