"""What a conversion did to each tensor."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TensorReport:
    """One tensor of the output.

    Attributes:
        name: without `.weight`.
        shape: dense.
        stored: how it was stored, e.g. `bfloat16`, `affine 4/64` (bits/group size).
        written: how it is stored now.
        nbytes: what it takes now.
        relative_error: Frobenius norm of the change over that of what was read; 0 where no bit
            changed.
        max_error: largest change of a value.
        note: why it is not packed as was asked; empty where there is nothing to say.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    written: str
    nbytes: int
    relative_error: float = 0.0
    max_error: float = 0.0
    note: str = ""

    @property
    def values(self) -> int:
        """How many numbers it stands for."""
        return math.prod(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each of them, scales included."""
        return self.nbytes * 8 / self.values


@dataclass(frozen=True)
class Perplexity:
    """Of one text, before and after, see `measure_perplexity`.

    Attributes:
        tokens: how many were predicted.
    """

    before: float
    after: float
    tokens: int
    window: int
    dtype: str

    @property
    def change(self) -> float:
        """After over before, less 1."""
        return self.after / self.before - 1


@dataclass(frozen=True)
class Report:
    """A whole conversion.

    Attributes:
        relative_error: of all tensors together, weighted by their squares.
        notes: what a person should know of what was read.
    """

    model_type: str
    layers: int
    nbytes: int
    files: int
    relative_error: float
    tensors: tuple[TensorReport, ...]
    notes: tuple[str, ...] = ()
    perplexity: Perplexity | None = None

    @property
    def changed(self) -> list[TensorReport]:
        """Tensors whose values changed, the worst first."""
        found = [tensor for tensor in self.tensors if tensor.relative_error or tensor.max_error]
        return sorted(found, key=lambda tensor: -tensor.relative_error)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each number of the model."""
        return self.nbytes * 8 / sum(tensor.values for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; changed tensors come first, the worst of them before the others."""
        rest = [
            tensor for tensor in self.tensors if not (tensor.relative_error or tensor.max_error)
        ]
        facts = asdict(self)
        facts["bytes"] = facts.pop("nbytes")
        facts["bits_per_weight"] = self.bits_per_weight
        facts["tensors"] = [_plain(tensor) for tensor in [*self.changed, *rest]]
        if self.perplexity is not None:
            facts["perplexity"]["change"] = self.perplexity.change
        return facts


def _plain(tensor: TensorReport) -> dict[str, Any]:
    facts = asdict(tensor)
    facts["bytes"] = facts.pop("nbytes")
    return {**facts, "bits_per_weight": tensor.bits_per_weight}
