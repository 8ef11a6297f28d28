"""A module whose parameters come from a dict for the time of a call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
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

    Args:
        module: left as it was found after every use, whatever happened.
        dense_kinds: kinds of layers with packed weights, and their dense equivalents.

    Attributes:
        packed: name -> layer with packed weights (affine) that can be a dense one.
    """

    def __init__(self, module: Module, dense_kinds: Mapping[type, type] | None = None) -> None:
        self.module = module
        self._dense_kinds = dense_kinds or {}
        self.packed: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._places: dict[str, tuple[Any, Any]] = {}
        self._constants: list[tuple[Any, Any, mx.array]] = []
        self._find(module, "", set())
        # In row order: constants in another one would be exported silently wrong.
        self._rows = [mx.contiguous(value) for _, _, value in self._constants]
        mx.eval(self._rows)

    def _find(self, tree: Any, prefix: str, seen: set[int]) -> None:
        if id(tree) in seen:
            return
        seen.add(id(tree))
        affine = getattr(tree, "mode", "affine") == "affine"
        if type(tree) in self._dense_kinds and affine and dict.get(tree, "biases") is not None:
            self.packed[prefix.removesuffix(".")] = tree
        for key, value in _items(tree):
            if isinstance(tree, Module) and str(key).startswith("_"):
                if isinstance(value, mx.array):
                    self._constants.append((tree, key, value))
                continue
            if isinstance(value, mx.array):
                if not isinstance(tree, tuple):
                    self._places[f"{prefix}{key}"] = (tree, key)
            elif isinstance(value, (dict, list, tuple)):
                self._find(value, f"{prefix}{key}.", seen)

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
                self.replace(params)
                for part, kind in kinds:
                    part.__class__ = self._dense_kinds[kind]
                for (tree, key, value), rows in zip(self._constants, self._rows, strict=True):
                    if dict_get(tree, key) is value:
                        _put(tree, key, rows)
                yield self.module
            finally:
                for part, kind in kinds:
                    part.__class__ = kind
                _restore(saved)


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
