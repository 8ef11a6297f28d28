"""The C++ host as a program, and what it should say, from this package's compiled functions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcrt.buckets import choose_overhead
from funcrt.bundle import Bundle
from funcrt.sampling import History, make_settings
from funcrt.storage import load_arrays
from tests.hosts.python_host import listed

import mlx.core as mx
import pytest

SOURCE = Path(__file__).parents[2] / "exported" / "hosts" / "cpp"
BUILD = SOURCE / "build"  # that of `make cpp`: a second build takes no time
Prompts = Sequence[Sequence[int]]


def build(*targets: str) -> Path:
    """Build the host with this Python's MLX; the folder of its programs. Skips without tools."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        pytest.skip("needs a C++ compiler")
    configure = ["cmake", "-S", SOURCE, "-B", BUILD, f"-DPYTHON={sys.executable}"]
    done = subprocess.run(configure, capture_output=True, text=True, check=False)
    if "nlohmann/json.hpp was not found" in done.stderr:
        pytest.skip("needs nlohmann-json3-dev")
    assert done.returncode == 0, done.stderr
    make = ["cmake", "--build", BUILD, "--parallel", str(os.cpu_count()), "--target", *targets]
    done = subprocess.run(make, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr
    return BUILD


def start(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run funcrt_run to its end, in a process that finds neither Python nor programs."""
    alone = {"PATH": "/nonexistent", "PYTHONHOME": "/nonexistent", **variables}
    command = [str(BUILD / "funcrt_run"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **alone},
        timeout=300,
    )  # fmt: skip


def ask(
    folder: Path, prompts: Prompts, logits: Path, *arguments: str
) -> tuple[list[list[int]], mx.array]:
    """New ids of each prompt, and the logits `[N, V]` that each last one was chosen from."""
    given = [word for prompt in prompts for word in ("--prompt-ids", listed(prompt))]
    done = start(folder, *given, *arguments, "--logits", logits)
    assert done.returncode == 0, done.stderr
    rows = [[int(word) for word in line.split(" ")] for line in done.stdout.splitlines()]
    last = load_arrays(logits)["logits"]
    mx.eval(last)  # the next call writes the same file
    return rows, last


def follow(
    bundle: Bundle, prompts: Prompts, most: int, **options: Any
) -> tuple[list[list[int]], mx.array]:
    """What `ask` should return, by the loop that exported/README.md describes.

    Rows are cut only at the end: one that has ended does not change the others. The batch is the
    bundle's only one.
    """
    compiled, plan = bundle.functions, bundle.plan
    (batch,) = plan.batch
    rows = [*map(list, prompts), *[[] for _ in range(batch - len(prompts))]]
    state = bundle.init_cache(batch, plan.choose_capacity(max(map(len, rows))))
    pending = rows
    logits = mx.zeros((batch, bundle.vocab_size))
    while any(pending):
        width = plan.choose_chunk(max(map(len, pending)), choose_overhead())
        chunks = [row[:width] for row in pending]
        valid = mx.array([[i < len(chunk) for i in range(width)] for chunk in chunks])
        padded = [chunk + [0] * (width - len(chunk)) for chunk in chunks]
        tokens, is_first = mx.array(padded, dtype=mx.int32), pending is rows
        last, state = compiled.prefill(tokens, valid, state, first=is_first)
        logits = mx.where(mx.any(valid, axis=1, keepdims=True), last, logits)
        pending = [row[width:] for row in pending]
    settings = make_settings(
        batch, bundle.vocab_size, history=[History(row) for row in rows], **options
    )
    chosen = compiled.sample(logits, mx.array(list(map(len, rows)), dtype=mx.int32), settings)
    active = mx.array([bool(row) for row in rows])
    steps = [(chosen.tokens.tolist(), logits)]
    for step in range(most - 1):
        if max(map(len, rows)) + step + 1 > state["layers.0.keys"].shape[2] - 1:
            state = compiled.grow(state)
        tokens = mx.where(active, chosen.tokens, 0)
        if options:
            settings["history"] = chosen.history
            chosen, state = compiled.decode(tokens, active, settings, state)
        else:
            chosen, state = compiled.decode_greedy(tokens, active, state)
        mx.eval(chosen, state)
        steps.append((chosen.tokens.tolist(), chosen.logits))
    found, last = [], []
    for row in range(len(prompts)):
        ids = [tokens[row] for tokens, _ in steps]
        ends = [place for place, token in enumerate(ids) if token in bundle.eos_token_ids]
        found.append(ids[: min([*ends, most - 1]) + 1])
        last.append(steps[len(found[row]) - 1][1][row])
    return found, mx.stack(last)
