"""`flatten`: the flat positional form of a pure function, which `mx.export_function` needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from funcrt.errors import InputError

import mlx.core as mx

FlatFunction = Callable[..., tuple[mx.array, ...]]


def flatten(f: Callable[..., Any], *example: Any) -> tuple[FlatFunction, list[str], list[str]]:
    """A function of arrays only, with names for its inputs and outputs.

    Args:
        f: pure function of arrays and nested dicts, lists and tuples of them.
        example: one positional argument each, as `f` will be called. Only structure, shapes and
            dtypes matter; nothing is evaluated.

    Returns:
        `(flat_function, input_names, output_names)`. `flat_function(*arrays)` returns a tuple of
        arrays. Names are dotted paths that begin with the parameter's name
        (`params.model.norm.weight`, `cache_state.lengths`); a dict keeps the order of the example.
        Outputs are named by the fields of a NamedTuple, otherwise `output`, or by index in a tuple.

    Raises:
        InputError: a leaf that is not an array, or a call with another number of arrays.
    """
    names = _parameter_names(f, len(example))
    inputs = [
        leaf for name, tree in zip(names, example, strict=True) for leaf in _leaves(tree, name)
    ]
    outputs = list(_leaves(f(*example), None))

    def flat_function(*arrays: mx.array) -> tuple[mx.array, ...]:
        if len(arrays) != len(inputs):
            raise InputError(f"flat function: expected {len(inputs)} arrays, got {len(arrays)}")
        left = iter(arrays)
        result = f(*(_rebuild(tree, left) for tree in example))
        return tuple(array for _, array in _leaves(result, None))

    return flat_function, [name for name, _ in inputs], [name for name, _ in outputs]


def _parameter_names(f: Callable[..., Any], count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(f).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}.{i}" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    if len(names) < count:
        raise InputError(
            f"flatten: the function takes {len(names)} arguments, got {count} examples"
        )
    return names[:count]


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    if isinstance(tree, dict):
        return [(str(key), child) for key, child in tree.items()]
    if isinstance(tree, (list, tuple)):
        return list(zip(getattr(tree, "_fields", map(str, range(len(tree)))), tree, strict=True))
    return None


def _leaves(tree: Any, name: str | None) -> Iterator[tuple[str, mx.array]]:
    children = _children(tree)
    if children is not None:
        for key, child in children:
            yield from _leaves(child, key if name is None else f"{name}.{key}")
    elif isinstance(tree, mx.array):
        yield name or "output", tree
    else:
        raise InputError(
            f"flatten: expected arrays in dicts, lists and tuples, "
            f"got {type(tree).__name__} at {name or 'the output'}"
        )


def _rebuild(tree: Any, arrays: Iterator[mx.array]) -> Any:
    if isinstance(tree, dict):
        return {key: _rebuild(child, arrays) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_rebuild(child, arrays) for child in tree]
    if isinstance(tree, tuple):
        children = [_rebuild(child, arrays) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    return next(arrays)
