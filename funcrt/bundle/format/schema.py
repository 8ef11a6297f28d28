"""The JSON Schema of `manifest.json`, made from the dataclasses that read and write it.

    python -m funcrt.bundle.format.schema [FILE]

writes it to `exported/manifest.schema.json` of this repository. It is for those who write hosts:
this package reads manifests with `records`, by the same types, and `checks` then
compares what a schema cannot. So what the schema refuses is refused here, too; unknown fields and
newer minor versions are let through by both.
"""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from inspect import getdoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from funcrt.bundle.format.manifest import DEVICE_CLASSES, FORMAT, SCHEMA_VERSION, Manifest
from funcrt.params import FLOATS
from funcrt.storage import save_json

FILE = Path(__file__).parents[3] / "exported" / "manifest.schema.json"

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_SIZE = {"minimum": 1, "maximum": 2**31 - 1}
_HASH = {"pattern": "^[0-9a-f]{64}$"}
# What types do not say: keywords by record and field.
_LIMITS: dict[str, dict[str, dict[str, Any]]] = {
    "Manifest": {
        "format": {"const": FORMAT},
        "schema_version": {"pattern": rf"^{SCHEMA_VERSION.split('.')[0]}\.[0-9]{{1,9}}$"},
        "vocab_size": _SIZE,
        "max_positions": _SIZE,
        "targets": {"propertyNames": {"enum": list(DEVICE_CLASSES)}, "minProperties": 1},
        "files": {"propertyNames": {"pattern": r"^(?!/)(?!(.*/)?\.\.?(/|$))[^\\:]+$"}},
    },
    "Target": {
        "producer": {"required": ["mlx"]},
        "dtype": {"enum": list(FLOATS)},
        "cache": {"minItems": 1},
    },
    "BucketPlan": {
        "batch": {"minItems": 1, "items": {"type": "integer", **_SIZE}},
        "tokens": {"minItems": 1, "items": {"type": "integer", **_SIZE}},
        "capacity": {"minItems": 1, "items": {"type": "integer", **_SIZE, "minimum": 2}},
    },
    "FileEntry": {"size": {"minimum": 0}, "sha256": _HASH, "header": _HASH},
    "GoldenCall": {"scale": {"exclusiveMinimum": 0}, "eager": {"minimum": 0}},
    "Golden": {"params_allowed": {"minimum": 0}},
}


def make_schema(kind: Any = Manifest) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a record, with what its docstrings say as descriptions."""
    records: dict[str, Any] = {}
    root = _describe(kind, records)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"manifest.json of a bundle, schema {SCHEMA_VERSION}",
        **root,
        "$defs": dict(sorted(records.items())),
    }


def _describe(kind: Any, records: dict[str, Any]) -> dict[str, Any]:
    """The schema of one type, of those that `records.decode` knows; records go into `records`."""
    if kind is Any:
        return {}
    if kind in _TYPES:
        return {"type": _TYPES[kind]}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return {"type": "array", "items": _describe(arguments[0], records)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _describe(arguments[1], records)}
    if isinstance(kind, UnionType):
        if all(argument in _TYPES for argument in arguments):
            return {"type": [_TYPES[argument] for argument in arguments]}
        return {"anyOf": [_describe(argument, records) for argument in arguments]}
    if kind.__name__ not in records:
        records[kind.__name__] = _describe_record(kind, records)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _describe_record(kind: Any, records: dict[str, Any]) -> dict[str, Any]:
    hints, limits = get_type_hints(kind), _LIMITS.get(kind.__name__, {})
    text, notes = _read_docstring(kind)
    properties = {
        name: {
            **({"description": notes[name]} if name in notes else {}),
            **_describe(hint, records),
            **limits.get(name, {}),
        }
        for name, hint in hints.items()
    }
    optional = {
        field.name
        for field in (fields(kind) if is_dataclass(kind) else ())
        if field.default is not MISSING
    }
    return {
        "description": text,
        "type": "object",
        "properties": properties,
        "required": [name for name in hints if name not in optional],
    }


def _read_docstring(kind: Any) -> tuple[str, dict[str, str]]:
    """What a docstring says of a record, and of its fields."""
    text, _, rest = (getdoc(kind) or "").partition("\n\nA")  # "Attributes:" or "Args:"
    section = rest.partition("\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w.*?): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return _one_line(text), {
        name: _one_line(note) for names, note in entries for name in names.split(", ")
    }


def _one_line(text: str) -> str:
    return re.sub(r"\bNone\b", "null", " ".join(text.split()))


def main(arguments: list[str]) -> None:
    """Write the schema to a file."""
    save_json(Path(arguments[0]) if arguments else FILE, make_schema())


if __name__ == "__main__":
    main(sys.argv[1:])
