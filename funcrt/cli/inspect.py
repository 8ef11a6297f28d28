"""`funcrt inspect`: what a bundle holds and what it will take, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from funcrt.cli import descriptions as d
from funcrt.cli import options as o
from funcrt.cli import sources, terminal
from funcrt.errors import SourceError

import typer

if TYPE_CHECKING:
    from funcrt.bundle.facts import BundleFacts, FunctionFacts
    from funcrt.bundle.proof.certificate import Certificate


def inspect(
    bundle: o.BundleFolder,
    json_: o.Json = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page with tables and charts.")
    ] = None,
    dot: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="Print a function's graph in Graphviz's language: prefill, or prefill_b1_t4_s512.",
        ),
    ] = None,
) -> None:
    """List what a bundle holds and what it takes to run it; nothing of it is run."""
    if sum((json_, html is not None, dot is not None)) > 1:
        raise typer.BadParameter("--json, --html and --dot exclude each other")
    folder = sources.find_bundle(str(bundle)) or bundle
    if dot is not None:
        from funcrt.bundle.drawing import draw

        terminal.show(draw(folder, dot).rstrip())
        return
    from funcrt.bundle.facts import know
    from funcrt.bundle.proof.certificate import find_certificate

    facts = know(folder)
    certificate = find_certificate(folder, facts.digest)
    if html is not None:
        _write_page(html, facts, certificate)
    elif json_:
        terminal.emit(as_json(facts, certificate), json_, "")
    else:
        _show(facts, certificate)
    for damage in facts.damage:
        terminal.warn(f"damaged: {damage}: copy the bundle again, or export it again")


def _write_page(path: Path, facts: BundleFacts, certificate: Certificate | None) -> None:
    from funcrt.cli.page import render
    from funcrt.user_cache import write_atomically

    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        raise SourceError(f"{path} is not a file: choose another name for the page")
    if path.is_relative_to(facts.folder.resolve()):
        raise SourceError(f"{path} is inside the bundle: choose another place for the page")
    if not path.parent.is_dir():
        raise SourceError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not write_atomically(path, render(facts, certificate)):
        raise SourceError(f"cannot write {path}: check permissions and room on the disk")
    terminal.show(str(path))


# --- as JSON -------------------------------------------------------------------------------------


def as_json(facts: BundleFacts, certificate: Certificate | None) -> dict[str, Any]:
    """The manifest with what follows from it.

    `functions` has those of all targets. What stands in a target and not at the top of the manifest
    is there as well for one of them: that of this machine's device class, or the first.
    """
    from funcrt.bundle.format.records import encode
    from funcrt.bundle.graphs import device_class

    chosen = facts.find(device_class())
    return {
        **encode(facts.manifest),
        "folder": str(facts.folder),
        "digest": facts.digest,
        "bytes": facts.total,
        "damage": facts.damage,
        "device": chosen.device,
        **{name: encode(getattr(chosen.target, name)) for name in
           ("producer", "dtype", "plan", "cache", "golden")},
        "functions": [_function_json(f) for target in facts.targets for f in target.functions],
        "memory": {
            target.device: {
                "stored": facts.stored,
                "prepared": target.weights,
                "buckets": encode(target.memory),
            }
            for target in facts.targets
        },
        "certificate": None if certificate is None else certificate.to_json(),
    }  # fmt: skip


def _function_json(facts: FunctionFacts) -> dict[str, Any]:
    from funcrt.bundle.format.records import encode

    return {
        "key": facts.entry.key,
        "device": facts.device,
        **encode(facts.entry),
        "bytes_read": facts.reads,
        "cache_bytes": facts.cache,
        "peak_bytes": facts.peak,
        "file_bytes": facts.file_bytes,
    }


# --- as text -------------------------------------------------------------------------------------


def _show(facts: BundleFacts, certificate: Certificate | None) -> None:
    for title, text in d.header(facts, certificate):
        terminal.show(f"{title}: {text}")
    for target in facts.targets:
        terminal.show("")
        for title, text in d.target_header(target):
            terminal.show(f"{title}: {text}")
        terminal.table(
            f"\nFunctions for {target.device}, called as: params, inputs, cache state",
            ("function", "shapes", "takes", "returns", "graphs"),
            [
                (name, str(len(same)), d.takes(same), d.returns(same),
                 terminal.size(sum(f.file_bytes for f in same)))
                for name, same in d.by_name(target.functions).items()
            ],
        )  # fmt: skip
        terminal.table(
            f"What a call takes on {target.device}: bytes read at most, expected peak memory",
            ("function", "primitives", "reads", "cache", "peak"),
            [
                (f.entry.key, str(f.entry.primitives), terminal.size(f.reads), d.cache_size(f),
                 d.peak_size(f))
                for f in target.functions
            ],
        )  # fmt: skip
