"""A module whose parameters come from a dict for the time of a call."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from funcrt.params import Params

import mlx.core as mx
from mlx.nn.layers.base import Module

_OPAQUE = (type, mx.array, str, bytes, int, float, complex, bool, type(None))


class Binding:
    """The parameters of a module, by name, and the way to put others in their place.

    Layers with packed weights also take dense ones: where a dict has no scales for one, it is a
    dense layer for the time of the call.

    Arrays that are no parameters are constants, wherever attributes, dicts, lists and tuples lead.
    Those that only a closure, a bound method, a `functools.partial`, a deque or `__slots__` hold
    are not seen: MLX exports them wrong unless they are in row order, and what a call does to them
    stays.

    Args:
        module: left as it was found after every use, whatever happened.
        dense_kinds: kinds of layers with packed weights, and their dense equivalents.

    Attributes:
        packed: name -> layer with packed weights that can be a dense one.
    """

    def __init__(self, module: Module, dense_kinds: Mapping[type, type] | None = None) -> None:
        self.module = module
        self._dense_kinds = dense_kinds or {}
        self.packed: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._places: dict[str, tuple[Any, Any]] = {}
        self._find(module, "", set())
        # In row order: constants in another one would be exported silently wrong. Kept with what
        # they are made of, whose id would be given away otherwise.
        self._rows = {id(array): (array, mx.contiguous(array)) for array in self._constants()}
        mx.eval([rows for _, rows in self._rows.values()])

    def _find(self, tree: Any, prefix: str, seen: set[int]) -> None:
        if id(tree) in seen:
            return
        seen.add(id(tree))
        if type(tree) in self._dense_kinds and _is_expandable(tree):
            self.packed[prefix.removesuffix(".")] = tree
        for key, value in _items(tree):
            if isinstance(tree, Module) and str(key).startswith("_"):
                continue  # MLX takes none of these for parameters
            if isinstance(value, mx.array):
                if not isinstance(tree, tuple):
                    self._places[f"{prefix}{key}"] = (tree, key)
            elif isinstance(value, (dict, list, tuple)):
                self._find(value, f"{prefix}{key}.", seen)

    def _constants(self) -> Iterator[mx.array]:
        places = {(id(tree), key) for tree, key in self._places.values()}
        for thing, content, attributes in _save(self.module):
            held = [value for key, value in _items(content) if (id(thing), key) not in places]
            yield from _arrays([*held, *(attributes or {}).values()])

    def params(self) -> Params:
        """The module's parameters as they are now."""
        return {name: dict_get(tree, key) for name, (tree, key) in self._places.items()}

    def replace(self, params: Mapping[str, mx.array]) -> None:
        """Give the module other parameters for good."""
        for name, (tree, key) in self._places.items():
            if name in params:
                _put(tree, key, params[name])
            else:
                dict.pop(tree, key)  # scales and biases of what is dense now

    @contextmanager
    def bound(self, params: Mapping[str, mx.array]) -> Iterator[Module]:
        """The module with `params` in it; what it was is restored at the end."""
        with self._lock:
            saved = _save(self.module)
            dense = [part for name, part in self.packed.items() if f"{name}.scales" not in params]
            kinds = [(part, type(part)) for part in dense]
            try:
                _renew_arrays(saved, self._rows)
                for part, _, _ in saved:
                    if isinstance(part, Module):
                        part.__dict__["_training"] = False  # dropout is drawn anew in every call
                # Handles of their own: what a module does in place must not reach the caller's.
                self.replace({name: array[...] for name, array in params.items()})
                for part, kind in kinds:
                    part.__class__ = self._dense_kinds[kind]
                yield self.module
            finally:
                for part, kind in kinds:
                    part.__class__ = kind
                _restore(saved)


def _is_expandable(layer: Any) -> bool:
    """Whether a layer's scales, and biases if it is affine, are all that its values hang on."""
    affine = getattr(layer, "mode", "affine") == "affine"
    return (dict.get(layer, "biases") is not None) == affine and (
        getattr(layer, "global_scale", None) is None
    )


def dict_get(tree: Any, key: Any) -> mx.array:
    """An entry, past what a module does in `__getitem__`."""
    value: mx.array = dict.__getitem__(tree, key) if isinstance(tree, dict) else tree[key]
    return value


def _put(tree: Any, key: Any, value: mx.array) -> None:
    if isinstance(tree, dict):
        dict.__setitem__(tree, key, value)
    else:
        tree[key] = value


def _items(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, dict):
        return list(dict.items(tree))
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    return []


# --- what a call may have changed -----------------------------------------------------------------

_Saved = list[tuple[Any, Any, "dict[str, Any] | None"]]


def _arrays(values: Iterable[Any]) -> Iterator[mx.array]:
    """The arrays among `values`, and those in tuples among them."""
    for value in values:
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, tuple):
            yield from _arrays(value)


def _renew_arrays(saved: _Saved, rows: Mapping[int, tuple[mx.array, mx.array]]) -> None:
    """Put handles that nobody else has in the place of all arrays; in row order where known."""
    made: dict[int, Any] = {}  # the same one in every place of the same one

    def renew(value: Any) -> Any:
        if id(value) not in made:
            if isinstance(value, mx.array):
                made[id(value)] = rows.get(id(value), (value, value))[1][...]
            else:
                parts = [renew(part) if _holds(part) else part for part in value]
                kind = type(value)
                made[id(value)] = kind._make(parts) if hasattr(kind, "_make") else kind(parts)
        return made[id(value)]

    for thing, content, attributes in saved:
        for key, value in _items(content):
            if _holds(value):
                _put(thing, key, renew(value))
        for key, value in (attributes or {}).items():
            if _holds(value):
                thing.__dict__[key] = renew(value)


def _holds(value: Any) -> bool:
    return any(True for _ in _arrays([value]))


def _save(root: Any) -> _Saved:
    """Every container and object that is reached from `root`, with what it holds."""
    saved: _Saved = []
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, _OPAQUE) or id(thing) in seen or callable_only(thing):
            continue
        seen.add(id(thing))
        content: Any = None
        if isinstance(thing, dict):
            content = dict(thing)
            waiting += content.values()
        elif isinstance(thing, list):
            content = list(thing)
            waiting += content
        elif isinstance(thing, (tuple, set, frozenset)):
            waiting += thing
            content = set(thing) if isinstance(thing, set) else None
        attributes = getattr(thing, "__dict__", None)
        attributes = dict(attributes) if isinstance(attributes, dict) else None
        if attributes is not None:
            waiting += attributes.values()
        saved.append((thing, content, attributes))
    return saved


def callable_only(thing: Any) -> bool:
    """Whether it is a function or a module of Python, whose globals are nobody's state."""
    return type(thing).__name__ in ("function", "builtin_function_or_method", "module", "method")


def _restore(saved: _Saved) -> None:
    for thing, content, attributes in saved:
        if isinstance(thing, dict):
            if list(dict.items(thing)) != [] or content:
                dict.clear(thing)
                dict.update(thing, content)
        elif isinstance(thing, list):
            thing[:] = content
        elif isinstance(thing, set):
            thing.clear()
            thing.update(content)
        if attributes is not None:
            thing.__dict__.clear()
            thing.__dict__.update(attributes)
