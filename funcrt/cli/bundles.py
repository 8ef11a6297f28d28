"""`funcrt inspect` and `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from funcrt.cli import options as o
from funcrt.cli import sources, terminal

import typer

if TYPE_CHECKING:
    from funcrt.bundle.manifest import ArraySpec, FunctionEntry


def inspect(bundle: o.BundleFolder, json_: o.Json = False) -> None:
    """List what a bundle holds."""
    from funcrt.bundle import load_manifest
    from funcrt.bundle.records import encode

    bundle = sources.find_bundle(str(bundle)) or bundle
    manifest = load_manifest(bundle)
    device, target = next(iter(manifest.targets.items()))
    plan = target.plan
    total = sum(entry.size for entry in manifest.files.values())
    if json_:
        terminal.emit(encode(manifest), json_, "")
        return
    terminal.show(
        f"{bundle}: {manifest.model['model_type']}, {manifest.model['num_layers']} layers, "
        f"vocabulary {manifest.vocab_size}, {target.dtype}, {terminal.size(total)}\n"
        f"made by funcrt {target.producer['funcrt']} and mlx {target.producer['mlx']} "
        f"for {device}\n"
        f"plan: batch {_listed(plan.batch)}; tokens {_listed(plan.tokens)}; "
        f"capacity {_listed(plan.capacity)}\n"
        f"cache: {', '.join(sorted({array.kind for array in target.cache} - {'row'}))}"
    )
    kinds: dict[str, list[FunctionEntry]] = {}
    for entry in target.functions:
        kinds.setdefault(entry.name, []).append(entry)
    sizes = {entry.key: manifest.files[entry.file].size for entry in target.functions}
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
    """Check every function of a bundle on this machine, and write its certificate.

    Exit code 1 if a check fails.
    """
    from funcrt.bundle.verifier import certify

    bundle = sources.find_bundle(str(bundle)) or bundle
    with terminal.progress(f"Verifying {bundle}") as tick:
        certificate = certify(bundle, tick)
    checks, failed = certificate.checks, len(certificate.failed)
    if json_:
        path = None if certificate.path is None else str(certificate.path)
        terminal.emit({**certificate.to_json(), "certificate": path}, json_, "")
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
        terminal.show(
            f"{len(checks) - failed} of {len(checks)} checks passed on {certificate.device} "
            f"({certificate.target}), mlx {certificate.mlx}\n"
            f"certificate: {certificate.path or 'not kept, nothing can be written'}"
        )
    if not certificate.passed:
        raise typer.Exit(1)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _names(specs: Sequence[ArraySpec]) -> str:
    return ", ".join(spec.name for spec in specs) or "-"
