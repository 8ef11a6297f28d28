"""One GGUF file: a header parser that checks every length, and the tensors it describes.

The layout is that of the GGUF specification, versions 2 and 3: magic, version, counts, key-value
pairs, tensor descriptions, then tensor data, each tensor aligned to `general.alignment` bytes.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from funcrt.errors import SourceError

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` has rows first, as in Hugging Face checkpoints."""

    name: str
    shape: tuple[int, ...]
    kind: str
    path: Path
    offset: int
    size: int

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's bytes, `[size]` uint8. Raises SourceError if the file became shorter."""
        data = np.fromfile(self.path, np.uint8, count=self.size, offset=self.offset)
        if data.size != self.size:
            raise SourceError(f"{self.path} changed while it was read; try again")
        return data


@dataclass(frozen=True)
class GGUFFile:
    """A checked header: metadata as plain Python values, tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFFile:
    """Parse and check the header of a GGUF file; no tensor data is read.

    Raises:
        SourceError: not a GGUF file, an unknown version, a count or length that leads out of the
            file, a name that appears twice, or tensors that overlap or end after the file does.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise SourceError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            metadata, count = _read_metadata(cursor)
            found = [_read_tensor(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise SourceError(f"{path}: general.alignment must be a power of two, got {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in found:
        if name in tensors:
            raise SourceError(f"{path}: tensor {name!r} appears twice")
        tensors[name] = GGUFTensor(
            name, shape, kind.name, path, start + offset, _size(path, name, shape, kind)
        )
    _check_extents(path, list(tensors.values()), size)
    return GGUFFile(path, metadata, tensors)


class _Cursor:
    """A position in the file that never moves past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.position = len(_MAGIC)
        self._data = data

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise SourceError(
                f"{self.path} is truncated or damaged: its header needs {end} bytes, "
                f"the file has {len(self._data)}; download it again"
            )
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        raw = self.take(self.scalar("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise SourceError(f"{self.path}: a string in the header is not UTF-8") from None


def _read_metadata(cursor: _Cursor) -> tuple[dict[str, Any], int]:
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "is big-endian" if swapped in _VERSIONS else f"has GGUF version {version}"
        raise SourceError(f"{cursor.path} {what}; little-endian versions 2 and 3 are supported")
    tensor_count, key_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise SourceError(f"{cursor.path}: metadata key {key!r} appears twice")
        metadata[key] = _read_value(cursor, key, cursor.scalar("<I"))
    return metadata, tensor_count


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text()
    if kind in _SCALARS:
        value = cursor.scalar(_SCALARS[kind])
        # The shortest decimal, so that 1e-5 does not come back as 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value
    if kind != _ARRAY:
        raise SourceError(f"{cursor.path}: metadata key {key!r} has the unknown type {kind}")
    item, count = cursor.scalar("<I"), cursor.scalar("<Q")
    if item == _STRING:
        return [cursor.text() for _ in range(count)]
    if item not in _SCALARS:
        raise SourceError(f"{cursor.path}: metadata key {key!r} is an array of unknown type {item}")
    form = np.dtype(_SCALARS[item])
    return np.frombuffer(cursor.take(count * form.itemsize), form).tolist()


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.text()
    dims = cursor.scalar("<I")
    if not 1 <= dims <= 4:
        raise SourceError(
            f"{cursor.path}: tensor {name!r} has {dims} dimensions; 1 to 4 are allowed"
        )
    shape = tuple(cursor.scalar("<Q") for _ in range(dims))[::-1]  # stored fastest axis first
    kind, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    try:
        return name, shape, GGMLQuantizationType(kind), offset
    except ValueError:
        raise SourceError(
            f"{cursor.path}: tensor {name!r} has the unknown type {kind}; "
            "the file may be damaged, or made by a newer llama.cpp"
        ) from None


def _size(path: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or 0 in shape:
        raise SourceError(
            f"{path}: tensor {name!r} has shape {shape}; "
            f"rows of {kind.name} hold multiples of {block} values"
        )
    return prod(shape) // int(block) * int(block_bytes)


def _check_extents(path: Path, tensors: list[GGUFTensor], size: int) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise SourceError(f"{path} is damaged: tensors {last!r} and {tensor.name!r} overlap")
        end, last = tensor.offset + tensor.size, tensor.name
        if end > size:
            raise SourceError(
                f"{path} is truncated: tensor {last!r} ends at byte {end}, "
                f"the file has {size}; download it again"
            )
