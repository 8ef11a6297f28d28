"""Tensors of a GGUF file, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from converters.gguf import Opened, open_gguf
from converters.gguf.file import GGUFTensor
from converters.gguf.placing import Piece, is_plain, read_piece
from converters.gguf.tensors import Parts, read_tensor
from funcrt.params import Params

import mlx.core as mx

__all__ = ["GGUFRows", "open_gguf"]

_VALUES = 1 << 22  # read at once


class GGUFRows:
    """Reads the tensors of a GGUF file, some rows at a time where they are stored as rows."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self._places: dict[str, tuple[Piece, int | None]] = {}
        self._known: set[int] = set()
        self._cached: tuple[Piece | None, Params] = (None, {})

    def stand_ins(self) -> Params:
        """Zeros of the right shapes and dtypes, which take no memory until they are computed."""
        found: Params = {}
        for piece in self.opened.pieces:
            params = self._read(piece, _outline)
            stack = "{x}" in piece.name
            for name in params:
                number = None
                if stack:
                    start = len(piece.name.partition("{x}")[0])
                    number = int(name[start:].partition(".")[0])
                base, _, part = name.rpartition(".")
                self._places[name] = piece, number
                if part == "scales":
                    self._places[f"{base}.weight"] = self._places[base] = piece, number
            found |= params
        self._known = {id(array) for array in found.values()}
        return found

    def know(self, params: Params) -> bool:
        """Whether params are these stand-ins, under these names."""
        return all(
            id(array) in self._known and name in self._places for name, array in params.items()
        )

    def blocks(self, name: str) -> Iterator[Parts]:
        """The tensor `name`, some rows at a time where its rows are those of the file."""
        piece, number = self._places[name]
        tensor = piece.tensors[0]
        if not is_plain(piece, self.opened.architecture) or len(tensor.shape) < 2:
            yield self.whole(name)
            return
        *stack, count, columns = tensor.shape
        total = math.prod(stack) * count
        first, last = (0, total) if number is None else (number * count, (number + 1) * count)
        step = max(1, _VALUES // columns)
        for start in range(first, last, step):
            yield read_tensor(_cut(tensor, start, min(start + step, last)))

    def whole(self, name: str) -> Parts:
        """All of it."""
        piece, _ = self._places[name]
        if self._cached[0] is not piece:  # a stack is asked for once for each of its matrices
            self._cached = (None, {})
            self._cached = (piece, self._read(piece, read_tensor))
        params = self._cached[1]
        base = name.removesuffix(".weight")
        if f"{base}.scales" not in params:
            return {"": params[name]}
        parts = ("weight", "scales", "biases")
        return {part: params[f"{base}.{part}"] for part in parts if f"{base}.{part}" in params}

    def _read(self, piece: Piece, read: Callable[[GGUFTensor], Parts]) -> Params:
        return read_piece(piece, self.opened.architecture, self.opened.config, read)


def _outline(tensor: GGUFTensor) -> Parts:
    """What `read_tensor` gives, with zeros for values: its first row tells the form."""
    if len(tensor.shape) < 2:
        row = read_tensor(tensor)
        return {part: mx.zeros(array.shape, array.dtype) for part, array in row.items()}
    row = read_tensor(_cut(tensor, 0, 1))
    return {
        part: mx.zeros((*tensor.shape[:-1], array.shape[-1]), array.dtype)
        for part, array in row.items()
    }


def _cut(tensor: GGUFTensor, start: int, stop: int) -> GGUFTensor:
    """Some rows of a tensor, counted through all its matrices."""
    count, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    row = tensor.size // count
    return replace(
        tensor,
        shape=(stop - start, columns),
        offset=tensor.offset + start * row,
        size=(stop - start) * row,
    )
