"""JSON to frozen dataclasses and back, with errors that say where. Unknown keys are passed over.

Strings and keys that are decoded are printable, so every message that names one is one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from funcrt.errors import BundleError, InputError
from funcrt.storage import parse_strictly

_SCALARS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object. Raises BundleError for anything else, and what `parse_strictly` raises for."""
    try:
        data = parse_strictly(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where} is damaged: {error}") from None
    if not isinstance(data, dict):
        raise BundleError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return data


def encode(value: Any) -> Any:
    """Plain JSON values of (nested) dataclasses, named tuples, tuples and dicts."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: encode(item) for name, item in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {name: encode(item) for name, item in value.items()}
    return value


def decode(kind: Any, value: Any, where: str) -> Any:
    """The inverse of `encode`.

    Args:
        kind: a dataclass, named tuple, `tuple[X, ...]`, `dict[str, X]`, union, scalar or Any.
        value: parsed JSON.
        where: names the value in errors.

    Raises:
        BundleError: a missing key or a value of another kind.
    """
    if kind is Any:
        return value
    if kind in _SCALARS:
        return _decode_scalar(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            _fail(where, "a list", value)
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            _fail(where, "an object", value)
        for key in value:
            _decode_scalar(str, key, where)
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(kind, UnionType):
        return _decode_union(arguments, value, where)
    return _decode_record(kind, value, where)


def _decode_scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        _fail(where, _SCALARS[kind], value)
    if isinstance(value, str) and not value.isprintable():
        _fail(where, "text without control characters", value)
    return value


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    chosen = next((kind for kind in kinds if type(value) is kind), kinds[0])
    return decode(chosen, value, where)


def _decode_record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        _fail(where, "an object", value)
    values: dict[str, Any] = {}
    for name, (hint, is_optional) in _fields_of(kind).items():
        if name in value:
            values[name] = decode(hint, value[name], f"{where}.{name}")
        elif not is_optional:
            raise BundleError(f"{where} has no {name!r}")
    try:
        return kind(**values)
    except InputError as error:
        raise BundleError(f"{where}: {error}") from None


@cache
def _fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Type of every field of a record, and whether it may be left out."""
    optional = {
        field.name
        for field in (fields(kind) if is_dataclass(kind) else ())
        if field.default is not MISSING
    }
    return {name: (hint, name in optional) for name, hint in get_type_hints(kind).items()}


def _fail(where: str, expected: str, value: Any) -> NoReturn:
    if isinstance(value, (dict, list)):
        shown = "an object" if isinstance(value, dict) else "a list"
    else:
        shown = json.dumps(value)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    raise BundleError(f"{where}: expected {expected}, got {shown}")
