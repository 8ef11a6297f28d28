"""Looking at the graph of a model: which primitives it has, and which of them do not export."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from converters.functional.family import ModuleFamily
from funcrt.cache import CacheState, state_size
from funcrt.flat import flatten
from funcrt.model import Model
from funcrt.params import Params

import mlx.core as mx

_CANNOT = re.compile(r"\[export_function\] Unable to \w+( \w+)* primitive (\w+)")
_HELP = {
    "Contiguous": "leave mx.contiguous out: it changes no values",
    "BitwiseInvert": "write `x ^ -1` for `~x` of integers",
    "CustomKernel": "give the kernel a form in MLX operations for every other device",
    "ToFP8": "keep activations in another format: 8-bit floats do not export",
    "FromFP8": "store the weights in another format: 8-bit floats do not export",
    "AllReduce": "make the model without a group: collectives do not export",
    "AllGather": "make the model without a group: collectives do not export",
    "Send": "make the model without a pipeline: collectives do not export",
    "Recv": "make the model without a pipeline: collectives do not export",
    "Compiled": "call the function without mx.compile, or with inputs of one dtype",
}
_BATCH, _CAPACITY = 1, 16


@dataclass(frozen=True)
class Blocker:
    """A primitive that does not export.

    Attributes:
        primitive: its name.
        layer: the innermost module that has it, as far as that is known.
        suggestion: what to do about it.
    """

    primitive: str
    layer: str
    suggestion: str


@dataclass(frozen=True)
class Graph:
    """What a model computes with.

    Attributes:
        primitives: how many of each, in a prompt and in one step.
        blockers: those that do not export; MLX names the first of each graph.
    """

    primitives: dict[str, int]
    blockers: tuple[Blocker, ...]

    @property
    def needs_metal(self) -> bool:
        """Whether it has kernels that only Metal runs."""
        return "CustomKernel" in self.primitives


def inspect_graph(model: Model) -> Graph:
    """The graphs of a prompt and of one step, traced without computing anything."""
    counts: Counter[str] = Counter()
    blockers: dict[str, Blocker] = {}
    for tokens in (4, 1):
        arguments = _arguments(model, tokens)
        flat = flatten(model.forward, *arguments)[0]
        arrays = _leaves(arguments)
        blocked = _export(flat, arrays, counts)
        if blocked is not None and blocked not in blockers:
            layer = _find_layer(model, arguments, blocked)
            help_ = _HELP.get(blocked, f"replace what makes a {blocked} by exportable operations")
            where = f" in {layer}" if layer else ""
            blockers[blocked] = Blocker(
                blocked, layer, f"{blocked}{where} does not export: {help_}"
            )
    return Graph(dict(sorted(counts.items())), tuple(blockers.values()))


_Arguments = tuple[Params, mx.array, mx.array, CacheState]


def _arguments(model: Model, tokens: int) -> _Arguments:
    state = model.init_cache(_BATCH, _CAPACITY)
    mask = mx.zeros((_BATCH, 1, tokens, state_size(state)[1]), mx.bool_)
    return model.params, mx.zeros((_BATCH, tokens), mx.int32), mask, state


def _leaves(arguments: _Arguments) -> list[mx.array]:
    params, tokens, mask, state = arguments
    return [*params.values(), tokens, mask, *state.values()]


def _export(function: Any, arrays: list[mx.array], counts: Counter[str]) -> str | None:
    """Count the primitives of a graph; the name of the first that does not export."""

    def note(item: dict[str, Any]) -> None:
        if item["type"] == "primitive":
            counts[item["name"]] += 1

    try:
        mx.export_function(note, function, *arrays)
    except ValueError as error:
        found = _CANNOT.search(str(error))
        if found is None:
            raise
        counts[found[2]] += 1
        return found[2]
    return None


def _find_layer(model: Model, arguments: _Arguments, primitive: str) -> str:
    """The module that makes the first array that needs the primitive, in the order of calls."""
    if not isinstance(model.family, ModuleFamily):
        return ""
    module: Any = model.family.binding.module
    names = {id(part): name for name, part in module.named_modules()}
    seen: list[str] = []

    def outputs(count: int) -> Any:
        def run(*flat: Any) -> tuple[mx.array, ...]:
            seen.clear()
            found: list[mx.array] = []
            with _watched(module, names, seen, found):
                model.forward(*_rebuild(arguments, flat))
            return tuple(found[:count])

        return run

    arrays = _leaves(arguments)
    low, high = 0, _count(outputs, arrays)
    if _export(outputs(high), arrays, Counter()) is None:
        return ""
    while high - low > 1:  # outputs up to `low` export, those up to `high` do not
        middle = (low + high) // 2
        if _export(outputs(middle), arrays, Counter()) is None:
            low = middle
        else:
            high = middle
    return seen[high - 1]


def _count(outputs: Any, arrays: list[mx.array]) -> int:
    found: list[int] = []

    def run(*flat: Any) -> mx.array:
        found.append(len(outputs(1 << 30)(*flat)))
        return mx.array(0)

    mx.compile(run)(*arrays)
    return found[0]


def _rebuild(arguments: _Arguments, flat: tuple[mx.array, ...]) -> list[Any]:
    params, _, _, state = arguments
    split = len(params)
    return [
        dict(zip(params, flat[:split], strict=True)), flat[split], flat[split + 1],
        dict(zip(state, flat[split + 2 :], strict=True)),
    ]  # fmt: skip


def _outside(name: str) -> str:
    """The module that calls the one of a name, past lists of modules."""
    parts = name.split(".")[:-1]
    while parts and (parts[-1].isdigit() or parts[-1] in ("layers", "h", "blocks", "experts")):
        parts.pop()
    return ".".join(parts)


@contextmanager
def _watched(
    module: Any, names: dict[int, str], seen: list[str], found: list[mx.array]
) -> Iterator[None]:
    """Within it, note what every part of a module returns."""
    kinds = {type(part) for _, part in module.named_modules()}
    originals = {kind: kind.__dict__["__call__"] for kind in kinds if "__call__" in kind.__dict__}

    def watch(original: Any) -> Any:
        def note(name: str, arrays: tuple[Any, ...]) -> None:
            for array in arrays:
                if isinstance(array, mx.array):
                    seen.append(name)
                    found.append(array)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            name = names.get(id(self), "")
            note(_outside(name), args)  # what it is given, its caller has made
            result = original(self, *args, **options)
            note(name, result if isinstance(result, tuple) else (result,))
            return result

        return call

    for kind, original in originals.items():
        kind.__call__ = watch(original)
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__call__ = original
