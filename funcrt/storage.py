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
_LARGEST_AXIS = 2**31 - 1  # MLX counts in int32
_ITEM_BYTES = {
    "BOOL": 1, "I8": 1, "U8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
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
        # Whatever the file is called. MLX for CUDA would read within the GPU's work, one array
        # after the other, which takes several times as long.
        arrays = mx.load(str(path), format="safetensors", stream=mx.cpu)
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
    texts: dict[str, str] = _read_header(path)[0].get("__metadata__") or {}
    return texts


def parse_strictly(text: bytes) -> Any:
    """JSON that every parser reads alike: UTF-8, no name twice in an object, finite numbers only.

    Raises ValueError, RecursionError.
    """
    return json.loads(
        text.decode("utf-8"),
        object_pairs_hook=_without_twins,
        parse_float=_finite,
        parse_constant=_finite,
    )


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a number of JSON")
    return number


def check_safetensors(path: Path) -> None:
    """Raise SourceError unless the header is sound and its tensors fill the file without overlap.

    The format asks for both, and MLX believes whatever the offsets say.
    """
    header, room = _read_header(path)
    places = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not name.isprintable():  # surrogates, too, which MLX cannot read
            raise SourceError(f"{path}: damaged name {name!r}")
        try:
            first, last = _whole_numbers(entry["data_offsets"])
            shape = _whole_numbers(entry["shape"])
            item = _ITEM_BYTES[entry["dtype"]]
        except (TypeError, KeyError, ValueError):
            raise SourceError(f"{path}: damaged entry for {name}") from None
        if last > room:
            raise SourceError(
                f"{path}: {name} ends at byte {last} of {room}: truncated; fetch it again"
            )
        if max(shape, default=0) > _LARGEST_AXIS or math.prod(shape) * item != last - first:
            raise SourceError(f"{path}: damaged entry for {name}: its shape does not fit its bytes")
        places.append((first, last, name))
    end = 0
    for first, last, name in sorted(places):
        if first != end:
            raise SourceError(
                f"{path}: damaged entry for {name}: it begins at byte {first} of the data, "
                f"the tensor before it ends at {end}"
            )
        end = last
    if end != room:
        raise SourceError(f"{path}: damaged: its tensors end at byte {end} of {room}")


def _whole_numbers(values: object) -> list[int]:
    """A list of them as it is. Raises ValueError; floats and booleans equal integers in Python."""
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError
    return values


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
            header = parse_strictly(file.read(length))
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not a readable safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise SourceError(f"{path}: not a safetensors file: its header is not a JSON object")
    texts = header.get("__metadata__")
    texts = {} if texts is None else texts  # MLX writes null for none
    if not isinstance(texts, dict) or not all(isinstance(v, str) for v in texts.values()):
        raise SourceError(f"{path}: its metadata is damaged")
    return header, size - 8 - length
