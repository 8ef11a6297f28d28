"""More in a bundle that is there: buckets, device classes, a new export of what is in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import converters
from funcrt.buckets import BucketPlan
from funcrt.bundle import (
    export,
    exporter,
    extend,
    graphs,
    load_bundle,
    load_manifest,
    loader,
    refresh,
    verify,
)
from funcrt.bundle import refreshed as records
from funcrt.bundle.format import files
from funcrt.bundle.format.checks import save_manifest
from funcrt.bundle.format.manifest import CERTIFICATE, DIGEST, MANIFEST, Target
from funcrt.errors import BundleError, CapacityError, ParamsError
from funcrt.model import Model
from tests.bundle.conftest import PLAN, SMALL, Edit, edit_target
from tests.helpers import TOLERANCE, make_model, random_tokens, relative_error

import mlx.core as mx
import numpy as np
import pytest

TOKENS = random_tokens(6)
ABOUT = {MANIFEST, DIGEST, CERTIFICATE}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def call_all(folder: Path) -> list[list[float]]:
    """What a bundle says of a few tokens."""
    values: Any = load_bundle(folder)(TOKENS)[0].tolist()
    return list(values)


@pytest.fixture
def elsewhere(copy: Path, edit: Edit) -> Path:
    """The bundle as if it came from a machine with another device class and another MLX."""

    def move(target: Target) -> Target:
        return replace(target, producer={**target.producer, "mlx": "0.1.2"})

    edit(copy, lambda manifest: edit_target(manifest, move))
    manifest = load_manifest(copy)
    functions = copy / "functions"
    (functions / "cpu").rename(functions / "metal")
    (copy / "golden" / "cpu.safetensors").rename(copy / "golden" / "metal.safetensors")
    target = manifest.targets["cpu"]
    moved = replace(
        target,
        functions=tuple(
            replace(entry, file=entry.file.replace("/cpu/", "/metal/"))
            for entry in target.functions
        ),
        golden=replace(target.golden, file="golden/metal.safetensors"),
    )
    save_manifest(
        copy, replace(manifest, targets={"metal": moved}, files=files.describe_files(copy))
    )
    return copy


# --- buckets -------------------------------------------------------------------------------------


def test_buckets_are_added_and_the_rest_stays(copy: Path) -> None:
    before, digest = contents(copy), load_bundle(copy).digest
    more = BucketPlan(batch=(3,), tokens=(8,), capacity=(16,))
    bundle = extend(copy, more)
    after = contents(copy)
    assert bundle.plan == BucketPlan(batch=(2, 3), tokens=(4, 8), capacity=(16, 32))
    assert bundle.folder == copy
    assert bundle.digest != digest
    # The recorded calls cover the new functions, so they are of another file.
    same = {*before} - ABOUT - {"golden/cpu.safetensors"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert "functions/cpu/decode_b3_t1_s32.mlxfn" in after
    assert all(check.passed for check in verify(copy))
    traced = {row.function for row in bundle.target.report.functions}  # type: ignore[union-attr]
    assert traced == {
        entry.key for entry in bundle.target.functions if entry.bucket and entry.bucket.batch == 3
    }


def test_a_capacity_between_others_changes_what_the_smaller_grows_to(copy: Path) -> None:
    bundle = extend(copy, BucketPlan(batch=(2,), tokens=(8,), capacity=(24,)))
    grown = {e.bucket.capacity: e.grown for e in bundle.target.functions if e.grown and e.bucket}
    assert grown == {16: 24, 24: 32}
    functions = bundle.functions
    state = functions.grow(functions.grow(functions.init_cache(2, 16)))
    assert state["layers.0.keys"].shape[2] == 32


def test_a_bundle_in_use_is_not_changed(copy: Path) -> None:
    bundle = load_bundle(copy)
    weights = (copy / "params.safetensors").stat()
    extend(copy, BucketPlan(batch=(2,), tokens=(8,), capacity=(24,)))
    assert (copy / "params.safetensors").stat().st_ino == weights.st_ino  # one copy
    assert bundle(TOKENS)[0].shape[1] == len(TOKENS)
    assert bundle.plan == PLAN


def test_only_the_same_model_is_added(copy: Path) -> None:
    before = contents(copy)
    with pytest.raises(BundleError, match="exported from another model: expected fingerprint"):
        extend(copy, SMALL, model=make_model("float32", seed=9))
    with pytest.raises(BundleError, match=r"exported for cpu with dtype float32, .* got bfloat16"):
        extend(copy, SMALL, dtype="bfloat16")
    with pytest.raises(BundleError, match=r"exported for cpu with kv_bits None, .* got 8"):
        extend(copy, SMALL, kv_bits=8)
    assert contents(copy) == before


def test_shapes_that_no_machine_could_try(copy: Path) -> None:
    before = contents(copy)
    with pytest.raises(CapacityError, match=r"the cache takes \d+\.\d GB.*: declare smaller ones"):
        extend(copy, BucketPlan(batch=(2,), tokens=(8,), capacity=(2**31 - 1,)))
    assert contents(copy) == before


def test_a_bundle_that_is_replaced_meanwhile(copy: Path, model: Model) -> None:
    def replace_it(done: int, total: int, item: str) -> None:
        if item == "verify prepare":
            data = json.loads((copy / MANIFEST).read_text())
            (copy / MANIFEST).write_text(json.dumps(data))

    with pytest.raises(BundleError, match="was replaced while this added to it: do it again"):
        extend(copy, BucketPlan(batch=(2,), tokens=(8,), capacity=(24,)), replace_it)
    assert "functions/cpu/decode_b2_t1_s24.mlxfn" not in contents(copy)


def test_longer_calls_of_rings_export_everything_again(tmp_path: Path) -> None:
    model = converters.load(
        Path(__file__).parents[1] / "reference/families/mistral-window", "float32"
    )
    folder = tmp_path / "ring.funcrt"
    first = export(model, folder, BucketPlan(batch=(1,), tokens=(4,), capacity=(64,)))
    assert "ring" in {array.kind for array in first.target.cache}
    bundle = extend(folder, BucketPlan(batch=(1,), tokens=(8,), capacity=(64,)))
    assert bundle.target.layout.max_tokens == 8
    assert len(bundle.target.report.functions) == len(bundle.target.functions)  # type: ignore[union-attr]


# --- another machine -----------------------------------------------------------------------------


def test_a_device_class_is_added_beside_another(elsewhere: Path) -> None:
    before = contents(elsewhere)
    with pytest.raises(BundleError, match=r"has functions for metal, .* runs on cpu: .*--refresh"):
        load_bundle(elsewhere)
    bundle = extend(elsewhere)
    assert [*bundle.manifest.targets] == ["metal", "cpu"]
    assert bundle.plan == bundle.manifest.targets["metal"].plan
    after = contents(elsewhere)
    assert {n: after[n] for n in before if n not in ABOUT} == {
        n: c for n, c in before.items() if n not in ABOUT
    }
    assert all(check.passed for check in verify(elsewhere))


def test_refresh_for_another_mlx(copy: Path, folder: Path, edit: Edit) -> None:
    def age(target: Target) -> Target:
        return replace(target, producer={**target.producer, "mlx": "0.1.2"})

    edit(copy, lambda manifest: edit_target(manifest, age))
    old = b"a graph of another version"
    (graph := copy / "functions/cpu/prepare.mlxfn").write_bytes(old)
    edit(copy, lambda manifest: manifest)
    with pytest.raises(BundleError, match=r"made by MLX 0\.1\.2, .*mlx==0\.1\.2, or .*--refresh"):
        load_bundle(copy)
    with pytest.raises(BundleError, match=r"has graphs of MLX 0\.1\.2.*first .*--refresh"):
        extend(copy, SMALL)
    bundle = load_bundle(copy, refresh=True)
    assert bundle.target.producer["mlx"] == graphs.mlx_version()
    assert graph.read_bytes() != old
    assert call_all(copy) == call_all(folder)
    assert bundle.tokenizer is not None


def test_refresh_while_loading_with_other_weights(copy: Path, edit: Edit, folder: Path) -> None:
    """What is exported again, and recorded, is the bundle's own model."""

    def age(target: Target) -> Target:
        return replace(target, producer={**target.producer, "mlx": "0.1.2"})

    own = load_manifest(folder).fingerprint
    other = make_model("float32", seed=4)
    edit(copy, lambda manifest: edit_target(manifest, age))
    bundle = load_bundle(copy, params=other.params, refresh=True)
    assert bundle.fingerprint == other.fingerprint
    assert load_bundle(copy).fingerprint == own
    assert all(check.passed for check in verify(copy))


def test_refresh_leaves_other_device_classes(elsewhere: Path) -> None:
    before = contents(elsewhere)
    bundle = refresh(elsewhere)
    assert bundle.manifest.targets["metal"].producer["mlx"] == "0.1.2"
    after = contents(elsewhere)
    assert {n: after[n] for n in before if "metal" in n} == {
        n: c for n, c in before.items() if "metal" in n
    }


def test_a_sound_bundle_is_not_exported_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("exported again")

    monkeypatch.setattr(exporter, "refresh", fail)
    assert load_bundle(folder, refresh=True).vocab_size


def test_a_failed_refresh_leaves_the_bundle(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise BundleError("the exported functions are wrong")

    before = contents(elsewhere)
    monkeypatch.setattr(exporter, "verify_elsewhere", fail)
    with pytest.raises(BundleError, match="are wrong"):
        load_bundle(elsewhere, refresh=True)
    assert contents(elsewhere) == before
    assert [path.name for path in elsewhere.parent.iterdir()] == [elsewhere.name]


@pytest.mark.parametrize("family", [None, "a-family-of-tomorrow"])
def test_a_model_whose_code_is_elsewhere(copy: Path, edit: Edit, family: str | None) -> None:
    edit(copy, lambda manifest: replace(manifest, family=family))
    made_by = load_manifest(copy).targets["cpu"].producer["mlx"]
    with pytest.raises(BundleError, match=rf"not part of this funcrt.*pip install mlx=={made_by}"):
        refresh(copy)


def test_the_error_of_a_module_names_the_version(
    copy: Path, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(copy, lambda manifest: replace(manifest, family=None))
    monkeypatch.setattr(loader, "mlx_version", lambda: "99.1.0")
    with pytest.raises(
        BundleError, match=r"pip install mlx==.*, or export it again from its check"
    ):
        load_bundle(copy)


# --- digest and weights --------------------------------------------------------------------------


def test_only_the_expected_bundle_is_loaded(copy: Path, edit: Edit) -> None:
    digest = load_bundle(copy).digest
    assert digest == files.hash_file(copy / MANIFEST)
    assert load_bundle(copy, expected_digest=digest.upper()).digest == digest
    edit(copy, lambda manifest: replace(manifest, max_positions=7))  # hashes that fit
    load_bundle(copy)
    with pytest.raises(BundleError, match=f"not the bundle that was expected: .*{digest}"):
        load_bundle(copy, expected_digest=digest)


def test_what_was_made_of_the_expected_bundle_is_loaded(copy: Path, edit: Edit) -> None:
    def age() -> str:
        made_by = {"mlx": "0.1.2"}
        edit(copy, lambda m: edit_target(m, lambda target: replace(target, producer=made_by)))
        return files.hash_file(copy / MANIFEST)

    digest = age()
    refreshed = load_bundle(copy, expected_digest=digest, refresh=True).digest
    assert refreshed != digest
    assert load_bundle(copy, expected_digest=digest, refresh=True).digest == refreshed
    with pytest.raises(BundleError, match="not the bundle that was expected"):
        load_bundle(copy, expected_digest=digest)  # nobody said that it may be another
    refresh(copy, expected_digest=digest)  # once more: what came of it in two steps
    load_bundle(copy, expected_digest=digest, refresh=True)
    age()  # by somebody else
    before = contents(copy)
    with pytest.raises(BundleError, match="not the bundle that was expected"):
        load_bundle(copy, expected_digest=digest, refresh=True)
    with pytest.raises(BundleError, match="not the bundle that was expected"):
        refresh(copy, expected_digest=digest)
    assert contents(copy) == before


@pytest.mark.parametrize("text", ["", "[[]]", "{}", '["../x", 1]'])
def test_a_damaged_record_of_what_was_made(own_cache: Path, text: str) -> None:
    digest = "0" * 64
    records.remember_refreshed(digest, "1" * 64)
    assert records.find_refreshed(digest) == {digest, "1" * 64}
    (own_cache / "refreshed" / f"{digest}.json").write_text(text, "utf-8")
    assert records.find_refreshed(digest) == {digest}
    assert records.find_refreshed("../x") == {"../x"}


@pytest.fixture(scope="module")
def bare(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without weights."""
    folder = tmp_path_factory.mktemp("bare") / "bare.funcrt"
    export(model, folder, SMALL, weights=False)
    return folder


def test_a_bundle_without_weights(bare: Path, folder: Path, model: Model) -> None:
    assert {path.name for path in bare.iterdir()} <= {*ABOUT, "functions", "golden"} | {
        name for name in load_manifest(bare).files if "/" not in name
    }
    assert not [name for name in load_manifest(bare).files if "params" in name]
    with pytest.raises(BundleError, match="exported without weights: give some"):
        load_bundle(bare)
    mine = load_bundle(folder)
    for params in (
        folder / "params.safetensors",
        [str(folder / "params.safetensors")],
        folder,
        model.params,
    ):
        bundle = load_bundle(bare, params=params)
        assert bundle.fingerprint == model.fingerprint
        assert relative_error(bundle(TOKENS)[0][0], mine(TOKENS)[0][0]) <= TOLERANCE


def test_weights_that_do_not_fit(bare: Path, folder: Path, model: Model, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"nothing: the bundle has no such tensor"):
        load_bundle(bare, params={"nothing": mx.zeros(3)})
    few = dict(list(model.params.items())[:3])
    with pytest.raises(
        BundleError, match="some weights are not given, and it was exported without"
    ):
        load_bundle(bare, params=few)
    with pytest.raises(ParamsError, match="does not exist"):
        load_bundle(bare, params=tmp_path / "absent.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"12345678" * 9)
    with pytest.raises(ParamsError, match=r"truncated|not a"):
        load_bundle(bare, params=tmp_path / "x.safetensors")
    with pytest.raises(ParamsError, match="came in an earlier file already"):
        load_bundle(bare, params=[folder / "params.safetensors"] * 2)


def test_other_weights_when_loading(folder: Path) -> None:
    other = make_model("float32", seed=4)
    bundle = load_bundle(folder, params=other.params)
    assert relative_error(bundle(TOKENS)[0][0], other(TOKENS)[0][0]) <= TOLERANCE
    assert bundle.fingerprint == other.fingerprint


@pytest.mark.parametrize("value", [np.ones(64, np.float32), [1.0] * 64, None])
def test_only_arrays_of_mlx_are_weights(folder: Path, value: Any) -> None:
    got = rf"got {type(value).__module__}\.{type(value).__qualname__}"
    with pytest.raises(ParamsError, match=rf"norm\.weight: expected an mlx\.core\.array, {got}"):
        load_bundle(folder, params={"model.norm.weight": value})


def test_a_bundle_without_weights_is_extended_with_some(
    bare: Path, folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bare, tmp_path / "copy.funcrt"))
    more = BucketPlan(batch=(2,), tokens=(8,), capacity=(24,))
    with pytest.raises(BundleError, match="exported without weights: give some"):
        extend(copy, more)
    before = contents(copy)
    other = make_model("float32", seed=4).params
    for change in (lambda: extend(copy, more, params=other), lambda: refresh(copy, params=other)):
        with pytest.raises(BundleError, match="not those that it was exported with"):
            change()
    assert contents(copy) == before
    bundle = extend(copy, more, params=folder)
    assert bundle.plan.capacity == (16, 24)
    assert not list(copy.rglob("params*"))


@pytest.mark.parametrize("run", [extend, refresh])
def test_not_a_bundle(tmp_path: Path, run: Callable[..., object]) -> None:
    with pytest.raises(BundleError, match="is not a bundle"):
        run(tmp_path)
