"""Verifying what was just exported, in a process that has never seen the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import funcrt
from funcrt.bundle.golden.recorder import Tick
from funcrt.errors import BundleError, some_of

import mlx.core as mx


def verify_elsewhere(folder: Path, weights: Sequence[Path], tick: Tick) -> None:
    """Verify a bundle in a new process, which leaves its certificate in the folder.

    Args:
        folder: of the bundle.
        weights: files to take instead of its own.
        tick: told of every part done.

    Raises BundleError naming the checks that failed.
    """
    device = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"
    module = "funcrt.bundle.proof.verifier"
    command = [sys.executable, "-m", module, "--json", "--device", device, str(folder)]
    command += [word for file in weights for word in ("--params", str(file))]
    # The same packages, wherever this process found them; not what lies in the current folder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    root = Path(funcrt.__file__).parents[1]
    checks: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=root
        ) as process,
    ):
        try:
            checks = _follow(process.stdout or (), tick)
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    failed = [check for check in checks if not check["passed"]]
    if failed:
        raise BundleError(
            f"the exported functions are wrong, nothing is published: {_list(failed)}"
        )
    if status or not checks:
        reason = said[-1] if said else f"exit status {status}"
        raise BundleError(f"the exported functions do not run, nothing is published: {reason}")


def _follow(lines: Iterable[str], tick: Tick) -> list[dict[str, Any]]:
    for line in lines:
        message = json.loads(line)
        if "checks" in message:
            checks: list[dict[str, Any]] = message["checks"]
            return checks
        tick(f"verify {message['item']}")
    return []


def _list(failed: Sequence[dict[str, Any]], most: int = 4) -> str:
    listed = [
        f"{check['function']} {check['check']} {check['measured']} (at most {check['allowed']})"
        for check in failed
    ]
    return some_of(listed, most, "; ")
