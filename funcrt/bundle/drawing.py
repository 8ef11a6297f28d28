"""Drawing an exported graph, without running it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from funcrt import streams
from funcrt.buckets import Bucket
from funcrt.bundle.format.checks import load_manifest
from funcrt.bundle.format.files import read_file
from funcrt.bundle.format.manifest import PREPARE, ArraySpec, FunctionEntry, Manifest, Target
from funcrt.bundle.graphs import device_class, import_graph, mlx_version
from funcrt.errors import BundleError, some_of

import mlx.core as mx


def draw(folder: str | Path, key: str) -> str:
    """The graph of one function in the DOT language of Graphviz, as MLX writes it.

    Inputs and outputs are named as in the manifest; an array that replaces an input is NAME'.
    The graph is called on placeholders while MLX traces, so nothing is allocated or evaluated.

    Args:
        folder: of the bundle.
        key: of a function, such as `decode_b1_t1_s512`, or its name alone, which stands for its
            smallest shape; the one of this process's device class where there are several.

    Raises:
        BundleError: no such function, a damaged file, or a graph of another MLX version or of a GPU
            where there is none.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    device, entry = _find(manifest, key)
    target = manifest.targets[device]
    if device != "cpu" and not mx.is_available(mx.gpu):
        raise BundleError(
            f"{entry.file} is a graph for {device}, and MLX reads those of a GPU only where there "
            "is one: draw it there, or a function of another device class"
        )
    made_by = target.producer["mlx"]
    if made_by != mlx_version():
        raise BundleError(
            f"{entry.file} was made by MLX {made_by}, this process runs {mlx_version()}, and "
            f"graphs do not survive a change of version: pip install mlx=={made_by}"
        )
    function = import_graph(read_file(folder, entry.file, manifest), entry)
    inputs = list(_inputs(manifest, target, entry))
    outputs = _output_names(target, entry, {spec.name for spec in inputs})
    dot = io.StringIO()

    def trace(*arrays: mx.array) -> mx.array:
        results = function(*arrays)
        if len(results) != len(outputs):
            raise BundleError(f"{entry.file} returns other arrays than {entry.key} should")
        named = dict(zip(map(_quoted, outputs), results, strict=True))
        # Last, so that an array that is passed on keeps the name that it came with.
        named |= dict(zip((_quoted(spec.name) for spec in inputs), arrays, strict=True))
        mx.export_to_dot(dot, *results, **named)
        return arrays[0]

    placeholders = [mx.zeros(spec.shape, _dtype(spec.dtype)) for spec in inputs]
    try:
        with streams.turn():
            # Exporting traces with arrays that have no values; what it would write is not wanted.
            mx.export_function(lambda event: None, trace, *placeholders)
    except (ValueError, RuntimeError) as error:
        raise BundleError(f"cannot draw {entry.file}: {error}") from None
    return dot.getvalue()


def _find(manifest: Manifest, key: str) -> tuple[str, FunctionEntry]:
    """Device class and entry of a function, first of all that of this process's device class."""
    here = device_class()
    devices = sorted(manifest.targets, key=lambda device: device != here)
    keys: dict[str, tuple[str, FunctionEntry]] = {}
    names: dict[str, tuple[str, FunctionEntry]] = {}  # of the smallest shape: they ascend
    for device in devices:
        for entry in manifest.targets[device].functions:
            keys.setdefault(entry.key, (device, entry))
            names.setdefault(entry.name, (device, entry))
    found = keys.get(key) or names.get(key)
    if found is None:
        raise BundleError(f"no function {key!r}; there are {some_of(list(keys), len(keys))}")
    return found


def _inputs(manifest: Manifest, target: Target, entry: FunctionEntry) -> Iterator[ArraySpec]:
    """Everything that a function takes, in order."""
    yield from {"stored": manifest.params.stored, "prepared": target.prepared}.get(entry.params, ())
    yield from entry.inputs
    if entry.state:
        yield from _state(target, entry.bucket or Bucket(1, 1, 1))


def _state(target: Target, bucket: Bucket) -> Iterator[ArraySpec]:
    for array in target.cache_spec:
        yield ArraySpec(array.name, array.sizes(bucket.batch, bucket.capacity), array.dtype)


def _output_names(target: Target, entry: FunctionEntry, taken: set[str]) -> list[str]:
    """Names of everything that a function returns; two arrays of one name would be drawn as one."""
    names = [spec.name for spec in (target.prepared if entry.name == PREPARE else entry.outputs)]
    if entry.state:
        names += [array.name for array in target.cache_spec]
    return [f"{name}'" if name in taken else name for name in names]


def _dtype(name: str) -> mx.Dtype:
    dtype: mx.Dtype = mx.bool_ if name == "bool" else getattr(mx, name)
    return dtype


def _quoted(name: str) -> str:
    """A name as it may stand between the quotes that MLX puts around it."""
    return name.replace("\\", "\\\\").replace('"', '\\"')
