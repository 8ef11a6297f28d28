"""`funcrt export`: a bundle from a checkpoint, or more in a bundle that is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from funcrt.buckets import BucketPlan
from funcrt.cli import options as o
from funcrt.cli import sources, terminal
from funcrt.errors import InputError

import typer

if TYPE_CHECKING:
    from funcrt.bundle import Bundle
    from funcrt.bundle.proof.verifier import Progress
    from funcrt.model import Model

_SIZES = {"batch": "1,4", "tokens": "4,64", "capacity": "512,2048"}
Sizes = dict[str, str | None]


def export(
    source: Annotated[
        str | None, typer.Argument(help="GGUF file, Hugging Face folder, or hub id.")
    ] = None,
    out: Annotated[Path | None, typer.Argument(help="Folder to write.")] = None,
    batch: Annotated[str | None, typer.Option(help="Rows, by default 1,4.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens per call, by default 4,64.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Cache slots, by default 512,2048.")] = None,
    dtype: o.Dtype = None,
    kv_bits: o.KvBits = None,
    ignore: o.Ignore = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="BUNDLE", help="Add this device class, or shapes, to a bundle; no OUT then."
        ),
    ] = None,
    refresh: Annotated[
        Path | None,
        typer.Option(
            metavar="BUNDLE",
            help="Export a bundle again for this MLX and device, from what is in it.",
        ),
    ] = None,
    no_weights: Annotated[
        bool, typer.Option("--no-weights", help="Leave the weights out of the bundle.")
    ] = False,
    params: o.WeightFiles = None,
    json_: o.Json = False,
) -> None:
    """Export a model as a bundle that runs without its Python code."""
    sizes: Sizes = {"batch": batch, "tokens": tokens, "capacity": capacity}
    if kv_bits not in (None, 4, 8):
        raise typer.BadParameter(f"--kv-bits: expected 4 or 8, got {kv_bits}")
    if into is not None and refresh is not None:
        raise typer.BadParameter("--into and --refresh: give one of them")
    if refresh is not None:
        given = {
            "SOURCE": source, "--batch": batch, "--tokens": tokens, "--capacity": capacity,
            "--dtype": dtype, "--kv-bits": kv_bits, "--ignore": ignore, "--no-weights": no_weights,
        }  # fmt: skip
        _refuse(given, "--refresh exports what is in the bundle")
        bundle = _refresh(refresh, params)
    elif into is not None:
        _refuse({"OUT": out, "--no-weights": no_weights}, "--into adds to a bundle that is there")
        model = None if source is None else _load(source, dtype, ignore)
        bundle = _extend(into, sizes, model, dtype, kv_bits, params)
    else:
        _refuse({"--params": params}, "a new bundle gets the weights of SOURCE")
        if source is None or out is None:
            raise typer.BadParameter(
                "expected SOURCE and OUT, or --into BUNDLE, or --refresh BUNDLE"
            )
        plan = _plan(sizes, _SIZES)
        model = _load(source, dtype, ignore)
        bundle = export_with_progress(model, out, plan, kv_bits, weights=not no_weights)
    _report(bundle, json_)


def _refuse(options: Mapping[str, object], why: str) -> None:
    given = [name for name, value in options.items() if value not in (None, False)]
    if given:
        raise typer.BadParameter(f"{', '.join(given)}: {why}; leave it out")


def _load(source: str, dtype: str | None, ignore: list[str] | None) -> Model:
    with terminal.timed(f"Loading {source}"):
        return sources.load_checkpoint(source, dtype, ignore)


def _plan(sizes: Sizes, default: dict[str, str]) -> BucketPlan:
    try:
        return BucketPlan(
            **{name: o.integers(text or default[name]) for name, text in sizes.items()}
        )
    except InputError as error:
        raise typer.BadParameter(str(error)) from None


def _extend(
    folder: Path,
    sizes: Sizes,
    model: Model | None,
    dtype: str | None,
    kv_bits: int | None,
    params: list[Path] | None,
) -> Bundle:
    from funcrt.bundle import extend, load_manifest
    from funcrt.bundle.graphs import device_class

    plan = None
    if any(sizes.values()):  # what is not named stays as it is
        targets = load_manifest(folder).targets
        there = (targets.get(device_class()) or next(iter(targets.values()))).plan
        plan = _plan(sizes, {name: ",".join(map(str, getattr(there, name))) for name in sizes})
    return _with_progress(
        folder,
        lambda tick: extend(folder, plan, tick, kv_bits, model=model, dtype=dtype, params=params),
    )


def _refresh(folder: Path, params: list[Path] | None) -> Bundle:
    from funcrt.bundle import refresh

    return _with_progress(folder, lambda tick: refresh(folder, tick, params=params))


def export_with_progress(
    model: Model, out: Path, plan: BucketPlan, kv_bits: int | None = None, weights: bool = True
) -> Bundle:
    """Export behind a progress bar."""
    from funcrt.bundle import export as run

    return _with_progress(out, lambda tick: run(model, out, plan, tick, kv_bits, weights=weights))


def _with_progress(folder: Path, run: Callable[[Progress], Bundle]) -> Bundle:
    with terminal.progress(f"Exporting {folder.name}") as tick:
        return run(tick)


def _report(bundle: Bundle, json_: bool) -> None:
    facts = export_facts(bundle)
    text = (
        f"{bundle.folder}: {len(bundle.target.functions)} functions for {bundle.device}, "
        f"{terminal.size(facts['bytes'])}, in {facts['seconds']:.1f} s, "
        f"{facts['verify_seconds']:.1f} s of it to verify them; largest difference imported/eager "
        f"{facts['imported_to_eager']:.1e}\ndigest: {facts['digest']}"
    )
    terminal.emit(facts, json_, text)


def export_facts(bundle: Bundle) -> dict[str, Any]:
    """What an export took and proved."""
    from funcrt.bundle.proof.certificate import find_certificate

    files, target = bundle.manifest.files, bundle.target
    report = target.report
    made = {f.function: f for f in report.functions} if report else {}
    certificate = find_certificate(bundle.folder, bundle.digest)  # None: removed since
    checks = certificate.checks if certificate else ()
    errors = [check.eager for check in checks if check.eager is not None]
    compiled = [f.compiled for f in made.values() if f.compiled is not None]
    verifying = certificate.seconds if certificate else 0.0
    return {
        "folder": str(bundle.folder),
        "digest": bundle.digest,
        "device": bundle.device,
        "bytes": sum(entry.size for entry in files.values()),
        "seconds": (report.seconds if report else 0.0) + verifying,
        "verify_seconds": verifying,
        "functions": {
            entry.key: {
                "seconds": made[entry.key].seconds if entry.key in made else 0.0,
                "bytes": files[entry.file].size,
                "primitives": entry.primitives,
            }
            for entry in target.functions
        },
        "compiled_to_eager": max(compiled, default=0.0),
        "imported_to_eager": max(errors, default=0.0),
    }
