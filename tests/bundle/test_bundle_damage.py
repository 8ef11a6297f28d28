"""Whatever is wrong with a bundle is one clear error, before MLX reads anything."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from funcrt.bundle import load_bundle, loader, verify
from funcrt.bundle.format import files
from funcrt.bundle.format.checks import load_manifest
from funcrt.bundle.format.manifest import DIGEST, MANIFEST, Manifest
from funcrt.bundle.format.records import decode, encode
from funcrt.errors import BundleError
from tests.bundle.conftest import Edit, edit_target

import pytest

FILES = [
    MANIFEST,
    DIGEST,
    "params.safetensors",
    "golden/cpu.safetensors",
    "functions/cpu/prepare.mlxfn",
    "functions/cpu/decode_b2_t1_s32.mlxfn",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
]


def refuse(folder: Path, match: str) -> None:
    with pytest.raises(BundleError, match=match) as caught:
        load_bundle(folder)
    assert "\n" not in str(caught.value)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1
    path.write_bytes(content)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("place", [0, 5000, -2])
@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte(copy: Path, name: str, place: int) -> None:
    flip(copy / name, place)
    refuse(copy, "." if name == MANIFEST else "damaged|cannot read|does not match")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_truncated_file(copy: Path, name: str) -> None:
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: len(content) // 2])
    refuse(copy, "damaged|expected")
    (copy / name).unlink()
    refuse(copy, "missing|cannot read")


@pytest.mark.usefixtures("untouched")
def test_other_versions_and_devices(
    copy: Path, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "mlx_version", lambda: "99.1.0")
    made_by = load_manifest(copy).targets["cpu"].producer["mlx"]
    refuse(copy, rf"made by MLX {made_by}, this process runs 99\.1\.0.*pip install mlx=={made_by}")
    monkeypatch.undo()
    edit(
        copy,
        lambda m: edit_target(m, lambda t: replace(t, producer={**t.producer, "mlx": "0.1.2"})),
    )
    refuse(copy, r"pip install mlx==0\.1\.2")


@pytest.mark.usefixtures("untouched")
def test_another_device_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "device_class", lambda: "metal")
    refuse(folder, "has functions for cpu, this process runs on metal")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    "path", ["../escape", "/etc/passwd", "functions/../../x", "a\\b", "", ".", "a//b", "c:x"]
)
def test_paths_stay_inside(copy: Path, path: str) -> None:
    def escape(data: dict[str, Any]) -> None:
        data["files"][path] = data["files"]["tokenizer.json"]

    rewrite(copy, escape)
    refuse(copy, "unsafe file path")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", [*FILES, "functions"])
def test_links_in_a_circle(copy: Path, name: str) -> None:
    (copy / name).rename(copy / "aside")
    (copy / name).symlink_to((copy / name).name)
    refuse(copy, "is missing|cannot read")
    with pytest.raises(BundleError, match=r"is missing|cannot read"):
        verify(copy)


@pytest.mark.usefixtures("untouched")
def test_links_stay_inside(copy: Path) -> None:
    outside = copy.parent / "outside.json"
    (copy / "tokenizer.json").rename(outside)
    (copy / "tokenizer.json").symlink_to(outside)
    refuse(copy, "tokenizer.json is a link out of the bundle")


def test_links_to_and_within_a_bundle_are_fine(copy: Path) -> None:
    (copy / "tokenizer.json").rename(copy / "real.json")
    (copy / "tokenizer.json").symlink_to("real.json")
    link = copy.with_name("link")
    link.symlink_to(copy)
    assert load_bundle(link).tokenizer is not None


@pytest.mark.usefixtures("untouched")
def test_not_a_bundle_at_all(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "is not a folder")
    refuse(tmp_path, "is not a bundle: cannot read manifest.json")
    (tmp_path / MANIFEST).write_text('{"format": "other"}')
    refuse(tmp_path, "expected a manifest of format 'funcrt-bundle', got 'other'")


# --- the manifest --------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON, and its hash with it."""
    data = json.loads((folder / MANIFEST).read_text("utf-8"))
    change(data)
    (folder / MANIFEST).write_text(json.dumps(data), "utf-8")
    digest = files.hash_file(folder / MANIFEST)
    (folder / DIGEST).write_text(f"{digest}  {MANIFEST}\n", "utf-8")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("version", ["1.0", "2.0", "4.0", "0.9", "", None, 3])
def test_another_major_schema_is_refused(copy: Path, version: object) -> None:
    rewrite(copy, lambda data: data.update(schema_version=version))
    refuse(copy, "schema version .* cannot be read, this funcrt reads 3.x: .* export it again")


def test_added_fields_and_functions_are_passed_over(copy: Path) -> None:
    def add(data: dict[str, Any]) -> None:
        data["schema_version"] = "3.7"
        data["novelty"] = {"anything": [1, None]}
        functions = cpu(data)["functions"]
        functions.append({**functions[-1], "name": "shrink"})
        for entry in functions:
            entry["novelty"] = True

    rewrite(copy, add)
    assert load_bundle(copy).manifest.schema_version == "3.7"


def test_golden_calls_of_added_functions_are_passed_over(copy: Path) -> None:
    """And what goes on from their state."""

    def add(data: dict[str, Any]) -> None:
        functions, calls = cpu(data)["functions"], cpu(data)["golden"]["cases"][0]["calls"]
        functions.append({**functions[-1], "name": "shrink"})
        first, *others = ((call["function"], call["tokens"]) for call in calls)
        assert first in others  # what is not known any more is called once more
        calls[0]["function"] = "shrink"

    whole = len(verify(copy))
    rewrite(copy, add)
    checks = verify(copy)
    assert all(check.passed for check in checks)
    assert 0 < len(checks) < whole
    rewrite(copy, lambda data: cpu(data)["functions"].pop())
    refuse(copy, "golden call shrink of .* is not one of the plan")


def cpu(data: dict[str, Any]) -> dict[str, Any]:
    target: dict[str, Any] = data["targets"]["cpu"]
    return target


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no plan": (lambda d: cpu(d).pop("plan"), "targets.cpu has no 'plan'"),
    "plan of text": (lambda d: cpu(d)["plan"].update(batch="2"), "plan.batch: expected a list"),
    "plan of truth": (
        lambda d: cpu(d)["plan"].update(batch=[True]),
        r"batch\[0\]: expected an integer",
    ),
    "plan of nothing": (
        lambda d: cpu(d)["plan"].update(tokens=[]),
        "plan tokens: expected integers",
    ),
    "more plan": (
        lambda d: cpu(d)["plan"]["batch"].append(3),
        "forward_b3_t4_s16 is missing for cpu",
    ),
    "huge plan": (lambda d: cpu(d)["plan"].update(capacity=[2**31]), "expected integers >= 2"),
    "dtype": (lambda d: cpu(d).update(dtype="float8"), "dtype 'float8' is not one of"),
    "vocabulary": (lambda d: d.update(vocab_size=97), "not those that this funcrt calls"),
    "fraction": (lambda d: d.update(vocab_size=96.0), "vocab_size: expected an integer, got 96.0"),
    "no mlx": (lambda d: cpu(d)["producer"].pop("mlx"), "producer.mlx is missing"),
    "no functions": (lambda d: cpu(d).update(functions=[]), "no prepare function"),
    "twice": (lambda d: cpu(d)["functions"].append(cpu(d)["functions"][-1]), "listed twice"),
    "no prepare": (lambda d: cpu(d)["functions"].pop(0), "no prepare function"),
    "device": (lambda d: d["targets"].update(tpu=cpu(d)), "unknown device class 'tpu'"),
    "no targets": (lambda d: d.update(targets={}), "no targets"),
    "other family": (lambda d: d.update(family=3), "family: expected a string, got 3"),
    "size": (lambda d: d["files"]["tokenizer.json"].update(size=-1), "size or sha256"),
    "hash": (lambda d: d["files"]["tokenizer.json"].update(sha256="X" * 64), "size or sha256"),
    "grown": (
        lambda d: next(f for f in cpu(d)["functions"] if f["name"] == "grow").update(grown=64),
        "grow_b2_t1_s16: its inputs and outputs",
    ),
    "shape": (
        lambda d: cpu(d)["functions"][1]["inputs"][0].update(shape=[2, 5]),
        "forward_b2_t4_s16: its inputs and outputs",
    ),
    "unlisted": (lambda d: d["files"].pop("golden/cpu.safetensors"), "used but not among `files`"),
    "cache order": (lambda d: cpu(d)["cache"].pop(0), "must begin with lengths"),
    "cache empty": (lambda d: cpu(d).update(cache=[]), "must begin with lengths"),
    "cache kind": (lambda d: cpu(d)["cache"][1].update(kind="ring"), "cache layers.0.keys: kind"),
    "cache width": (
        lambda d: cpu(d)["cache"][1].update(shape=["B", 2, "S", 0]),
        "cache layers.0.keys",
    ),
    "cache twice": (lambda d: cpu(d)["cache"].append(cpu(d)["cache"][1]), "lists an array twice"),
    "cache dtype": (
        lambda d: cpu(d)["cache"][0].update(dtype="float32"),
        "cache lengths: kind 'row'",
    ),
    "cache axes": (
        lambda d: cpu(d)["cache"][0].update(shape=["B", 2]),
        "cache lengths: kind 'row'",
    ),
    "cache slots": (
        lambda d: cpu(d)["cache"][1].update(shape=["B", "S", 2, 16]),
        "layers.0.keys: .* is not one that this funcrt knows; export the bundle again",
    ),
    "cache fill": (lambda d: cpu(d)["cache"][0].update(fill=-1), "cache lengths: kind 'row'"),
    "no block": (
        lambda d: cpu(d)["functions"].remove(
            next(f for f in cpu(d)["functions"] if f["name"] == "prefill_block")
        ),
        "prefill_block_b2_t4_s16 is missing for cpu: export the bundle again",
    ),
    "no prepared": (lambda d: cpu(d).pop("prepared"), "targets.cpu has no 'prepared'"),
    "golden": (lambda d: cpu(d)["golden"]["cases"][0].update(batch=9), "is not one of the plan"),
    "golden start": (
        lambda d: cpu(d)["golden"]["cases"][0]["calls"][0].update(fresh=False),
        "must begin from a fresh cache",
    ),
}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_contradicts_itself(copy: Path, name: str) -> None:
    change, match = CHANGES[name]
    rewrite(copy, change)
    refuse(copy, match)


@pytest.mark.parametrize("name", ["stored", "prepared"])
def test_weights_that_differ_from_the_list(copy: Path, name: str) -> None:
    def change(data: dict[str, Any]) -> None:
        arrays = data["params"]["stored"] if name == "stored" else cpu(data)["prepared"]
        arrays[0]["shape"][0] += 1

    rewrite(copy, change)
    refuse(copy, "its weights are not those|returns other weights")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}', "\xff", "[" * 100_000, "1" * 9999])
def test_a_manifest_that_is_not_json(copy: Path, text: str) -> None:
    (copy / MANIFEST).write_bytes(text.encode("latin-1"))
    refuse(copy, "damaged|expected a JSON object")


@pytest.mark.usefixtures("untouched")
def test_mutated_manifests_are_refused(copy: Path) -> None:
    sound, chance = (copy / MANIFEST).read_bytes(), random.Random(0)
    for _ in range(200):
        content = bytearray(sound)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        if content == sound:
            continue
        (copy / MANIFEST).write_bytes(content)
        with pytest.raises(BundleError):
            load_bundle(copy)


def test_the_manifest_survives_encoding(folder: Path) -> None:
    manifest = load_manifest(folder)
    assert decode(Manifest, json.loads(json.dumps(encode(manifest))), "m") == manifest


def test_a_folder_replaced_while_it_is_read_is_read_again(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, calls = files.check_files, []

    def replace_first(folder: Path, manifest: Manifest, *rest: Any, **options: Any) -> None:
        if not calls:
            calls.append(1)
            other = copy.with_name("other")
            shutil.copytree(copy, other)
            shutil.rmtree(copy)
            other.rename(copy)
            raise BundleError("a file of the old bundle is gone")
        check(folder, manifest, *rest, **options)

    monkeypatch.setattr(files, "check_files", replace_first)
    assert load_bundle(copy).vocab_size


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("looks", [0, 1])
def test_files_that_go_while_they_are_checked(
    copy: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    real, weights, seen = Path.stat, copy / "params.safetensors", []

    def stat(path: Path, **options: Any) -> Any:
        if path == weights:
            seen.append(path)
            if len(seen) > looks:
                weights.unlink(missing_ok=True)
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(BundleError, match=r"is missing|cannot read"):
        loader.open_bundle(copy)
    assert len(seen) > looks


def test_weights_that_are_cut_after_opening(folder: Path, tmp_path: Path) -> None:
    """One error, and none that is left for whoever evaluates something next."""
    for number in range(12):
        copy = shutil.copytree(folder, tmp_path / f"{number}.funcrt")
        bundle = loader.open_bundle(copy)
        os.truncate(copy / "params.safetensors", 20_000)
        with pytest.raises(BundleError, match="cannot prepare its weights"):
            _ = bundle.prepared
        with pytest.raises(BundleError, match="could not prepare its weights before: load it"):
            _ = bundle.prepared
        load_bundle(folder)


def test_golden_values_that_change_after_loading(copy: Path) -> None:
    bundle = load_bundle(copy)
    flip(copy / "golden/cpu.safetensors", -1)
    with pytest.raises(BundleError, match=r"golden/cpu.safetensors is damaged"):
        verify(bundle)
