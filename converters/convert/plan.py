"""What is written for each tensor, settled from names, shapes and dtypes before any is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from converters.convert.layout import Output, family_layout, mlx_layout, shares
from converters.convert.matrices import Form, Source
from converters.convert.recipe import Recipe, Target
from converters.convert.sources import Opened
from converters.convert.writer import Entry
from funcrt.errors import InputError
from funcrt.packing import Quantization, packed_shape
from funcrt.params import FLOATS, Params, cast

import mlx.core as mx


@dataclass(frozen=True)
class Step:
    """One tensor: how it is stored, how it will be, and why not otherwise."""

    output: Output
    stored: Form
    written: Form
    note: str = ""

    @property
    def entries(self) -> list[Entry]:
        """The arrays that are written."""
        return self.written.entries(self.output)

    @property
    def is_copy(self) -> bool:
        """Whether the values stay the same, bit for bit."""
        return self.stored == self.written and self.output.change != "one"


def make_plan(opened: Opened, recipe: Recipe, dtype: str | None) -> tuple[Source, list[Step]]:
    """What to read, and the steps in order.

    Args:
        opened: the params are taken from its model.
        recipe: what becomes of matrices.
        dtype: of floating leaves; None keeps theirs.

    Raises:
        InputError: a rule that decides nothing, or differs within a stack of experts.
        ParamsError: experts that are packed differently from each other and should stay so.
    """
    model, rows, before = opened
    family, packed = family_layout(model)
    recipe.check(name for output in family if output.packable for name in output.matrices)
    targets = {n: _target(recipe, n, before) for output in family for n in output.matrices}
    any_packed = any(_is_packed(output, targets[output.base], packed) for output in family)
    outputs = mlx_layout(model, family) if any_packed else family
    params = dict(model.params)
    model.params.clear()  # so that a tensor is gone once it is written
    source = Source(params, shares(outputs), packed, rows)
    floats = FLOATS[dtype] if dtype else common_dtype(params)
    return source, [_step(source, output, targets, recipe, dtype, floats) for output in outputs]


def common_dtype(params: Params) -> mx.Dtype:
    """The float dtype that most values, or their scales, are stored in."""
    counts: Counter[mx.Dtype] = Counter()
    for array in params.values():
        if array.dtype in FLOATS.values():
            counts[array.dtype] += array.size
    return counts.most_common(1)[0][0] if counts else mx.bfloat16


def quantization_settings(steps: Iterable[Step]) -> dict[str, object]:
    """The `quantization` of config.json: the commonest packing, and the matrices that differ."""
    found = {
        step.output.base: step.written.packing for step in steps if step.written.packing is not None
    }
    if not found:
        return {}
    weights: Counter[Quantization] = Counter()
    for step in steps:
        if step.written.packing is not None:
            weights[step.written.packing] += math.prod(step.output.shape)
    common = weights.most_common(1)[0][0]
    others = {name: packing._asdict() for name, packing in found.items() if packing != common}
    return {"quantization": {**common._asdict(), **others}}


def _target(recipe: Recipe, name: str, before: Mapping[str, Quantization]) -> Target:
    rule = recipe.rule_for(name)
    target = recipe.otherwise if rule is None else rule.target
    return before.get(name, target) if target == "keep" else target


def _is_packed(output: Output, target: Target, packed: dict[str, Quantization]) -> bool:
    if isinstance(target, Quantization) and output.packable:
        return not _misfit(output, target)
    return output.base in packed and target != "dense"


def _misfit(output: Output, packing: Quantization) -> str:
    columns = packed_shape(output.shape)[-1]
    if columns % packing.group_size:
        return f"{columns} columns are no multiple of the group size {packing.group_size}"
    return ""


def _step(
    source: Source,
    output: Output,
    targets: dict[str, Target],
    recipe: Recipe,
    dtype: str | None,
    floats: mx.Dtype,
) -> Step:
    stored = source.form(output, floats)
    wanted = {targets[name] for name in output.matrices}
    if len(wanted) > 1:
        raise InputError(
            f"the recipe packs members of {output.base} differently; they are one stack, so a rule "
            f"must match all of them or none (like {_glob(output.matrices)!r})"
        )
    target, note = wanted.pop(), ""
    if isinstance(target, Quantization) and (
        not output.packable or (note := _misfit(output, target))
    ):
        target = "keep"
    packing = stored.packing if target == "keep" else None if target == "dense" else target
    return Step(output, stored, Form(_dtype(output, stored, dtype), packing), note)


def _dtype(output: Output, stored: Form, dtype: str | None) -> mx.Dtype:
    if dtype is None:
        return stored.dtype
    # What must stay exact is not cast, see `cast`.
    name = output.members[0]
    return cast({name: mx.zeros((), stored.dtype)}, dtype)[name].dtype


def _glob(names: tuple[str, ...]) -> str:
    return ".*.".join([names[0].split(".0.")[0], names[0].rsplit(".", 1)[-1]])
