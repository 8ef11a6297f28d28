"""Compare files with the same ones made again."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

CHECK_TOLERANCE = 1e-5  # of the largest value: the same libraries on another processor


def difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected magnitude."""
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def save_versions(folder: Path) -> None:
    """Write versions.json: the libraries that made what is beside it."""
    names = ("torch", "transformers", "safetensors", "numpy")
    versions = {"python": platform.python_version(), **{name: version(name) for name in names}}
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


def compare_tensors(ours: Path, made: Path) -> list[str]:
    """Differences between two safetensors files: shapes, integers exactly, floats within bounds."""
    left, right = load_file(ours), load_file(made)
    label = f"{ours.parent.name}/{ours.name}"
    if left.keys() != right.keys():
        return [f"{label}: names differ: {sorted(left.keys() ^ right.keys())}"]
    problems = []
    for key, value in left.items():
        other = right[key]
        if value.shape != other.shape or value.dtype != other.dtype:
            problems.append(f"{label}: {key}: {value.shape} against {other.shape}")
        elif not value.is_floating_point():
            if not torch.equal(value, other):
                problems.append(f"{label}: {key}: integers differ")
        else:
            error = difference(other.float().numpy(), value.float().numpy())
            if error > CHECK_TOLERANCE:
                problems.append(f"{label}: {key}: {error:.1e} > {CHECK_TOLERANCE:.0e}")
    return problems


def list_files(folder: Path) -> set[Path]:
    """All files under a folder, relative to it."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def compare_files(ours: Path, made: Path) -> list[str]:
    """Differences between a committed file and the same one made again."""
    if ours.suffix == ".safetensors":
        return compare_tensors(ours, made)
    if ours.read_text() == made.read_text():
        return []
    if ours.name == "versions.json":
        print("note: other library versions than those in versions.json")
        return []
    return [f"{ours.parent.name}/{ours.name} differs"]


def check(folder: Path, make: Callable[[Path], None], *, complete: bool = True) -> int:
    """Make everything again in a temporary folder; 1 where it differs from `folder`.

    Not `complete`: `folder` may hold more than what is made.
    """
    with tempfile.TemporaryDirectory() as temporary:
        again = Path(temporary)
        make(again)
        ours, made = list_files(folder), list_files(again)
        problems = [f"{path} is missing" for path in sorted(made - ours)]
        if complete:
            problems += [f"{path} is made by nothing" for path in sorted(ours - made)]
        for path in sorted(ours & made):
            problems += compare_files(folder / path, again / path)
    print("\n".join(problems) if problems else f"{folder.name}: same")
    return 1 if problems else 0
