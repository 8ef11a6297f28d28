"""`funcrt export`, `inspect` and `verify`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from funcrt.buckets import BucketPlan
from funcrt.cli import options as o
from funcrt.cli import sources, terminal
from funcrt.errors import InputError

import typer

if TYPE_CHECKING:
    from funcrt.bundle import Bundle
    from funcrt.bundle.manifest import ArraySpec, FunctionEntry
    from funcrt.model import Model


def export(
    source: o.Source,
    out: o.Target,
    batch: Annotated[str, typer.Option(help="Rows, e.g. 1,4.")] = "1,4",
    tokens: Annotated[str, typer.Option(help="Tokens per call, e.g. 4,64,256.")] = "4,64",
    capacity: Annotated[str, typer.Option(help="Cache slots, e.g. 512,2048.")] = "512,2048",
    dtype: o.Dtype = None,
    kv_bits: o.KvBits = None,
    ignore: o.Ignore = None,
    json_: o.Json = False,
) -> None:
    """Export a model as a bundle that runs without its Python code."""
    sizes = {"batch": batch, "tokens": tokens, "capacity": capacity}
    try:
        plan = BucketPlan(**{name: o.integers(text) for name, text in sizes.items()})
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    if kv_bits not in (None, 4, 8):
        raise typer.BadParameter(f"--kv-bits: expected 4 or 8, got {kv_bits}")
    with terminal.timed(f"Loading {source}"):
        model = sources.load_checkpoint(source, dtype, ignore)
    facts = export_facts(export_with_progress(model, out, plan, kv_bits))
    text = (
        f"{out}: {len(facts['functions'])} functions, {terminal.size(facts['bytes'])}, "
        f"in {facts['seconds']:.1f} s, {facts['verify_seconds']:.1f} s of it to verify them; "
        f"largest difference imported/eager {facts['imported_to_eager']:.1e}"
    )
    terminal.emit(facts, json_, text)


def inspect(bundle: o.BundleFolder, json_: o.Json = False) -> None:
    """List what a bundle holds."""
    from funcrt.bundle import load_manifest
    from funcrt.bundle.records import encode

    bundle = sources.find_bundle(str(bundle)) or bundle
    manifest = load_manifest(bundle)
    plan = manifest.plan
    total = sum(entry.size for entry in manifest.files.values())
    if json_:
        terminal.emit(encode(manifest), json_, "")
        return
    terminal.show(
        f"{bundle}: {manifest.model['model_type']}, {manifest.model['num_layers']} layers, "
        f"vocabulary {manifest.vocab_size}, {manifest.dtype}, {terminal.size(total)}\n"
        f"made by funcrt {manifest.producer['funcrt']} and mlx {manifest.producer['mlx']} "
        f"for {', '.join(manifest.device_classes)}\n"
        f"plan: batch {_listed(plan.batch)}; tokens {_listed(plan.tokens)}; "
        f"capacity {_listed(plan.capacity)}\n"
        f"cache: {', '.join(sorted({array.kind for array in manifest.cache} - {'row'}))}"
    )
    kinds: dict[str, list[FunctionEntry]] = {}
    for entry in manifest.functions:
        kinds.setdefault(entry.name, []).append(entry)
    sizes = {entry.key: manifest.files[entry.file].size for entry in manifest.functions}
    terminal.table(
        "Functions, called as: params, inputs, cache state (shapes: --json)",
        ("function", "shapes", "inputs", "outputs", "size"),
        [
            (name, str(len(entries)), _names(entries[0].inputs), _names(entries[0].outputs),
             terminal.size(sum(sizes[entry.key] for entry in entries)))
            for name, entries in kinds.items()
        ],
    )  # fmt: skip


def verify(bundle: o.BundleFolder, json_: o.Json = False) -> None:
    """Check every function of a bundle on this machine; exit code 1 if one fails."""
    from funcrt.bundle import verify as run
    from funcrt.bundle.verifier import to_json

    bundle = sources.find_bundle(str(bundle)) or bundle
    with terminal.progress(f"Verifying {bundle}") as tick:
        checks = run(bundle, tick)
    failed = sum(not check.passed for check in checks)
    if json_:
        facts = {"passed": not failed, "checks": [to_json(check) for check in checks]}
        terminal.emit(facts, json_, "")
    else:
        terminal.table(
            str(bundle),
            ("function", "check", "measured", "allowed", ""),
            [
                (check.function, check.check, f"{check.measured:.3g}", f"{check.allowed:.3g}",
                 ("ok " if check.passed else "FAILED ") + check.note)
                for check in checks
            ],
        )  # fmt: skip
        terminal.show(f"{len(checks) - failed} of {len(checks)} checks passed")
    if failed:
        raise typer.Exit(1)


def export_with_progress(
    model: Model, out: Path, plan: BucketPlan, kv_bits: int | None = None
) -> Bundle:
    """Export behind a progress bar."""
    from funcrt.bundle import export as run

    with terminal.progress(f"Exporting {out.name}") as tick:
        return run(model, out, plan, tick, kv_bits)


def export_facts(bundle: Bundle) -> dict[str, Any]:
    """What an export took and proved."""
    report = bundle.manifest.report
    functions = report.functions if report else ()
    return {
        "folder": str(bundle.folder),
        "bytes": sum(entry.size for entry in bundle.manifest.files.values()),
        "seconds": report.seconds if report else None,
        "verify_seconds": report.verify_seconds if report else None,
        "functions": {f.function: {"seconds": f.seconds, "bytes": f.bytes} for f in functions},
        "compiled_to_eager": _largest(f.compiled for f in functions),
        "imported_to_eager": _largest(f.imported for f in functions),
    }


def _largest(errors: Iterable[float | None]) -> float | None:
    return max((error for error in errors if error is not None), default=None)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _names(specs: Sequence[ArraySpec]) -> str:
    return ", ".join(spec.name for spec in specs) or "-"
