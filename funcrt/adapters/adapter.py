"""What an adapter is, and whether it fits a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from funcrt.errors import ParamsError, some_of
from funcrt.packing import Transposed, check_packed
from funcrt.params import Params

import mlx.core as mx

if TYPE_CHECKING:
    from funcrt.model import Model


class Change(NamedTuple):
    """What is added to a matrix `[O, I]`, or to each of a stack of X: B A.

    Attributes:
        a: `[r, I]` or `[X, r, I]`.
        b: `[O, r]` or `[X, O, r]`, any scale included.
        magnitude: `[O]`, the length that each row of the sum is then given (DoRA,
            arXiv:2402.09353 §4); None leaves it.
    """

    a: mx.array
    b: mx.array
    magnitude: mx.array | None = None


@dataclass(frozen=True)
class Adapter:
    """A fine-tune, as far as it differs from its base.

    Attributes:
        name: what errors call it.
        changes: by the matrix that each one changes (without `.weight`).
        whole: tensors that take the place of the base's.
        notes: what a person should know of it, one sentence each.
    """

    name: str
    changes: Mapping[str, Change]
    whole: Params = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def misfits(model: Model, name: str, change: Change) -> list[str]:
    """Why a change cannot be that of the matrix `name`."""
    params, a, b = model.params, change.a, change.b
    stored = f"{name}.weight" if f"{name}.weight" in params else name
    if stored not in params:
        return [f"{name}: the base has no such matrix"]
    expected = (*a.shape[:-2], b.shape[-2], a.shape[-1])
    if f"{name}.scales" in params:
        if check_packed(name, expected, params):
            return [f"{name}: changes {list(expected)}, which the packed matrix does not hold"]
    else:
        shape: tuple[int, ...] = params[stored].shape
        if isinstance(model.spec.get(stored), Transposed):
            shape = (*shape[:-2], shape[-1], shape[-2])
        if shape != expected:
            return [f"{name}: changes {list(expected)}, but the base has {list(shape)}"]
    if change.magnitude is not None and change.magnitude.shape != expected[:-1]:
        return [f"{name}: magnitudes {list(change.magnitude.shape)} for {list(expected[:-1])} rows"]
    return []


def whole_tensors(model: Model, adapter: Adapter) -> Params:
    """Whole tensors of an adapter, in the dtypes of those that they replace."""
    problems = []
    for name, array in adapter.whole.items():
        base = model.params.get(name)
        if base is None or f"{name.removesuffix('.weight')}.scales" in model.params:
            what = "no such tensor" if base is None else "it packed, so it cannot be replaced"
            problems.append(f"{name}: the base has {what}")
        elif base.shape != array.shape:
            problems.append(f"{name}: {list(array.shape)}, but the base has {list(base.shape)}")
    refuse(adapter, problems)
    return {name: array.astype(model.params[name].dtype) for name, array in adapter.whole.items()}


def refuse(adapter: Adapter, problems: Sequence[str]) -> None:
    """Raise ParamsError if there are problems, naming the first of them."""
    if problems:
        listed = some_of(sorted(problems), separator="; ")  # files are read in any order
        raise ParamsError(f"adapter {adapter.name} does not fit this base: {listed}")
