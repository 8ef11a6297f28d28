"""Where tensors come from: lazy arrays, which are read whole, or rows of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import converters
from converters import adapters
from converters.checkpoint import Checkpoint, make_model
from funcrt.adapters import fuse
from funcrt.model import Model
from funcrt.packing import Quantization
from funcrt.params import packings

if TYPE_CHECKING:
    from converters.convert.gguf_rows import GGUFRows


class Opened(NamedTuple):
    """What is converted.

    Attributes:
        model: with lazy params; of a GGUF file stand-ins.
        rows: what reads the tensors that those stand for.
        packed: how matrices were packed that an adapter has made dense, by name without `.weight`.
    """

    model: Model
    rows: GGUFRows | None = None
    packed: dict[str, Quantization] = {}  # noqa: RUF012  (never changed)


def open_source(
    source: str | Path,
    dtype: str | None,
    adapter: str | Path | None,
    ignore: Collection[str],
) -> Opened:
    """Open a source without reading its weights.

    An adapter is fused into arrays, so a GGUF file that gets one is read as a whole. What it
    changes is dense then: so it is packed once, as it was or otherwise, and the error is seen.
    """
    if adapter is not None:
        return fused(source, dtype, adapter, ignore)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        try:
            from converters.convert.gguf_rows import GGUFRows, open_gguf
        except ModuleNotFoundError:
            return Opened(converters.load(source, lazy=True))  # which says what is missing
        rows = GGUFRows(open_gguf(path, ignore))
        checkpoint = Checkpoint(rows.opened.config, rows.stand_ins(), rows.opened.tokenizer)
        model = make_model(checkpoint, dtype, ignore, lazy=True)
        if rows.know(model.params):
            return Opened(model, rows)
    return Opened(converters.load(source, dtype, ignore=ignore, lazy=True))


def fused(
    source: str | Path, dtype: str | None, adapter: str | Path, ignore: Collection[str]
) -> Opened:
    """A source with an adapter in it, whose sums are computed when they are used."""
    base = converters.load(source, dtype, ignore=ignore, lazy=True)
    packed = packings(base.spec, base.params)
    model = fuse(base, adapters.read(adapters.locate(adapter), base), lazy=True, expand=True)
    still = packings(model.spec, model.params)
    return Opened(model, None, {name: packed[name] for name in packed.keys() - still.keys()})
