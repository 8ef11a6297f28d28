"""Thousands of damaged bundles, hashes made to fit: each is one clear error, or as good as before.

Hashes find accidents before anything else does, so here they are written anew after every change;
what is tried are the checks behind them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from funcrt.bundle import Bundle, load_bundle, load_manifest, verify
from funcrt.bundle.format.files import hash_file, hash_header
from funcrt.bundle.format.manifest import DIGEST, MANIFEST, FileEntry
from funcrt.bundle.format.records import encode
from funcrt.bundle.loader import open_bundle
from funcrt.bundle.weights import load_stored
from funcrt.cache.layout import slot_axis
from funcrt.errors import BundleError, FuncrtError, ParamsError, SourceError
from tests.bundle.mutations import mangle, mutate, mutate_file

import pytest
from safetensors import SafetensorError, deserialize

PARAMS = "params.safetensors"
COUNT = 2000


@pytest.fixture
def damaged(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy.funcrt"))


def write_manifest(folder: Path, text: bytes) -> None:
    put(folder / MANIFEST, text)
    put(folder / DIGEST, f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode())


def put(path: Path, content: bytes) -> None:
    """A new file: some file systems wait for the disk when an old one is overwritten."""
    path.unlink()
    path.write_bytes(content)


def line_of(error: FuncrtError) -> str:
    line = str(error)
    assert line.isprintable()
    assert line
    return line


def try_to_open(folder: Path) -> Bundle | str:
    """The bundle, or the one line that says why not; anything else fails the test."""
    try:
        bundle = open_bundle(folder)
        _ = bundle.eos_token_ids, bundle.weight_bytes, bundle.stored_shapes  # what engines read
        return bundle
    except (BundleError, ParamsError, SourceError) as error:
        return line_of(error)


# --- the manifest --------------------------------------------------------------------------------


def facts(bundle: Bundle) -> Any:
    """What decides what a bundle computes.

    Graphs take prepared weights and the cache by position: names only have to say what kind of
    array one is. What stands in slots that hold nothing does not matter.
    """
    target = bundle.target
    cache = [
        (entry.kind, entry.shape, entry.dtype, slot_axis(entry.name) is None and entry.fill)
        for entry in bundle.cache_spec
    ]
    return (
        bundle.vocab_size, bundle.dtype, bundle.plan, cache,
        [(spec.shape, spec.dtype) for spec in target.prepared],
        bundle.manifest.params.stored, bundle.tokenizer,
        {key: (entry.inputs, entry.state, entry.outputs, entry.grown, entry.params)
         for key, entry in target.step_functions().items()},
        {key: hashlib.sha256(graph).hexdigest() for key, graph in bundle._graphs.items()},
    )  # fmt: skip


def test_mutated_manifests(tiny: Path, damaged: Path) -> None:
    text = (tiny / MANIFEST).read_bytes()
    expected = facts(open_bundle(tiny))
    refused = 0
    for seed in range(COUNT):
        chance = random.Random(seed)
        if seed % 4:
            tree = json.loads(text)
            for _ in range(chance.choice([1, 1, 1, 3])):
                mutate(tree, chance)
            changed = json.dumps(tree).encode()
        else:
            changed = mangle(text, chance)
        write_manifest(damaged, changed)
        opened = try_to_open(damaged)
        if isinstance(opened, str):
            refused += 1
        elif facts(opened) != expected:
            assert not is_sound(damaged), f"seed {seed}"
    assert COUNT // 2 < refused < COUNT  # most are harm, some are not


def test_names_of_what_goes_by_position_are_labels(tiny: Path, damaged: Path) -> None:
    """What `facts` leaves out: bundles without it compute what was recorded."""
    data = json.loads((tiny / MANIFEST).read_text())
    target = data["targets"]["cpu"]
    for spec in target["prepared"]:
        spec["name"] += ".renamed"
    for entry in target["cache"][1:]:
        entry |= {"name": entry["name"].replace("layers.0", "layers.7"), "fill": 7}
    write_manifest(damaged, json.dumps(data).encode())
    bundle = open_bundle(damaged)
    assert bundle.cache_spec != open_bundle(tiny).cache_spec
    assert facts(bundle) == facts(open_bundle(tiny))
    assert is_sound(damaged)


def is_sound(folder: Path) -> bool:
    """Whether a bundle computes what was recorded; what opens need not, where names changed."""
    try:
        return all(check.passed for check in verify(folder, write=False))
    except BundleError as error:
        return not line_of(error)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", [MANIFEST, DIGEST, PARAMS])
def test_pipes_are_not_read(damaged: Path, name: str) -> None:
    """Whoever opened one would wait for a writer."""
    (damaged / name).unlink()
    os.mkfifo(damaged / name)
    with pytest.raises(BundleError, match=r"is not a file|is missing"):
        load_bundle(damaged)


@pytest.mark.parametrize("where", ["format", "schema_version", "family", "model", "novelty"])
def test_deep_nesting(damaged: Path, where: str) -> None:
    """What is parsed just so must not be too deep for whoever shows or copies it."""
    text = json.dumps({**json.loads((damaged / MANIFEST).read_text()), where: 0})
    for depth in [*range(900, 1000, 7), 10_000, 1_000_000]:
        deep = f'"{where}": {"[" * depth}{"]" * depth}'
        write_manifest(damaged, text.replace(f'"{where}": 0', deep).encode())
        assert isinstance(try_to_open(damaged), str) or where == "novelty"


@pytest.mark.usefixtures("untouched")
def test_a_plan_of_more_shapes_than_memory_holds(damaged: Path) -> None:
    data = json.loads((damaged / MANIFEST).read_text())
    data["targets"]["cpu"]["plan"] = {
        name: list(range(2, 5002)) for name in ("batch", "tokens", "capacity")
    }
    write_manifest(damaged, json.dumps(data).encode())
    assert "more shapes than there are functions" in str(try_to_open(damaged))


# --- weights -------------------------------------------------------------------------------------


def values_by_others(content: bytes) -> dict[str, tuple[Any, bytes]] | None:
    """What the format's own library reads; None where it refuses."""
    try:
        found = deserialize(content)
    except (SafetensorError, ValueError):
        return None
    return {name: (entry["shape"], bytes(entry["data"])) for name, entry in found}


def test_mutated_weights(tiny: Path, damaged: Path) -> None:
    """Opened only if the format's own library reads the same from the file."""
    content, data = (tiny / PARAMS).read_bytes(), json.loads((tiny / MANIFEST).read_text())
    manifest = load_manifest(tiny)
    opened = 0
    for seed in range(COUNT):
        changed = mutate_file(content, random.Random(seed))
        put(damaged / PARAMS, changed)
        if seed % 20 == 0:  # the whole way; what comes before the weights finds nothing wrong
            entry = FileEntry(
                len(changed), hash_file(damaged / PARAMS), hash_header(damaged / PARAMS)
            )
            data["files"][PARAMS] = encode(entry)
            write_manifest(damaged, json.dumps(data).encode())
            bundle = try_to_open(damaged)
            assert isinstance(bundle, Bundle) or PARAMS in bundle or "its weights" in bundle
        try:
            ours = load_stored(damaged, manifest)
        except BundleError as error:
            line_of(error)
            continue
        opened += 1
        others = values_by_others(changed)
        assert others is not None, f"seed {seed}"
        for name, array in ours.items():
            assert (list(array.shape), bytes(memoryview(array))) == others.pop(name), f"seed {seed}"
        assert not others, f"seed {seed}"
    assert 0 < opened < COUNT // 5


# --- graphs --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_damaged_graphs_never_reach_mlx(tiny: Path, damaged: Path) -> None:
    """Which crashes on them: fifty, each changed in another way."""
    graphs = sorted(path.relative_to(tiny) for path in tiny.rglob("*.mlxfn"))
    for seed in range(50):
        chance = random.Random(seed)
        name, other = chance.sample(graphs, 2)
        content = (tiny / name).read_bytes()
        match seed % 5:
            case 0:
                changed = content[: chance.randrange(len(content))]
            case 1:
                changed = content + bytes(chance.randint(1, 100))
            case 2:
                changed = (tiny / other).read_bytes()
            case 3:
                changed = chance.randbytes(len(content))
            case _:
                changed = bytearray(content)
                changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (damaged / name).write_bytes(changed)
        with pytest.raises(BundleError, match=f"{name.name} is damaged"):
            load_bundle(damaged)
        (damaged / name).write_bytes(content)
