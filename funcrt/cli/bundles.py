"""`funcrt convert`, `export`, `inspect` and `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from funcrt.buckets import BucketPlan
from funcrt.cli import options as o
from funcrt.cli import sources, terminal
from funcrt.errors import InputError


def convert(
    source: o.Source, target: o.Target, dtype: o.Dtype = None, json_: o.Json = False
) -> None:
    """Convert a checkpoint to a folder that funcrt and mlx-lm both read."""
    with terminal.timed(f"Converting {source}") as clock:
        model = sources.load_checkpoint(source, dtype)
        model.save(target)
    facts = {
        "folder": str(target),
        "model_type": model.config.model_type,
        "layers": model.config.num_layers,
        "bytes": terminal.folder_bytes(target),
        "seconds": clock.seconds,
    }
    text = f"{target}: {terminal.size(facts['bytes'])} in {clock.seconds:.1f} s"
    terminal.emit(facts, json_, text)


def export(
    source: o.Source,
    out: o.Target,
    batch: Annotated[str, typer.Option(help="Rows, e.g. 1,4.")] = "1,4",
    tokens: Annotated[str, typer.Option(help="Tokens per call, e.g. 1,64,256.")] = "1,64",
    capacity: Annotated[str, typer.Option(help="Cache slots, e.g. 512,2048.")] = "512,2048",
    dtype: o.Dtype = None,
    json_: o.Json = False,
) -> None:
    """Export a model as a bundle that runs without its Python code."""
    sizes = {"batch": batch, "tokens": tokens, "capacity": capacity}
    try:
        plan = BucketPlan(**{name: o.integers(text) for name, text in sizes.items()})
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    with terminal.timed(f"Loading {source}"):
        model = sources.load_checkpoint(source, dtype)
    export_with_progress(model, out, plan, json_)


def inspect() -> None: ...
def verify() -> None: ...
def export_with_progress(*a): ...
