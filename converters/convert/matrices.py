"""Reading, packing and measuring one tensor in pieces, so that little more than it is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from converters.convert.layout import Output, base_of
from converters.convert.writer import Entry
from funcrt.errors import ParamsError
from funcrt.packing import PARTS, Quantization, Transposed, dequantize, unfit_scales
from funcrt.params import Params

if TYPE_CHECKING:
    from converters.convert.gguf_rows import GGUFRows

import mlx.core as mx
import numpy as np

_VALUES = 1 << 22  # in a piece


@dataclass
class Difference:
    """How far written values are from those that were read, added up over pieces."""

    squares: float = 0.0
    reference: float = 0.0
    largest: float = 0.0

    @property
    def relative(self) -> float:
        """Frobenius norm of the difference over that of the matrix."""
        return math.sqrt(self.squares / self.reference) if self.reference else 0.0

    def add(self, written: mx.array, read: mx.array) -> None:
        """Two float32 pieces. Raises FloatingPointError if either has values that are no number."""
        difference = written - read
        sums = [mx.square(array).sum(axis=-1) for array in (difference, read)]
        most = mx.abs(difference).max()
        mx.eval(sums, most)
        squares, reference = (float(np.array(array).sum(dtype=np.float64)) for array in sums)
        if not (math.isfinite(squares) and math.isfinite(reference)):
            raise FloatingPointError
        self.squares += squares
        self.reference += reference
        self.largest = max(self.largest, float(np.array(most)))

    def add_copy(self, read: mx.array) -> None:
        """A piece that is written as it is; what is no number stays as it is too."""
        reference = float(np.array(mx.square(read).sum(axis=-1)).sum(dtype=np.float64))
        if math.isfinite(reference):
            self.reference += reference


@dataclass(frozen=True)
class Form:
    """How a tensor is stored: dense in a dtype, or packed with scales of one."""

    dtype: mx.Dtype
    packing: Quantization | None = None

    def entries(self, output: Output) -> list[Entry]:
        """The arrays that a tensor has in this form."""
        packing = self.packing
        if packing is None:
            return [Entry(output.name, output.shape, self.dtype)]
        *rows, columns = output.shape
        groups = (*rows, columns // packing.group_size)
        packed = (*rows, columns * packing.bits // 32)
        entries = [Entry(f"{output.base}.weight", packed, mx.uint32)]
        if packing.mode == "affine":
            parts = ("scales", "biases")
            return entries + [Entry(f"{output.base}.{p}", groups, self.dtype) for p in parts]
        return [*entries, Entry(f"{output.base}.scales", groups, mx.uint8)]

    @property
    def name(self) -> str:
        """For people: `bfloat16`, `affine 4/64`."""
        if self.packing is None:
            return str(self.dtype).rpartition(".")[2]
        return f"{self.packing.mode} {self.packing.bits}/{self.packing.group_size}"


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor: dense as "", or the parts of a packed matrix."""

    parts: Params
    packing: Quantization | None = None

    def values(self) -> mx.array:
        """In float32."""
        if self.packing is None:
            return self.parts[""].astype(mx.float32)
        return dequantize(
            {f"x.{part}": array for part, array in self.parts.items()}, "x", self.packing
        )

    def to(self, form: Form) -> Piece:
        """The same in another form; packed by `mx.quantize`."""
        if form.packing == self.packing:
            parts = {
                part: array if array.dtype in (mx.uint32, mx.uint8) else array.astype(form.dtype)
                for part, array in self.parts.items()
            }
            return Piece(parts, self.packing)
        values = self.values()
        if form.packing is None:
            return Piece({"": values.astype(form.dtype)})
        bits, group_size, mode = form.packing
        if mode == "affine":
            values = values.astype(form.dtype)
        arrays = mx.quantize(values, group_size=group_size, bits=bits, mode=mode)
        return Piece(dict(zip(PARTS, arrays, strict=False)), form.packing)


@dataclass
class Source:
    """Tensors of a family, read when they are needed and forgotten after their last use.

    Args:
        params: as stored, not read yet. Nobody else may hold them.
        uses: how often each tensor is asked for.
        packings: of packed matrices, by name without `.weight`.
        rows: reads the tensors, if params only stand for them.
    """

    params: Params
    uses: dict[str, int]
    packings: dict[str, Quantization]
    rows: GGUFRows | None = None
    _left: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._left = dict(self.uses)

    def form(self, output: Output, floats: mx.Dtype) -> Form:
        """How the members of an output are stored; `floats` are scales that have no float dtype.

        Raises ParamsError if they differ from each other.
        """
        forms = {self._form(member, floats) for member in output.members}
        if len({form.packing for form in forms}) > 1:
            raise ParamsError(
                f"{output.name} stacks experts that are packed differently; choose one packing for "
                "all of them (--quantize, --dequantize, or a rule of the recipe)"
            )
        return max(forms, key=lambda form: form.dtype.size)

    def _form(self, member: str, floats: mx.Dtype) -> Form:
        base = base_of(member)
        packing = self.packings.get(base)
        if packing is None:
            return Form(self.params[member].dtype)
        scales = self.params[f"{base}.scales"].dtype
        return Form(floats if scales == mx.uint8 else scales, packing)

    def pieces(self, output: Output) -> Iterator[Piece]:
        """The rows of an output in order. Raises ParamsError for scales that are no numbers."""
        plain = output.rows is None and not output.swapped and not output.change
        for member in output.members:
            packing = self.packings.get(base_of(member))
            for arrays in self._read(member, plain):
                _check_scales(base_of(member), arrays, packing)
                for plane in _planes(arrays, output):
                    if packing is not None and isinstance(output.shape, Transposed):
                        yield from _rows({"": Piece(plane, packing).values().T}, None)
                    else:
                        yield from _rows(plane, packing)

    def _read(self, member: str, plain: bool) -> Iterator[Params]:
        """A tensor of the family, in parts: whole, or some rows at a time if they may come so."""
        self._left[member] -= 1
        if self.rows is not None:
            yield from self.rows.blocks(member) if plain else [self.rows.whole(member)]
            return
        names = {"": member}
        if (base := base_of(member)) in self.packings:
            names = {part: f"{base}.{part}" for part in PARTS if f"{base}.{part}" in self.params}
        take = self.params.__getitem__ if self._left[member] else self.params.pop
        arrays = {part: take(name) for part, name in names.items()}
        mx.eval(arrays)
        yield arrays


def _check_scales(base: str, arrays: Params, packing: Quantization | None) -> None:
    if packing is None:
        return
    for part in ("scales", "biases"):
        if part in arrays and unfit_scales(arrays[part], packing.group_size).item():
            raise ParamsError(f"{base}.{part}: scales that are no finite numbers")


def _planes(arrays: Params, output: Output) -> Iterator[Params]:
    """The matrices of a tensor, rows first."""
    dense = arrays.get("")
    if dense is not None:
        if output.change == "taps":
            dense = dense.swapaxes(-1, -2)
        elif output.change == "one":
            dense = dense.astype(mx.float32) + 1
        elif output.swapped:
            dense = dense.swapaxes(-1, -2)
        if dense.ndim < 2:
            dense = dense.reshape(1, -1)
        arrays = {"": dense}
    shape = next(iter(arrays.values())).shape
    rows = slice(None) if output.rows is None else slice(*output.rows)
    is_bias = len(output.shape) == 2 and output.rows is not None  # biases of stacked experts
    for place in np.ndindex(shape[:-2]):
        plane = {part: array[place] if place else array for part, array in arrays.items()}
        if is_bias:
            yield {"": plane[""][:, rows]}
        else:
            yield {part: array[rows] for part, array in plane.items()}


def _rows(plane: Params, packing: Quantization | None) -> Iterator[Piece]:
    rows, columns = next(iter(plane.values())).shape
    wide = columns if packing is None else columns * 32 // packing.bits
    step = max(1, _VALUES // max(wide, 1))
    for start in range(0, rows, step):
        yield Piece({part: array[start : start + step] for part, array in plane.items()}, packing)
