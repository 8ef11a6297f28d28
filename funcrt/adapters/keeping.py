"""Changes that stay beside the matrices of a model, as params of their own."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from funcrt.adapters.adapter import Adapter, Change, misfits, refuse, whole_tensors
from funcrt.errors import ParamsError
from funcrt.low_rank import LORA_A, LORA_B, is_low_rank
from funcrt.packing import packed_shape
from funcrt.params import Params, ParamSpec

import mlx.core as mx

if TYPE_CHECKING:
    from funcrt.model import Model


def init_adapter(
    model: Model, rank: int, matrices: Collection[str] | None = None, seed: int = 0
) -> Adapter:
    """An adapter that changes nothing yet, to be trained: A is random and B is zero.

    A is drawn uniformly from ±1 / sqrt(I), float32.

    Args:
        model: the base.
        rank: r.
        matrices: their names without `.weight`, or the last parts of these (`q_proj`); None takes
            every matrix that can have changes for each row of a batch.
        seed: of A.

    Raises:
        ParamsError: a rank below 1, or a name that no matrix ends in.
    """
    if rank < 1:
        raise ParamsError(f"rank: expected at least 1, got {rank}")
    places = model.family.adaptable(model.config)
    names = [n for n in _matrices(model.spec) if n in places.shared]
    if matrices is None:
        wanted = [name for name in names if name in places.by_row]
    else:
        wanted = [name for name in names if _ends(name, matrices)]
        if missing := [end for end in matrices if not any(_ends(name, [end]) for name in names)]:
            raise ParamsError(f"no matrix that can be adapted is called {', '.join(missing)}")
    changes = {}
    for name, key in zip(wanted, mx.random.split(mx.random.key(seed), len(wanted)), strict=True):
        outputs, inputs = _matrices(model.spec)[name]
        bound = 1 / math.sqrt(inputs)
        a = mx.random.uniform(-bound, bound, (rank, inputs), key=key)
        changes[name] = Change(a, mx.zeros((outputs, rank)))
    return Adapter("new", changes)


def _ends(name: str, ends: Collection[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)


def _matrices(spec: ParamSpec) -> dict[str, tuple[int, int]]:
    """`[O, I]` of every matrix, by its name without `.weight`."""
    found = {}
    for name, shape in spec.items():
        if len(shape) == 2:
            outputs, inputs = packed_shape(shape)
            found[name.removesuffix(".weight")] = (outputs, inputs)
    return found


def keep(model: Model, adapter: Adapter) -> Model:
    """The model with an adapter's changes beside its matrices, for all rows of a batch.

    Its params have two more tensors for each change, float32 (see `funcrt.low_rank`), in place of
    any that it had before. The base stays as it is, packed or not, and `mx.grad` with respect to
    those tensors alone trains the adapter.

    Raises:
        ParamsError: changes that do not fit, or of matrices that cannot have one beside them.
    """
    refuse(adapter, _only_fused(adapter))
    return _with(model, [adapter], many=False)


def stack(model: Model, adapters: Sequence[Adapter]) -> Model:
    """The model with many adapters, of which every row of a batch takes its own.

    The cache state then has `adapter`, int32 `[B]`: 0 is the model itself, as in an empty state,
    and i the i-th of `adapters`. Ranks are filled up to the largest with zeros, which change
    nothing.

    Raises:
        ParamsError: no adapter, changes that do not fit, or of matrices that cannot have one for
            each row; whole tensors.
    """
    if not adapters:
        raise ParamsError("stack: expected at least one adapter")
    for adapter in adapters:
        refuse(adapter, [*_only_fused(adapter), *_unplaced(adapter)])
    return _with(model, adapters, many=True)


def fit(adapters: Adapter | Sequence[Adapter], shapes: Mapping[str, Sequence[int]]) -> Params:
    """The tensors of adapters for a model or a bundle that has places for some already.

    Args:
        adapters: one, where all rows share it; or a sequence, as `stack` takes it.
        shapes: names and shapes of all stored tensors, as in `bundle.stored_shapes`.

    Returns:
        A tensor for each name in `shapes` that is one of an adapter; zeros for what is not changed.

    Raises:
        ParamsError: a change without a place, or of a higher rank than there is place for.
    """
    given = [adapters] if isinstance(adapters, Adapter) else list(adapters)
    places = {name: tuple(shape) for name, shape in shapes.items() if is_low_rank(name)}
    many = any(len(shape) == 3 for shape in places.values())
    room = max((shape[0] - 1 for shape in places.values()), default=0) if many else 1
    if len(given) > room:
        raise ParamsError(f"there is place for {room} adapters, got {len(given)}")
    for adapter in given:
        unfit = [p for n, change in adapter.changes.items() for p in _unfit(n, change, places)]
        refuse(adapter, [*_only_fused(adapter), *_unplaced(adapter), *unfit])
    return _fill(given, places)


def _unfit(name: str, change: Change, places: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Why a change does not fit into its place."""
    if name + LORA_A not in places:
        return [f"{name}: there is no place for a change of it"]
    rank, inputs = places[name + LORA_A][-2:]
    outputs = places[name + LORA_B][-2]
    found = (change.b.shape[-2], change.a.shape[-1])
    if found != (outputs, inputs):
        return [f"{name}: changes {list(found)}, there is place for {[outputs, inputs]}"]
    if change.a.shape[-2] > rank:
        return [f"{name}: of rank {change.a.shape[-2]}, there is place for {rank}"]
    return []


def _halves(name: str, change: Change) -> Params:
    return {name + LORA_A: change.a, name + LORA_B: change.b}


def _only_fused(adapter: Adapter) -> list[str]:
    problems = []
    for name, change in adapter.changes.items():
        if change.magnitude is not None:
            problems.append(f"{name}: is scaled (DoRA), which can only be fused")
        elif change.a.ndim != 2:
            problems.append(f"{name}: is a stack of experts, whose changes can only be fused")
    return problems


def _unplaced(adapter: Adapter) -> list[str]:
    return [f"{name}: is whole, and not a change of low rank" for name in adapter.whole]


def _with(model: Model, adapters: Sequence[Adapter], *, many: bool) -> Model:
    known = model.family.adaptable(model.config)
    possible = known.by_row if many else known.shared
    ranks: dict[str, int] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for adapter in adapters:
        problems = [p for n, change in adapter.changes.items() for p in misfits(model, n, change)]
        what = "a change for each row" if many else "a change beside it"
        problems += [
            f"{name}: cannot have {what}, fuse the adapter instead"
            for name in adapter.changes
            if name not in possible
        ]
        refuse(adapter, problems)
        for name, change in adapter.changes.items():
            ranks[name] = max(ranks.get(name, 0), change.a.shape[0])
            sizes[name] = (change.b.shape[0], change.a.shape[1])
    lead = (1 + len(adapters),) if many else ()
    places: dict[str, tuple[int, ...]] = {}
    for name, (outputs, inputs) in sizes.items():
        places[name + LORA_A] = (*lead, ranks[name], inputs)
        places[name + LORA_B] = (*lead, outputs, ranks[name])
    made = _fill(adapters, places)
    mx.eval(made)
    base = {name: array for name, array in model.params.items() if not is_low_rank(name)}
    whole = {
        name: array for adapter in adapters for name, array in whole_tensors(model, adapter).items()
    }
    notes = tuple(note for adapter in adapters for note in adapter.notes)
    return model.with_params({**base, **whole, **made}, (*model.notes, *notes))


def _fill(adapters: Sequence[Adapter], places: Mapping[str, tuple[int, ...]]) -> Params:
    """Each adapter's tensors with zeros up to the shapes that there is place for, float32."""
    parts = [
        {
            part: array
            for name, c in adapter.changes.items()
            for part, array in _halves(name, c).items()
        }
        for adapter in adapters
    ]
    filled = {}
    for name, shape in places.items():
        arrays = [_enlarge(part.get(name), shape[-2:]) for part in parts]
        if len(shape) == 3:
            more = shape[0] - 1 - len(arrays)
            nothing = mx.zeros(shape[-2:])
            filled[name] = mx.stack([nothing, *arrays, *[nothing] * more])
        else:
            filled[name] = arrays[0] if arrays else mx.zeros(shape)
    return filled


def _enlarge(array: mx.array | None, shape: tuple[int, ...]) -> mx.array:
    if array is None:
        return mx.zeros(shape)
    wider = [(0, new - old) for new, old in zip(shape, array.shape, strict=True)]
    return mx.pad(array.astype(mx.float32), wider)
