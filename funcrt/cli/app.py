"""The commands by name, and what all of them do when something goes wrong."""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

from funcrt._version import __version__
from funcrt.cli import (
    batch,
    convert,
    demo,
    doctor,
    export,
    generate,
    hub,
    inspect,
    models,
    plan,
    terminal,
    verify,
)
from funcrt.errors import FuncrtError

import typer


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what may go wrong into one line and an exit code; wrong usage is typer's: 2."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read our output has left; what is still buffered has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except (FuncrtError, OSError) as error:
            terminal.warn(f"error: {' '.join(str(error).split())}")
            sys.exit(1)
        except KeyboardInterrupt:
            terminal.warn("interrupted")
            sys.exit(130)

    return run


app = typer.Typer(
    name="funcrt",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    convert.convert,
    plan.plan,
    export.export,
    generate.generate,
    generate.chat,
    batch.batch,
    inspect.inspect,
    verify.verify,
    models.models,
    doctor.doctor,
    hub.push,
    hub.pull,
    demo.demo,
):
    app.command()(_guarded(command))


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    json_: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    """Language models as pure functions on MLX: convert, export, generate."""
    if version:
        facts = {"funcrt": __version__, "mlx": metadata.version("mlx")}
        terminal.emit(facts, json_, f"funcrt {__version__} (mlx {facts['mlx']})")
        raise typer.Exit


def run() -> None:
    """Run the command that the arguments name; wrong usage, errors and --help end the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it was closed
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    for name in ("SIGTERM", "SIGHUP"):  # as Ctrl-C, so that nothing half-made is left behind
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # not below nohup
            signal.signal(number, signal.default_int_handler)
    app(prog_name="funcrt")
