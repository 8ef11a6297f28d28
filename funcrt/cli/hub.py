"""`funcrt push` and `pull`: models and bundles to and from the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from funcrt.cli import options as o
from funcrt.cli import terminal
from funcrt.errors import InputError

import typer

if TYPE_CHECKING:
    from converters.hub.pushing import Delivery

Repository = Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub.")]


def push(
    folder: Annotated[Path, typer.Argument(help="Converted model, or .funcrt folder.")],
    repository: Repository,
    private: Annotated[bool, typer.Option("--private", help="Others must not see it.")] = False,
    revision: Annotated[
        str, typer.Option("--revision", "--branch", help="Branch; made if it is not there.")
    ] = "main",
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="What the model was made from.")
    ] = None,
    license_: Annotated[
        str | None,
        typer.Option("--license", help="As the hub names it; the default is the base model's."),
    ] = None,
    ignore: o.Ignore = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_: o.Json = False,
) -> None:
    """Send a model or a bundle to the Hugging Face hub, with a card that says what it is."""
    from converters.hub.pushing import deliver, prepare

    with terminal.timed(f"Checking {folder}"):
        delivery = prepare(
            folder,
            repository,
            private=private,
            branch=revision,
            base_model=base_model,
            license=license_,
            ignore=ignore or (),
        )
    for note in delivery.notes:
        terminal.warn(f"note: {note}")
    terminal.warn(_plan(delivery))
    if not yes:
        _ask(json_)
    url = deliver(delivery, message)
    facts: dict[str, Any] = {
        "repository": repository,
        "commit": url,
        "kind": delivery.parcel.kind,
        "files": len(delivery.parcel.files),
        "bytes": delivery.parcel.nbytes,
        "deleted": list(delivery.deleted),
        "private": delivery.private,
    }
    terminal.emit(facts, json_, url)


def pull(
    repository: Repository,
    target: Annotated[
        Path | None, typer.Argument(help="Folder to write; without one it stays in the cache.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", "--branch", help="Branch, tag or commit.")
    ] = None,
    json_: o.Json = False,
) -> None:
    """Fetch a model or a bundle from the Hugging Face hub, check it, and print where it is."""
    from converters.hub.pulling import pull as run

    pulled = run(repository, target, revision)
    terminal.warn(f"{pulled.kind} of {terminal.size(pulled.nbytes)}, commit {pulled.commit[:12]}")
    facts: dict[str, Any] = {
        "folder": str(pulled.folder),
        "kind": pulled.kind,
        "commit": pulled.commit,
        "bytes": pulled.nbytes,
    }
    terminal.emit(facts, json_, str(pulled.folder))


def _plan(delivery: Delivery) -> str:
    parcel = delivery.parcel
    seen = "private" if delivery.private else "public"
    where = delivery.repo if delivery.branch == "main" else f"{delivery.repo}@{delivery.branch}"
    lines = [
        f"{parcel.kind} {parcel.folder}: {len(parcel.files)} files, "
        f"{terminal.size(parcel.nbytes)}, to {where} ({'' if delivery.exists else 'new, '}{seen})"
    ]
    if delivery.replaced:
        lines.append(f"replaces {delivery.replaced} files that are there")
    if delivery.deleted:
        lines.append(f"deletes what belongs to an earlier push: {', '.join(delivery.deleted)}")
    if parcel.left_out:
        lines.append(f"leaves out: {', '.join(parcel.left_out)}")
    return "\n".join(lines)


def _ask(as_json: bool) -> None:
    """Go on only if a person says so. Raises InputError where nobody can."""
    if as_json or not _is_asked():
        raise InputError("nothing was sent: nobody is there to ask, so pass --yes")
    if not terminal.ask("Send it? [y/N] ", quiet=False).lower().startswith("y"):
        terminal.warn("nothing was sent")
        raise typer.Exit(1)


def _is_asked() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
