"""The published JSON Schema: it is the one of this code, and stricter than this code nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from funcrt.bundle.format import schema
from funcrt.bundle.format.checks import read_manifest
from funcrt.errors import BundleError
from tests.bundle.conftest import Exports

import pytest
from jsonschema import Draft202012Validator

REFERENCE = Path(__file__).parents[2] / "exported" / "reference.funcrt"
VALIDATOR = Draft202012Validator(schema.make_schema())
Path_ = tuple[str | int, ...]
Change = Callable[[dict[str | int, Any], str | int], object]


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_bytes())


def is_readable(data: Any, folder: Path) -> bool:
    """Whether this package reads a manifest."""
    (folder / "manifest.json").write_text(json.dumps(data))
    try:
        read_manifest(folder)
    except BundleError:
        return False
    return True


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every place of a JSON value, of a list only the first."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def changed(data: Any, path: Path_, change: Change) -> Any:
    """A copy in which something was done to the item at `path`."""
    data = deepcopy(data)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return data


def put(value: Any) -> Change:
    return lambda holder, key: holder.__setitem__(key, value)


CHANGES: dict[str, Change] = {
    "gone": lambda holder, key: holder.pop(key),
    "null": put(None),
    "text": put("../x"),
    "-1": put(-1),
    "1.5": put(1.5),
    "true": put(True),
    "empty list": put([]),
    "list": put([[]]),
    "object": put({"x": {}}),
}


def test_the_committed_file_is_what_the_generator_makes(tmp_path: Path) -> None:
    schema.main([str(tmp_path / "made.json")])
    assert (tmp_path / "made.json").read_text("utf-8") == schema.FILE.read_text("utf-8"), (
        "run `python -m funcrt.bundle.format.schema`, and look at the change: another field may be "
        "added, but one that goes or changes needs another major version of the schema"
    )
    Draft202012Validator.check_schema(schema.make_schema())


@pytest.mark.parametrize("kind", ["float32", "affine", "bfloat16"])
def test_exported_manifests_are_valid(exports: Exports, kind: str) -> None:
    VALIDATOR.validate(read(exports(kind)[1]))


def test_every_field_is_described_by_its_type() -> None:
    """Nothing in a record is left open but what a model's config holds."""
    records = schema.make_schema()["$defs"]
    assert {"Manifest", "Target", "FunctionEntry", "FileEntry", "GoldenCall"} <= set(records)
    for name, record in records.items():
        assert record["description"], name
        for field in record["properties"].values():
            assert {"type", "anyOf", "$ref"} & set(field), name
    assert records["FunctionEntry"]["properties"]["grown"] == {
        "description": "capacity of the state that `grow` returns.",
        "type": ["integer", "null"],
    }
    assert "primitives" not in records["FunctionEntry"]["required"]


def test_newer_minor_versions_and_added_fields_pass(tmp_path: Path) -> None:
    data = read(REFERENCE)
    data |= {"schema_version": "3.12", "invented": {"a": 1}}
    data["targets"]["cpu"] |= {"invented": None}
    data["targets"]["cpu"]["functions"][1] |= {"invented": []}
    data["files"]["params.safetensors"] |= {"invented": 0.5}
    VALIDATOR.validate(data)
    assert is_readable(data, tmp_path)


@pytest.mark.parametrize("version", ["2.0", "4.0", "30.0", "3", "3.x", "v3.0", 3.0, None])
def test_other_major_versions_are_refused_by_both(tmp_path: Path, version: object) -> None:
    data = {**read(REFERENCE), "schema_version": version}
    assert not VALIDATOR.is_valid(data)
    assert not is_readable(data, tmp_path)


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_schema_refuses_is_refused_here(tmp_path: Path, name: str) -> None:
    data = read(REFERENCE)
    refused = 0
    for path in places(data):
        if path[0] == "model":  # loaders need not understand it
            continue
        damaged = changed(data, path, CHANGES[name])
        if not VALIDATOR.is_valid(damaged):
            refused += 1
            assert not is_readable(damaged, tmp_path), path
    assert refused >= 20
