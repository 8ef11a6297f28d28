"""Reads, from a 64-bit ELF library on Linux, what it needs and what its calls are bound to.

`funcrt.blas` asks two things that ctypes cannot answer: which BLAS and LAPACK functions MLX expects
from elsewhere (before MLX is loaded), and which library really serves them (after). Layouts follow
the System V ABI, chapters 4 and 5: https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html
"""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01"  # 64-bit, little endian: all that MLX is built for
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")  # type flags offset vaddr paddr filesz memsz align
_DYNAMIC = struct.Struct("<qQ")  # tag value
_SYMBOL = struct.Struct("<IBBHQQ")  # name info other section value size
_RELOCATION = struct.Struct("<QQq")  # offset info addend
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_STRSZ, _DT_JMPREL = (
    2, 5, 6, 7, 8, 10, 23,
)  # fmt: skip
_BLAS_OR_LAPACK = re.compile(rb"\0(cblas_[a-z0-9_]+|[sdcz][a-z0-9]{3,7}_)(?=\0)")


class _Dynamic(NamedTuple):
    """The dynamic section, and how addresses in it map to places in the file."""

    tags: dict[int, int]
    segments: list[tuple[int, int, int]]  # address, size, offset in the file

    def offset(self, address: int) -> int:
        for start, size, offset in self.segments:
            if start <= address < start + size:
                return address - start + offset
        raise ValueError(f"address {address:#x} is in no loaded segment")

    def strings(self, data: mmap.mmap) -> bytes:
        start = self.offset(self.tags[_DT_STRTAB])
        return data[start : start + self.tags[_DT_STRSZ]]


def _read_dynamic(data: mmap.mmap) -> _Dynamic:
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    tags: dict[int, int] = {}
    segments = []
    for i in range(count):
        kind, _, offset, address, _, length, _, _ = _PROGRAM_HEADER.unpack_from(
            data, table + i * size
        )
        if kind == _PT_LOAD:
            segments.append((address, length, offset))
        elif kind == _PT_DYNAMIC:
            tags.update(_DYNAMIC.iter_unpack(data[offset : offset + length]))
    return _Dynamic(tags, segments)


def read_needs(library: Path) -> tuple[list[str], bool]:
    """Return the BLAS and LAPACK functions that a library names, and whether it needs CUDA.

    Only names are read, so a function that the library defines itself is listed too.

    Raises:
        ValueError: the file is not a 64-bit ELF library.
        OSError: it cannot be read.
    """
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            strings = _read_dynamic(data).strings(data)
        except (struct.error, KeyError) as error:
            raise ValueError(f"{library} is not a shared library: {error}") from error
    names = sorted(name.decode() for name in _BLAS_OR_LAPACK.findall(strings))
    return names, b"\0libcuda.so" in strings


def find_binding(library: Path, function: str) -> Path | None:
    """Return the file whose `function` a loaded library calls, or None if that cannot be told.

    Reads the slot that the dynamic linker filled, so it is the truth whatever was loaded later.

    Raises:
        ValueError, OSError: as `read_needs`.
    """
    base = min((start for start, _, path in _read_maps() if path == library), default=None)
    if base is None:
        return None
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        slot = _find_slot(data, function.encode())
    if slot is None:
        return None
    return find_file(ctypes.c_uint64.from_address(base + slot).value)


def find_file(address: int) -> Path | None:
    """Return the file that is mapped at an address of this process."""
    return next((path for start, end, path in _read_maps() if start <= address < end), None)


def _find_slot(data: mmap.mmap, function: bytes) -> int | None:
    dynamic = _read_dynamic(data)
    strings = dynamic.strings(data)
    symbols = dynamic.offset(dynamic.tags[_DT_SYMTAB])
    for table, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
        if table not in dynamic.tags:
            continue
        start = dynamic.offset(dynamic.tags[table])
        for slot, info, _ in _RELOCATION.iter_unpack(data[start : start + dynamic.tags[size]]):
            index = info >> 32
            (name, *_) = _SYMBOL.unpack_from(data, symbols + index * _SYMBOL.size)
            if index and strings.startswith(function + b"\0", name):
                return int(slot)
    return None


def _read_maps() -> Iterator[tuple[int, int, Path]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        if inode != "0" and path:
            start, end = span.split("-")
            yield int(start, 16), int(end, 16), Path(path[0].removesuffix(" (deleted)"))
