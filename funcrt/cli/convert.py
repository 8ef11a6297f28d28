"""`funcrt convert`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from funcrt.cli import options as o
from funcrt.cli import terminal
from funcrt.errors import InputError, SourceError

import typer

if TYPE_CHECKING:
    from converters.convert import Recipe, Report

_SHOWN = 12  # tensors of the table
_OPTIONS = {"bits": "--quantize", "group_size": "--group-size", "mode": "--mode"}


def convert(
    source: o.Source,
    target: o.Target,
    quantize: Annotated[
        int | None, typer.Option(metavar="BITS", help="Pack matrices: 2, 3, 4, 5, 6 or 8 bits.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Values that share a scale: 32, 64 (the default) or 128.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="Pack as affine (the default), mxfp4, mxfp8 or nvfp4.")
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Expand packed matrices.")
    ] = False,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules for single matrices, JSON or TOML.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, float16 or bfloat16; the default is how they are stored."),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR", help="Add a LoRA adapter to the weights first.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure this text's perplexity before and after."),
    ] = None,
    ignore: o.Ignore = None,
    json_: o.Json = False,
) -> None:
    """Convert a checkpoint to a folder that funcrt and mlx-lm both read; pack it if asked to.

    Tensors are read one at a time. Norms, biases, convolutions and routers stay as they are, and so
    do matrices whose columns the group size does not divide.
    """
    try:
        from converters import convert as conversion
    except ModuleNotFoundError as error:
        raise SourceError(
            f"converting checkpoints needs {error.name}: pip install 'funcrt[convert]'"
        ) from None
    chosen = _recipe(quantize, group_size, mode, dequantize, recipe)
    content = None if text is None else _read_text(text)
    begin = time.perf_counter()
    with terminal.progress("Converting", in_bytes=True) as tick:
        report = conversion.convert(
            source, target, recipe=chosen, dtype=dtype, adapter=adapter, text=content,
            ignore=ignore or (), tick=tick,
        )  # fmt: skip
    seconds = time.perf_counter() - begin
    for note in report.notes:
        terminal.warn(f"note: {note}")
    facts = {"folder": str(target), "seconds": seconds, **report.to_json()}
    if not json_:
        _show(report)
    terminal.emit(facts, json_, _summary(report, target, seconds))


def _recipe(
    bits: int | None, group_size: int | None, mode: str | None, dense: bool, path: Path | None
) -> Recipe:
    from converters.convert import Recipe, load_rules, make_quantization

    packs = bits is not None or mode is not None
    if dense and packs:
        raise typer.BadParameter("--dequantize and --quantize or --mode exclude each other")
    if group_size is not None and not packs:
        raise typer.BadParameter("--group-size needs --quantize or --mode")
    recipe = Recipe(otherwise="dense" if dense else "keep")
    if packs:
        try:
            packing = make_quantization(bits, group_size, mode or "affine")
        except InputError as error:
            name, _, rest = str(error).partition(": ")
            raise typer.BadParameter(f"{_OPTIONS[name]}: {rest}") from None
        recipe = Recipe(otherwise=packing)
    return recipe if path is None else dataclasses.replace(recipe, rules=load_rules(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def _show(report: Report) -> None:
    changed = report.changed
    if changed:
        rest = f", the worst {_SHOWN} of {len(changed)}" if len(changed) > _SHOWN else ""
        terminal.table(
            f"Errors by tensor{rest} (all: --json)",
            ("tensor", "stored", "written", "relative", "largest"),
            [
                (tensor.name, tensor.stored, tensor.written,
                 f"{tensor.relative_error:.2e}", f"{tensor.max_error:.2e}")
                for tensor in changed[:_SHOWN]
            ],
        )  # fmt: skip
    noted = [tensor for tensor in report.tensors if tensor.note]
    for tensor in noted[:_SHOWN]:
        terminal.show(f"{tensor.name} stays {tensor.written}: {tensor.note}")
    if len(noted) > _SHOWN:
        terminal.show(f"and {len(noted) - _SHOWN} more stay as they are for such a reason")
    if report.perplexity is not None:
        found = report.perplexity
        terminal.show(
            f"perplexity {found.before:.4f} -> {found.after:.4f} ({found.change:+.2%}; "
            f"{found.tokens} tokens in windows of {found.window}, in {found.dtype})"
        )


def _summary(report: Report, target: Path, seconds: float) -> str:
    parts = [terminal.size(report.nbytes), f"{report.bits_per_weight:.2f} bits per weight"]
    if report.relative_error:
        parts.append(f"relative error {report.relative_error:.2e}")
    return f"{target}: {', '.join(parts)}, in {seconds:.1f} s"
