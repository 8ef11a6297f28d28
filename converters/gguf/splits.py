"""Models cut into several GGUF files, as llama.cpp's gguf-split names them.

Parts are called `NAME-00001-of-00003.gguf` and so on. The first one has all metadata; each has
`split.no` (from 0), `split.count` and `split.tensors.count`.
"""

from __future__ import annotations

import re
from pathlib import Path

from converters.gguf.file import GGUFFile, GGUFTensor, read_header
from funcrt.errors import SourceError, some_of

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST = 9999  # parts; a larger count is damage


def read_parts(path: Path) -> GGUFFile:
    """The checked header of a model: of one file, or of all parts when `path` is any of them.

    Raises:
        SourceError: see `read_header`; parts that are missing, do not belong together or lack
            tensors.
    """
    file = read_header(path)
    count = file.metadata.get("split.count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _MOST:
        raise SourceError(f"{path}: split.count: expected a number of files, got {count!r}")
    if count < 2:
        return file
    parts = [read_header(part) for part in _part_paths(path, count)]
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        held = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if held != (number, count):
            raise SourceError(
                f"{part.path} says that it is part {held[0]!r} of {held[1]!r}, counted from 0; "
                f"its name says {number} of {count}: the files do not belong together"
            )
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise SourceError(f"{part.path}: tensor {twice[0]!r} is in another part too")
        tensors |= part.tensors
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise SourceError(
            f"{path}: its {count} parts hold {len(tensors)} tensors, expected {expected}; "
            "download them again"
        )
    return GGUFFile(parts[0].path, parts[0].metadata, tensors)


def _part_paths(path: Path, count: int) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise SourceError(
            f"{path} is one of {count} parts, which are found by name: "
            f"expected NAME-00001-of-{count:05}.gguf to NAME-{count:05}-of-{count:05}.gguf"
        )
    paths = [
        path.with_name(f"{match['stem']}-{number + 1:05}-of-{count:05}.gguf")
        for number in range(count)
    ]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise SourceError(
            f"{path} is one of {count} parts, but beside it there is no {some_of(missing)}"
        )
    return paths
