"""Where tensors come from: lazy arrays, which are read whole, or rows of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import converters
from converters.checkpoint import Checkpoint, make_model
from funcrt.model import Model

if TYPE_CHECKING:
    from converters.convert.gguf_rows import GGUFRows


def open_source(
    source: str | Path,
    dtype: str | None,
    adapter: str | Path | None,
    ignore: Collection[str],
) -> tuple[Model, GGUFRows | None]:
    """The model with lazy params; of a GGUF file stand-ins, and what reads the tensors.

    An adapter is fused into arrays, so a GGUF file that gets one is read as a whole.
    """
    path = Path(source).expanduser()
    if adapter is None and path.is_file() and path.suffix == ".gguf":
        try:
            from converters.convert.gguf_rows import GGUFRows, open_gguf
        except ModuleNotFoundError:
            return converters.load(source, lazy=True), None  # which says what is missing
        rows = GGUFRows(open_gguf(path, ignore))
        checkpoint = Checkpoint(rows.opened.config, rows.stand_ins(), rows.opened.tokenizer)
        model = make_model(checkpoint, dtype, ignore, lazy=True)
        if rows.know(model.params):
            return model, rows
    return converters.load(source, dtype, adapter, ignore=ignore, lazy=True), None
