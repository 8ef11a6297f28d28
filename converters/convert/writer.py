"""Safetensors files written piece by piece: sizes are known first, so the header goes first.

Format: 8 bytes of little-endian header length, a JSON header of names with dtype, shape and byte
range, then the data (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from funcrt.storage import save_json

import mlx.core as mx

SHARD_BYTES = 5 * 10**9
"""What a file holds at most, unless one tensor alone is larger."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_CODES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Name, shape and dtype of a tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.size


@dataclass
class _Place:
    handle: int
    offset: int
    left: int


class Writer:
    """Writes the tensors of one checkpoint into a folder, in any order and in pieces.

    Args:
        folder: where to; one file, or shards and their index past `shard_bytes`.
        entries: all tensors.
        shard_bytes: see `SHARD_BYTES`.

    Attributes:
        files: how many there are, beside an index.
        written: bytes of tensors so far.

    Raises OSError if a file cannot be written.
    """

    def __init__(
        self, folder: Path, entries: Sequence[Entry], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._handles: list[int] = []
        self._places: dict[str, _Place] = {}
        shards = _cut(entries, shard_bytes)
        self.files = len(shards)
        self.written = 0
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            single = len(shards) == 1
            name = WEIGHTS if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._open(folder / name, shard)
            weight_map |= {entry.name: name for entry in shard}
        if len(shards) > 1:
            total = sum(entry.nbytes for entry in entries)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            save_json(folder / INDEX, index)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            os.close(handle)

    def write(self, name: str, content: memoryview) -> None:
        """Add bytes to a tensor, after those that it has. Raises OSError."""
        place = self._places[name]
        if len(content) > place.left:
            raise ValueError(f"{name}: {len(content)} bytes do not fit into {place.left}")
        _write_all(place.handle, content, place.offset)
        place.offset += len(content)
        place.left -= len(content)
        self.written += len(content)

    def finish(self) -> None:
        """Check that every tensor is complete."""
        missing = [name for name, place in self._places.items() if place.left]
        if missing:
            raise ValueError(f"tensors that were not written: {', '.join(missing[:8])}")

    def _open(self, path: Path, entries: Sequence[Entry]) -> None:
        # Wide types first, so that every tensor is aligned.
        ordered = sorted(entries, key=lambda entry: -entry.dtype.size)
        header, offset = _header(ordered), 0
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._handles.append(handle)
        _write_all(handle, memoryview(header), 0)
        for entry in ordered:
            self._places[entry.name] = _Place(handle, len(header) + offset, entry.nbytes)
            offset += entry.nbytes
        os.ftruncate(handle, len(header) + offset)


def _write_all(handle: int, content: memoryview, offset: int) -> None:
    while len(content):
        count = os.pwrite(handle, content, offset)  # less than asked past 2 GB
        offset += count
        content = content[count:]


def header_bytes(entries: Sequence[Entry]) -> int:
    """About what headers take."""
    return len(_header(entries))


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _cut(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards
