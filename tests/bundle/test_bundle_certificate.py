"""Certificates hold for one manifest, one device and one MLX, and are never taken for more."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from funcrt import machine
from funcrt.bundle import Bundle, export, load_bundle, verify
from funcrt.bundle.format.checks import load_manifest
from funcrt.bundle.proof import certificate, verifier
from funcrt.bundle.proof.certificate import (
    Certificate,
    Check,
    find_certificate,
    load_certificate,
    make_certificate,
    save_certificate,
)
from funcrt.errors import BundleError
from funcrt.model import Model
from funcrt.storage import load_arrays, save_arrays, save_json
from funcrt.user_cache import write_atomically
from tests.bundle.conftest import SMALL, Edit
from tests.helpers import make_model

import mlx.core as mx
import pytest

GOOD = Check("prepare", "error", 0.5, 1.0, eager=0.5)
BAD = Check("decode_b1_t1_s16", "tokens", math.inf, 0.0, note="why")
DIGEST = "d" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "funcrt" / "certificates"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def make(*checks: Check, **changes: Any) -> Certificate:
    made = Certificate(
        DIGEST, {"a.bin": "0" * 64}, "cpu", "a device", "1.2.3", "0.1", "2026-01-01T00:00:00+00:00",
        1.5, checks or (GOOD,),
    )  # fmt: skip
    return replace(made, **changes)


def refuse_to_write_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only disk, which the administrator cannot have by permissions."""

    def write(path: Path, text: str) -> bool:
        return folder not in path.parents and write_atomically(path, text)

    monkeypatch.setattr(certificate, "write_atomically", write)


# --- the file -------------------------------------------------------------------------------------


def test_it_says_what_it_holds_for_and_what_was_measured(folder: Path) -> None:
    manifest = load_manifest(folder)
    made = make_certificate(manifest, DIGEST, "cpu", [GOOD, BAD], 1.23456)
    data = made.to_json()
    assert list(data) == [
        "format", "version", "passed", "manifest", "files", "target", "device", "mlx", "funcrt",
        "date", "seconds", "checks",
    ]  # fmt: skip
    assert data["format"] == "funcrt-certificate"
    assert data["version"] == "1.0"
    assert data["passed"] is False
    assert data["files"] == {name: entry.sha256 for name, entry in manifest.files.items()}
    assert data["device"] == machine.device_name()
    assert data["mlx"] == mx.__version__
    assert data["date"].endswith("+00:00")
    assert data["checks"] == [
        {"function": "prepare", "check": "error", "measured": 0.5, "allowed": 1.0, "eager": 0.5,
         "note": "", "passed": True},
        {"function": "decode_b1_t1_s16", "check": "tokens", "measured": None, "allowed": 0.0,
         "eager": None, "note": "why", "passed": False},
    ]  # fmt: skip


@pytest.mark.parametrize("checks", [(GOOD,), (GOOD, BAD), (replace(GOOD, measured=1, eager=None),)])
def test_it_comes_back_as_it_was(place: Path, checks: tuple[Check, ...]) -> None:
    saved = save_certificate(place, make(*checks))
    assert saved.path == place / "certificate.json"
    assert load_certificate(saved.path) == saved
    assert [path.name for path in place.iterdir()] == ["certificate.json"]


def test_nothing_checked_is_not_passed(place: Path) -> None:
    assert not make(checks=()).passed
    assert not save_certificate(place, make(checks=())).passed


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda data: "",
    "half": lambda data: json.dumps(data)[:100],
    "no object": lambda data: [data],
    "another format": lambda data: {**data, "format": "funcrt-bundle"},
    "another version": lambda data: {**data, "version": "2.0"},
    "no version": lambda data: {k: v for k, v in data.items() if k != "version"},
    "no checks": lambda data: {k: v for k, v in data.items() if k != "checks"},
    "checks that are none": lambda data: {**data, "checks": {}},
    "a check that is none": lambda data: {**data, "checks": [3]},
    "a check without a number": lambda data: {**data, "checks": [{"function": "f", "check": "c"}]},
    "a limit that is none": lambda data: {**data, "checks": [{**GOOD.to_json(), "allowed": None}]},
    "no manifest": lambda data: {k: v for k, v in data.items() if k != "manifest"},
    "files that are none": lambda data: {**data, "files": ["a"]},
    "a device that is none": lambda data: {**data, "device": 3},
    "a failure that passed": lambda data: {**data, "checks": [BAD.to_json()]},
    "a pass that failed": lambda data: {**data, "passed": False},
    "passed by words": lambda data: {**data, "passed": "yes"},
    "no number": lambda data: json.dumps(data).replace("1.5", "NaN"),
    "deep": lambda data: "[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_counts_as_none(place: Path, damage: str) -> None:
    path = place / "certificate.json"
    changed = DAMAGE[damage](make().to_json())
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    assert find_certificate(place, DIGEST) is None
    with pytest.raises(BundleError, match=r"certificate\.json"):
        load_certificate(path)


def test_what_is_no_text_counts_as_none(place: Path) -> None:
    path = place / "certificate.json"
    assert find_certificate(place, DIGEST) is None
    path.write_bytes(b"\xff\xfe\x00")
    assert find_certificate(place, DIGEST) is None
    path.unlink()
    path.mkdir()
    assert find_certificate(place, DIGEST) is None
    assert find_certificate(place / "missing", DIGEST) is None


def test_fields_of_later_versions_are_passed_over(place: Path) -> None:
    data = {**make().to_json(), "version": "1.7", "more": {}}
    data["checks"][0]["unit"] = "share"
    save_json(place / "certificate.json", data)
    found = find_certificate(place, DIGEST)
    assert found is not None
    assert found.passed


# --- finding and keeping --------------------------------------------------------------------------


def test_it_holds_for_one_manifest_device_and_mlx(place: Path) -> None:
    saved = save_certificate(place, make())
    assert find_certificate(place, DIGEST) == saved
    assert find_certificate(place, DIGEST, "a device", "1.2.3") == saved
    assert find_certificate(place, "e" * 64) is None
    assert find_certificate(place, DIGEST, "another device", "1.2.3") is None
    assert find_certificate(place, DIGEST, "a device", "1.2.4") is None


def test_a_read_only_folder_is_remembered_elsewhere(
    place: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_write_in(place, monkeypatch)
    saved = save_certificate(place, make())
    other = save_certificate(place, make(device="another device"))
    assert not list(place.iterdir())
    assert {path.parent for path in (saved.path, other.path) if path} == {cache}
    assert find_certificate(place, DIGEST, "a device", "1.2.3") == saved
    assert find_certificate(place, DIGEST, "another device", "1.2.3") == other
    assert find_certificate(place, DIGEST, "a device", "1.2.4") is None
    assert find_certificate(place, "e" * 64) is None
    # Wherever the same files lie.
    assert find_certificate(place.parent, DIGEST, "a device") == saved
    failed = save_certificate(place, make(BAD))
    assert find_certificate(place, DIGEST, "a device") == failed


def test_where_nothing_can_be_written_nothing_is_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_write_in(tmp_path, monkeypatch)
    assert save_certificate(place, make()).path is None
    assert find_certificate(place, DIGEST) is None


def test_machines_that_share_a_folder_leave_each_other_theirs(place: Path, cache: Path) -> None:
    first = save_certificate(place, make(), spare=True)
    second = save_certificate(place, make(device="another device"), spare=True)
    assert first.path == place / "certificate.json"
    assert second.path is not None
    assert second.path.parent == cache
    for one in (first, second):
        assert find_certificate(place, DIGEST, one.device, one.mlx) == one
    again = save_certificate(place, make(date="later"), spare=True)
    assert again.path == first.path
    # One of another manifest, or on purpose.
    assert save_certificate(place, make(manifest="e" * 64), spare=True).path == first.path
    assert save_certificate(place, make(device="another device")).path == first.path


# --- verify="once" --------------------------------------------------------------------------------


class Runs:
    """Counts verifications, and says where they run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._patch = monkeypatch
        certify = verifier._certify

        def counted(*arguments: Any) -> Certificate:
            self.count += 1
            return certify(*arguments)

        monkeypatch.setattr(verifier, "_certify", counted)

    def on(self, name: str, value: str) -> None:
        for module in (verifier, certificate):
            self._patch.setattr(module, name, lambda: value)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def test_an_export_leaves_a_certificate(folder: Path, bundle: Bundle, runs: Runs) -> None:
    found = load_certificate(folder / "certificate.json")
    assert found.passed
    assert found.manifest == bundle.digest
    assert found.target == bundle.device
    load_bundle(folder, verify="once")
    assert runs.count == 0


def test_once_is_once(copy: Path, runs: Runs) -> None:
    (copy / "certificate.json").unlink()
    load_bundle(copy)
    assert not (copy / "certificate.json").exists()
    load_bundle(copy, verify="once")
    assert runs.count == 1
    assert load_certificate(copy / "certificate.json").passed
    load_bundle(copy, verify="once")
    assert runs.count == 1


@pytest.mark.parametrize(
    ("name", "value"), [("device_name", "another"), ("mlx_version", "99.0"), ("", "")]
)
def test_a_new_device_mlx_or_manifest_needs_another(
    copy: Path, edit: Edit, runs: Runs, name: str, value: str
) -> None:
    bundle = load_bundle(copy, verify="once")
    if name:
        runs.on(name, value)
    else:
        (copy / "chat_template.jinja").write_text("other")
        edit(copy, lambda manifest: manifest)
        bundle = load_bundle(copy)
    assert runs.count == 0
    verifier.ensure_verified(bundle)
    verifier.ensure_verified(bundle)
    assert runs.count == 1


def test_a_damaged_certificate_is_made_again(copy: Path, runs: Runs) -> None:
    (copy / "certificate.json").write_text("{")
    load_bundle(copy, verify="once")
    assert runs.count == 1
    assert load_certificate(copy / "certificate.json").passed


def test_a_read_only_bundle_is_verified_once(
    copy: Path, cache: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "certificate.json").unlink()
    refuse_to_write_in(copy, monkeypatch)
    for _ in range(2):
        load_bundle(copy, verify="once")
    assert runs.count == 1
    assert not (copy / "certificate.json").exists()
    assert len(list(cache.iterdir())) == 1


def break_golden(folder: Path, edit: Edit) -> None:
    """Other lengths are expected."""
    golden = folder / "golden/cpu.safetensors"
    arrays = load_arrays(golden)
    mx.eval(arrays)  # the file is about to be overwritten
    changed = {name: array + 1 for name, array in arrays.items() if name.endswith("lengths")}
    save_arrays(golden, {**arrays, **changed})
    edit(folder, lambda manifest: manifest)


def test_a_failure_is_never_remembered_as_a_pass(copy: Path, edit: Edit, runs: Runs) -> None:
    break_golden(copy, edit)
    match = r"prefill_b2_t4_s16 lengths 2 \(at most 0\)"
    for count in (1, 2):
        with pytest.raises(BundleError, match=match):
            load_bundle(copy, verify="once")
        assert runs.count == count
        assert not load_certificate(copy / "certificate.json").passed
    assert load_bundle(copy)  # what nobody asked to verify


def test_a_pipe_is_no_certificate(copy: Path) -> None:
    """Reading one would wait for ever."""
    digest = load_bundle(copy).digest
    (copy / "certificate.json").unlink()
    os.mkfifo(copy / "certificate.json")
    found = []
    thread = Thread(target=lambda: found.append(find_certificate(copy, digest)), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [None]
    with pytest.raises(BundleError, match=r"certificate\.json is not a file"):
        load_certificate(copy / "certificate.json")


def test_damaged_weights_are_found_in_full(copy: Path, runs: Runs) -> None:
    bundle = load_bundle(copy)
    path = copy / "params.safetensors"
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert path.stat().st_size == status.st_size
    with pytest.raises(BundleError, match=r"params\.safetensors is damaged"):
        verify(bundle)


def test_other_weights_say_nothing_about_the_bundle(copy: Path, runs: Runs) -> None:
    other = make_model(seed=1).params
    kept = (copy / "certificate.json").read_bytes()
    assert not all(check.passed for check in verify(load_bundle(copy, params=other)))
    assert (copy / "certificate.json").read_bytes() == kept
    (copy / "certificate.json").unlink()
    load_bundle(copy, params=other, verify="once")  # its own weights are verified
    assert load_certificate(copy / "certificate.json").passed
    assert runs.count == 2


def test_a_bundle_without_weights_is_verified_with_those_of_the_export(
    model: Model, tmp_path: Path, runs: Runs
) -> None:
    bare = tmp_path / "bare.funcrt"
    path = bare / "certificate.json"
    export(model, bare, SMALL, weights=False)
    assert load_certificate(path).passed
    path.unlink()
    with pytest.raises(BundleError, match="does not compute here what was exported"):
        load_bundle(bare, params=make_model(seed=1).params, verify="once")
    assert not path.exists()
    load_bundle(bare, params=model.params, verify="once")
    assert load_certificate(path).passed
    assert runs.count == 2


def test_a_bundle_that_was_replaced_keeps_its_certificate(
    copy: Path, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify = verifier._certify

    def replace_meanwhile(*arguments: Any) -> Certificate:
        made = certify(*arguments)
        (copy / "chat_template.jinja").write_text("other")
        edit(copy, lambda manifest: manifest)
        (copy / "certificate.json").write_text("that of the new one")
        return made

    monkeypatch.setattr(verifier, "_certify", replace_meanwhile)
    assert verify(copy)
    assert (copy / "certificate.json").read_text() == "that of the new one"


def test_verify_can_leave_nothing(copy: Path) -> None:
    (copy / "certificate.json").unlink()
    assert verify(copy, write=False)
    assert not (copy / "certificate.json").exists()
    assert verify(copy)
    assert load_certificate(copy / "certificate.json").passed
