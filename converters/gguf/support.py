"""Which families can be read from which formats, as a table for the docs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from converters.gguf.architectures import ARCHITECTURES
from funcrt.models import FAMILIES


class Row(NamedTuple):
    """One family.

    Attributes:
        model_type: as Hugging Face spells it.
        mlx: whether mlx-lm has a module for it, and so publishes checkpoints of it.
        gguf: the architectures of GGUF that become it.
    """

    model_type: str
    mlx: bool
    gguf: tuple[str, ...]


_SPELLED = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe", "mistral": "llama"}


def rows() -> list[Row]:
    """All families. Raises ModuleNotFoundError without mlx-lm."""
    modules = _modules()
    return [
        Row(
            name,
            _SPELLED.get(name, name) in modules,
            tuple(key for key, arch in ARCHITECTURES.items() if name in arch.families),
        )
        for name in sorted(FAMILIES)
    ]


def _modules() -> set[str]:
    """The names of mlx-lm's modules, without importing any."""
    found = find_spec("mlx_lm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the table of formats needs mlx-lm", name="mlx_lm")
    folder = Path(found.submodule_search_locations[0]) / "models"
    return {path.stem for path in folder.glob("*.py")}


def table() -> str:
    """The rows in Markdown. Every family is read from Hugging Face folders."""
    lines = ["| `model_type` | safetensors | published by mlx-lm | GGUF |", "|---|---|---|---|"]
    for row in rows():
        names = ", ".join(f"`{name}`" for name in row.gguf)
        lines.append(f"| {row.model_type} | yes | {'yes' if row.mlx else ''} | {names} |")
    return "\n".join(lines)
