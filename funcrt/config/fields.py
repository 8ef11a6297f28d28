"""Typed fields of a frozen config, each with its key in a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from funcrt.errors import ConfigError

_ABSENT: Any = object()
_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}


def setting(key: str, default: Any = _ABSENT, *, least: int = 1) -> Any:
    """A dataclass field that is read from `key` of a config.json.

    Args:
        key: its name there.
        default: its value where config.json leaves it out; without one it is required.
        least: of a whole number.
    """
    metadata = {"key": key, "least": least}
    if default is _ABSENT:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def hf_keys(kind: type) -> dict[str, str]:
    """Field -> key in a config.json, for those fields of a dataclass that have one."""
    return {f.name: f.metadata["key"] for f in dataclasses.fields(kind) if "key" in f.metadata}


def read_fields(kind: type, hf: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all fields that `hf` has, of the annotated type.

    Raises ConfigError naming a key that is absent but required, or a value of another type.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        key = field.metadata.get("key")
        if key is None:
            continue
        expected = _types(kind)[field.name]
        if hf.get(key) is None and field.default is dataclasses.MISSING:
            raise ConfigError(f"config.json has no {key!r}")
        if key in hf:
            value = False if hf[key] is None and expected is bool else hf[key]  # null is off
            values[field.name] = convert(key, value, expected)
    return values


def check_fields(config: Any) -> None:
    """Raise ConfigError unless every field holds a value of its type, whole numbers large enough.

    Whole numbers have to fit an int32. Values are put into their form as `settle` does.
    """
    settle(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least = field.metadata.get("least", 1)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and not least <= value < 1 << 31:
            size = "a positive int32" if least == 1 else f"an int32 from {least} up"
            raise ConfigError(f"config {field.name}: expected {size}, got {value!r}")


def settle(config: Any) -> None:
    """Bring the fields of a new frozen dataclass into the form that `from_dict` gives them.

    Equal configs are then written alike, 32.0 and never 32, and have one fingerprint.

    Raises ConfigError as `convert` does.
    """
    kind: Any = type(config)
    for field in dataclasses.fields(config):
        value = convert(field.name, getattr(config, field.name), _types(kind)[field.name])
        object.__setattr__(config, field.name, value)  # as __init__ of a frozen one does


def convert(name: str, value: Any, expected: Any) -> Any:
    """`value` in the form that frozen configs hold: lists as tuples, whole numbers as floats.

    Raises ConfigError unless it is of the `expected` type; numbers must be finite.
    """
    if typing.get_origin(expected) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(expected) if kind is not type(None)]
        return None if value is None else convert(name, value, kinds[0])
    if typing.get_origin(expected) is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(convert(name, item, typing.get_args(expected)[0]) for item in value)
        raise ConfigError(f"config {name}: expected a list, got {value!r}")
    if dataclasses.is_dataclass(expected) and isinstance(value, Mapping):
        return from_dict(typing.cast(type, expected), value)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    fits = isinstance(value, expected) and (expected is not int or not isinstance(value, bool))
    if not fits or (expected is float and not math.isfinite(value)):
        raise ConfigError(
            f"config {name}: expected {_WORDS.get(expected, expected.__name__)}, got {value!r}"
        )
    return value


def from_dict(kind: type, data: Mapping[str, Any]) -> Any:
    """The dataclass of plain JSON values. Raises ConfigError for missing or unknown fields."""
    try:
        return kind(**{key: convert(key, value, _types(kind)[key]) for key, value in data.items()})
    except (KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"model config does not have the expected fields: {error}") from None


@lru_cache
def _types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
