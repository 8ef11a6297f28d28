"""Arrays and JSON on disk. Files are checked before MLX reads them, which it does not do itself."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from funcrt.errors import SourceError

import mlx.core as mx

_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_ITEM_BYTES = {
    "BOOL": 1, "I8": 1, "U8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises SourceError when the file is missing or is not one."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise SourceError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def save_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")


def load_arrays(path: Path) -> dict[str, mx.array]:
    """The arrays of a safetensors file, read lazily. Raises SourceError if it is damaged."""
    check_safetensors(path)
    try:
        arrays = mx.load(str(path), format="safetensors")  # whatever the file is called
    except RuntimeError as error:
        raise SourceError(f"cannot read {path}: {error}") from None
    assert isinstance(arrays, dict)
    return arrays


def save_arrays(
    path: Path, arrays: Mapping[str, mx.array], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file and flush it to disk. Raises OSError, RuntimeError from below."""
    mx.save_safetensors(str(path), dict(arrays), metadata or {})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def load_metadata(path: Path) -> dict[str, str]:
    """The text entries of a safetensors file. Raises SourceError if it is damaged."""
    entries = _read_header(path)[0].get("__metadata__") or {}  # MLX writes null for none
    if not isinstance(entries, dict) or not all(isinstance(v, str) for v in entries.values()):
        raise SourceError(f"{path}: its metadata is damaged")
    return entries


def check_safetensors(path: Path) -> None:
    """Raise SourceError unless the header is sound and every tensor lies inside the file."""
    header, room = _read_header(path)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            first, last = entry["data_offsets"]
            sound = 0 <= first <= last <= room
            items = math.prod(entry["shape"])
            size = items * _ITEM_BYTES.get(entry["dtype"], 0)
            damaged = min(entry["shape"], default=0) < 0 or size not in (0, last - first)
        except (TypeError, KeyError, ValueError):
            raise SourceError(f"{path}: damaged entry for {name}") from None
        if damaged:
            raise SourceError(f"{path}: damaged entry for {name}: its shape does not fit its bytes")
        if not sound:
            raise SourceError(
                f"{path}: {name} ends at byte {last} of {room}: truncated; fetch it again"
            )


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and how many bytes of data follow it.

    Format: 8 bytes of little-endian header length, a JSON header of names with dtype, shape and
    byte range, then the data (https://huggingface.co/docs/safetensors).
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise SourceError(f"{path}: truncated, or not a safetensors file")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not a readable safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise SourceError(f"{path}: not a safetensors file: its header is not a JSON object")
    return header, size - 8 - length
