"""Copies of GGUF files with other tensors, other metadata, or in several parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from converters.gguf.file import GGUFFile, read_header
from converters.gguf.tensors import DENSE

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, tuple[Array, Kind]]

_RESERVED = ("general.architecture", "GGUF.")


def read_dense(file: GGUFFile) -> dict[str, Array]:
    """All tensors of a dense file, float32, in the shapes that they have there."""
    found = {}
    for name, tensor in file.tensors.items():
        raw = tensor.read()
        if tensor.kind == "BF16":
            raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            raw = raw.view(DENSE[tensor.kind][0]).astype(np.float32)
        found[name] = raw.reshape(tensor.shape)
    return found


def write(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    """A GGUF file; metadata with `general.architecture`."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if not key.startswith(_RESERVED):
            _add(writer, key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def requantized(path: Path, kind: Kind, folder: Path) -> tuple[Path, Path]:
    """Two copies: with matrices in blocks of 32 values of a type, and with what these stand for.

    Matrices that a converter keeps in float32 beside smaller types stay so.
    """
    file = read_header(path)
    packed: dict[str, tuple[Array, Kind]] = {}
    expanded: dict[str, tuple[Array, Kind]] = {}
    small = any(tensor.kind != "F32" for tensor in file.tensors.values())
    for name, array in read_dense(file).items():
        kept = file.tensors[name].kind == "F32" and small
        if array.ndim < 2 or array.shape[-1] % 32 or kept:
            packed[name] = expanded[name] = array, Kind.F32
            continue
        blocks = quants.quantize(array, kind)
        packed[name] = blocks, kind
        expanded[name] = quants.dequantize(blocks, kind), Kind.F32
    return (
        write(folder / "packed.gguf", file.metadata, packed),
        write(folder / "expanded.gguf", file.metadata, expanded),
    )


def split(path: Path, parts: int, **changes: Any) -> list[Path]:
    """The file in parts, the first with all metadata; `changes` of the `split.` keys."""
    file = read_header(path)
    arrays = {name: (array, Kind.F32) for name, array in read_dense(file).items()}
    names: Sequence[str] = list(arrays)
    paths = []
    for number in range(parts):
        own = names[number::parts]
        metadata: dict[str, Any] = {} if number else dict(file.metadata)
        metadata["general.architecture"] = file.metadata["general.architecture"]
        metadata |= {
            "split.no": number, "split.count": parts, "split.tensors.count": len(arrays),
        }  # fmt: skip
        metadata |= {f"split.{key}": value for key, value in changes.items()}
        target = path.with_name(f"model-{number + 1:05}-of-{parts:05}.gguf")
        paths.append(write(target, metadata, {name: arrays[name] for name in own}))
    return paths
