"""The stored weights of a bundle, and others in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funcrt.bundle.format.manifest import DTYPES, ArraySpec, Manifest, describe_arrays
from funcrt.errors import BundleError, ParamsError, SourceError, some_of
from funcrt.params import FLOATS, Params
from funcrt.storage import load_arrays, save_arrays

import mlx.core as mx

Weights = str | Path | Sequence[str | Path] | Mapping[str, mx.array]
"""Safetensors files, folders of them, or arrays by name."""


_SHARD_BYTES = 5_000_000_000


def save_stored(folder: Path, params: Params) -> list[str]:
    """Write weights, in several files where one would be large. Raises OSError, RuntimeError.

    Returns:
        Names of the files. The manifest lists them, so no other index is needed.
    """
    shards: list[Params] = [{}]
    size = 0
    for name, array in params.items():
        if shards[-1] and size + array.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    count = len(shards)
    names = [f"params-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    names = names if count > 1 else ["params.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        save_arrays(folder / name, shard, {"format": "mlx"})
    return names


def load_stored(folder: Path, manifest: Manifest) -> Params:
    """The stored weights, lazily, in the manifest's order."""
    found: Params = {}
    try:
        for file in manifest.params.files:
            found |= load_arrays(folder / file)
    except SourceError as error:
        raise BundleError(str(error)) from None
    names = [spec.name for spec in manifest.params.stored]
    ordered = {name: found[name] for name in names if name in found}
    if len(found) != len(names) or describe_arrays(ordered) != manifest.params.stored:
        raise BundleError(f"{folder}: its weights are not those that its manifest lists")
    return ordered


def read_weights(weights: Weights) -> Mapping[str, mx.array]:
    """The arrays of safetensors files, or of all in a folder, lazily; arrays as they are.

    Raises ParamsError for files that cannot be read or hold a name twice.
    """
    if isinstance(weights, Mapping):
        return weights
    given = [Path(file) for file in ([weights] if isinstance(weights, (str, Path)) else weights)]
    found: Params = {}
    files = [f for path in given for f in (sorted(path.glob("*.safetensors")) or [path])]
    for file in files:
        try:
            arrays = load_arrays(file)
        except SourceError as error:
            raise ParamsError(str(error)) from None
        if twice := sorted({*found} & {*arrays}):
            raise ParamsError(f"{file}: {some_of(twice, 4)} came in an earlier file already")
        found |= arrays
    return found


def as_stored(params: Mapping[str, Any], specs: Sequence[ArraySpec]) -> Params:
    """Some of the stored weights, replaced; floats in the dtype that they are stored in.

    Raises ParamsError for unknown names, other shapes, or other dtypes.
    """
    expected = {spec.name: spec for spec in specs}
    problems = []
    cast: Params = {}
    for name, array in params.items():
        spec = expected.get(name)
        if spec is None:
            problems.append(f"{name}: the bundle has no such tensor")
            continue
        if not isinstance(array, mx.array):  # of numpy, whose dtypes have the same names
            kind = type(array)
            problems.append(
                f"{name}: expected an mlx.core.array, got {kind.__module__}.{kind.__qualname__}"
            )
            continue
        dtype = DTYPES[spec.dtype]
        both_floats = spec.dtype in FLOATS and array.dtype in FLOATS.values()
        if array.shape != spec.shape or not (both_floats or array.dtype == dtype):
            problems.append(
                f"{name}: expected {spec.dtype} {list(spec.shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )
            continue
        cast[name] = array.astype(dtype)
    if problems:
        raise ParamsError(
            f"weights do not fit the exported functions: {some_of(problems, separator='; ')}; "
            "export the model that has them"
        )
    return cast
