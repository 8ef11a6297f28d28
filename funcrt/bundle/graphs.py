"""Exported graphs: which ones run here, and handing them to MLX."""

from __future__ import annotations

import tempfile

from funcrt import streams
from funcrt.bundle.format.manifest import MANIFEST, FunctionEntry
from funcrt.errors import BundleError
from funcrt.flat import FlatFunction

import mlx.core as mx


def mlx_version() -> str:
    """Version of the MLX that runs, which graphs are bound to."""
    version: str = mx.__version__  # type: ignore[attr-defined]
    return version


def device_class() -> str:
    """What the default device is to a bundle: "cpu", "cuda" or "metal"."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def import_graph(graph: bytes, entry: FunctionEntry) -> FlatFunction:
    """The function of a file's contents, whose hash was checked.

    MLX reads graphs from files only, and keeps the file open as long as it needs it; so it gets one
    of its own, which nobody writes to any more.

    Raises BundleError if MLX cannot read it; so does the function that it returns, for arrays of
    other shapes or dtypes than it was traced with.
    """
    try:
        with tempfile.NamedTemporaryFile(suffix=".mlxfn") as file:
            file.write(graph)
            file.flush()
            with streams.importing():
                function: FlatFunction = mx.import_function(file.name)  # type: ignore[assignment]
    except (OSError, RuntimeError, ValueError) as error:
        raise BundleError(f"cannot import {entry.file}: {error}") from None

    def call(*arrays: mx.array) -> tuple[mx.array, ...]:
        try:
            return function(*arrays)
        except ValueError:  # pages of shapes
            raise BundleError(
                f"{entry.file} takes other arrays than {MANIFEST} says: damaged; export it again"
            ) from None

    return call
