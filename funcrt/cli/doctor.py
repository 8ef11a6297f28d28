"""`funcrt doctor`."""

from __future__ import annotations

from funcrt.cli import options as o
from funcrt.cli import terminal

import typer


def doctor(source: o.Source, json_: o.Json = False) -> None:
    """Say whether a checkpoint can run and be exported, before its weights are downloaded."""
    from converters.functional.doctor import diagnose

    with terminal.timed(f"Looking at {source}"):
        found = diagnose(source)
    lines = [
        f"{found.source}: {found.model_type or 'no model_type'}",
        f"pure function: {_answer(found.functional)}{f', by {found.via}' if found.via else ''}",
        f"export: {_answer(found.exportable)}",
    ]
    if found.functional:
        lines.append(f"device classes: {', '.join(found.devices)}")
        lines += found.notes
        lines.append(f"cache: {', '.join(found.caches)}")
    if found.by_token:
        lines.append("prompts run token by token: its recurrent layers do not leave padding out")
    if found.reason:
        lines.append(f"because: {found.reason}")
    terminal.emit(found.to_json(), json_, "\n".join(lines))
    if not found.exportable:
        raise typer.Exit(1)


def _answer(yes: bool) -> str:
    return "yes" if yes else "no"
