"""Which families can be read from which formats, as a table for the docs.

python -m converters.formats    writes docs/formats.md
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from converters.gguf.architectures import ARCHITECTURES
from converters.gguf.tensors import AFFINE, DENSE, EXPANDED, MICROSCALED
from funcrt.models import FAMILIES


class Row(NamedTuple):
    """One family.

    Attributes:
        model_type: as Hugging Face spells it.
        mlx: whether mlx-lm has a module for it, and so publishes whole checkpoints of it.
        gguf: the architectures of GGUF that become it.
    """

    model_type: str
    mlx: bool
    gguf: tuple[str, ...]


PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
_SPELLED = {"mistral": "llama"}
# What mlx-lm publishes of these lacks tensors that choose experts.
_INCOMPLETE = ("ernie4_5_moe",)


def rows() -> list[Row]:
    """All families. Raises ModuleNotFoundError without mlx-lm."""
    modules = _modules()
    return [
        Row(
            name,
            _SPELLED.get(name, name) in modules and name not in _INCOMPLETE,
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


def becomes() -> dict[str, str]:
    """What becomes of each type of GGUF tensor."""
    packed = {kind: f"packed, affine, {bits} bits" for kind, (_, bits, _) in AFFINE.items()}
    expanded = dict.fromkeys(EXPANDED, "dense, expanded exactly")
    return {**dict.fromkeys(DENSE, "dense"), **packed, MICROSCALED: "packed, mxfp4", **expanded}


def page() -> str:
    """docs/formats.md: the rows in Markdown, and what becomes of each type of GGUF tensor."""
    lines = [
        "# Formats",
        "",
        "Written by `python -m converters.formats`. Every family is read from Hugging Face",
        "folders; the last column has the architectures of GGUF that become it.",
        "",
        "| `model_type` | safetensors | published by mlx-lm | GGUF |",
        "|---|---|---|---|",
    ]
    for row in rows():
        names = ", ".join(f"`{name}`" for name in row.gguf)
        lines.append(f"| {row.model_type} | yes | {'yes' if row.mlx else ''} | {names} |")
    lines += ["", "| GGUF type | becomes |", "|---|---|"]
    lines += [f"| {kind} | {what} |" for kind, what in sorted(becomes().items())]
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
