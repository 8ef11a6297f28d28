"""Read the golden files of this folder in tests: models as folders, and their expected logits."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import funcrt  # noqa: F401  (before mlx)

import mlx.core as mx

LLAMA = Path(__file__).parent / "llama"
FAMILIES = Path(__file__).parent / "families"
CASES: dict[str, dict[str, Any]] = {
    case["name"]: case for case in json.loads((LLAMA / "cases.json").read_text())
}


class Golden(NamedTuple):
    """What transformers computes, in float32, for one prompt of one tiny model.

    Attributes:
        tokens: int32 `[1, T]`.
        positions: int32 `[P]`, where logits are kept.
        logits: float32 `[P, V]`, the whole prompt in one call.
        argmax: int32 `[T]`, of the same call.
        chunks: int32, lengths of the pieces; None where it does not matter how a prompt is fed.
        chunked_logits: float32 `[P, V]`, the prompt fed in pieces (dynamic rope scaling); or None.
    """

    tokens: mx.array
    positions: mx.array
    logits: mx.array
    argmax: mx.array
    chunks: mx.array | None
    chunked_logits: mx.array | None


def make_folder(name: str, folder: Path, **changes: Any) -> Path:
    """Lay out a case as a Hugging Face folder, with some values of its config.json replaced."""
    case = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**case["config"], **changes}))
    weights = LLAMA / "weights" / f"{case['weights']}.safetensors"
    shutil.copyfile(weights, folder / "model.safetensors")
    return folder


def read_golden(name: str) -> Golden:
    """Expected results of a case."""
    return _pick(_read(LLAMA / "golden.safetensors"), f"{name}.")


def family_cases() -> list[str]:
    """Names of the cases in `families/`: a model_type, or one with what is special after a dash."""
    return sorted(path.parent.name for path in FAMILIES.glob("*/golden.safetensors"))


def family_folder(case: str) -> Path:
    """The Hugging Face folder of a case. Tests read it and write nothing into it."""
    return FAMILIES / case


def read_family_golden(case: str) -> Golden:
    """Expected results of a case of `families/`."""
    return _pick(_read(FAMILIES / case / "golden.safetensors"), "")


def _pick(arrays: dict[str, mx.array], prefix: str) -> Golden:
    tokens, *rest = (arrays.get(f"{prefix}{field}") for field in Golden._fields)
    return Golden(tokens[None], *rest)


@lru_cache
def _read(path: Path) -> dict[str, mx.array]:
    return mx.load(str(path))
