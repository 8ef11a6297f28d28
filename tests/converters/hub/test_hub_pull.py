from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import converters
import funcrt
from converters.hub import pulling
from converters.hub.pulling import RECORD, pull
from converters.hub.pushing import deliver, prepare
from funcrt.errors import BundleError, FuncrtError, InputError, PublishError, SourceError
from tests.converters.hub.fake_hub import FakeHub, Files, Refusal

import pytest
from huggingface_hub import constants

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

ID = "ada/tiny"


def refuse(error: type[FuncrtError], match: str, target: Path | None = None, **options) -> None:
    with pytest.raises(error, match=match) as caught:
        pull(options.pop("repo", ID), target, **options)
    assert "\n" not in str(caught.value)
    if target is not None and target.parent.is_dir():
        assert not [path for path in target.parent.iterdir() if target.name in path.name]


def test_a_bundle_comes_back_as_it_was_sent(hub: FakeHub, bundle, read, tmp_path):
    deliver(prepare(bundle, ID))
    pulled = pull(ID, tmp_path / "there")
    files = read(pulled.folder)
    assert json.loads(files.pop(RECORD))["commit"] == pulled.commit
    assert files.pop("README.md")
    assert files == read(bundle)
    assert pulled.commit == hub.repositories[ID].branches["main"]
    assert not any(path.is_symlink() for path in pulled.folder.rglob("*"))
    assert funcrt.load_bundle(pulled.folder).tokenizer is not None


def test_a_bundle_in_the_cache_runs_and_takes_no_room(hub: FakeHub, bundle):
    deliver(prepare(bundle, ID))
    first = pull(ID)
    assert first.folder.is_relative_to(os.environ["XDG_CACHE_HOME"])
    assert (first.folder / "params.safetensors").stat().st_nlink == 2  # with the client's cache
    funcrt.load_bundle(first.folder)
    before = len(hub.asked("GET .*/resolve/"))
    assert pull(ID) == first
    assert len(hub.asked("GET .*/resolve/")) == before


def test_a_bundle_damaged_in_the_cache_is_put_there_again(hub: FakeHub, bundle):
    deliver(prepare(bundle, ID))
    path = pull(ID).folder / "tokenizer.json"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(b"{}")  # here, not in the client's cache
    assert pull(ID).folder == path.parent
    assert path.read_bytes() == content
    path.write_bytes(b"{}")  # the same file in both
    refuse(BundleError, "ada/tiny/tokenizer.json is damaged.* after `hf cache rm model/ada/tiny`")
    shutil.rmtree(constants.HF_HUB_CACHE)
    pull(ID)
    assert path.read_bytes() == content


def test_a_model_comes_back(hub: FakeHub, model, read, tmp_path):
    deliver(prepare(model, ID))
    hub.repositories[ID].files.update(
        {"pytorch_model.bin": b"pickle", "onnx/model.safetensors": b""}
    )
    pulled = pull(ID, tmp_path / "there")
    files = read(pulled.folder)
    assert set(files) == {*read(model), "README.md", RECORD}
    assert not hub.asked("pytorch_model|onnx")
    assert converters.load(pulled.folder).fingerprint == converters.load(model).fingerprint
    cached = pull(ID)
    assert cached.folder.is_relative_to(constants.HF_HUB_CACHE)
    assert converters.load(cached.folder).fingerprint == converters.load(model).fingerprint


def test_revisions(hub: FakeHub, model, tmp_path):
    deliver(prepare(model, ID))
    first = hub.repositories[ID].branches["main"]
    (model / "LICENSE").write_text("MIT")
    deliver(prepare(model, ID, branch="dev"))
    assert not (pull(ID, tmp_path / "main").folder / "LICENSE").exists()
    assert (pull(ID, tmp_path / "dev", "dev").folder / "LICENSE").exists()
    assert pull(ID, revision=first).commit == first
    refuse(SourceError, "has no branch, tag or commit 'four-bit'", revision="four-bit")


def test_a_target_of_an_earlier_pull_is_replaced_and_no_other(hub: FakeHub, model, tmp_path):
    deliver(prepare(model, ID))
    target = tmp_path / "there"
    pull(ID, target)
    hub.repositories[ID].files["LICENSE"] = b"MIT"
    hub.repositories[ID].commit("main", hub.repositories[ID].files)
    pull(ID, target)
    assert (target / "LICENSE").read_text() == "MIT"
    (target / "notes.txt").write_text("mine")
    asked = len(hub.log)
    with pytest.raises(PublishError, match="is not replaced: choose another place"):
        pull(ID, target)
    assert len(hub.log) == asked  # before anything is downloaded
    assert (target / "notes.txt").exists()


def test_an_interrupted_pull_goes_on(hub: FakeHub, bundle, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    deliver(prepare(bundle, ID))
    hub.cut["params"] = 10_000
    refuse(SourceError, "downloading it failed .* files that are complete", tmp_path / "there")
    assert hub.asked("GET .*/params.safetensors bytes=10000-")  # the client tries by itself, too
    hub.cut.clear()
    hub.log.clear()
    pull(ID, tmp_path / "there")
    assert hub.asked("GET .*/params.safetensors")
    assert not hub.asked("GET .*/tokenizer.json")


def test_a_commit_during_a_pull_does_not_mix_with_it(hub: FakeHub, bundle, monkeypatch, tmp_path):
    deliver(prepare(bundle, ID))
    there, download = hub.repositories[ID], pulling.download
    first = there.branches["main"]

    def push_between(*arguments, **options):
        folder = download(*arguments, **options)
        there.commit("main", {**there.files, "params.safetensors": b"new"})
        return folder

    monkeypatch.setattr(pulling, "download", push_between)
    assert pull(ID, tmp_path / "there").commit == first
    funcrt.load_bundle(tmp_path / "there")


def lose(name: str):
    return lambda files: files.pop(name)


def replace(name: str, content: bytes):
    return lambda files: files.update({name: content})


@pytest.mark.parametrize(
    ("kind", "change", "error", "match"),
    [
        ("bundle", replace("tokenizer.json", b"{}"), BundleError, "ada/tiny/tokenizer.json is dam"),
        ("bundle", lose("params.safetensors"), SourceError, "lacks .*params.safetensors"),
        ("bundle", lose("manifest.json.sha256"), SourceError, "lacks .*manifest.json.sha256"),
        ("bundle", replace("manifest.json", b'{"format": 1'), BundleError, "damaged"),
        ("bundle", replace("manifest.json.sha256", b"0"), BundleError, "`hf cache rm"),
        ("model", lose("model.safetensors"), SourceError, "no safetensors files"),
        ("model", replace("model.safetensors", b"x" * 99), SourceError, "truncated, damaged"),
        ("model", lose("config.json"), SourceError, "neither a bundle .* nor a model"),
    ],
)
def test_damaged_repositories(hub: FakeHub, request, read, tmp_path, kind, change, error, match):
    files: Files = read(request.getfixturevalue(kind))
    change(files)
    hub.add(ID, files)
    refuse(error, match, tmp_path / "out" / "there")
    refuse(error, match)
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.funcrt"))


def test_a_bundle_of_another_schema_is_refused_before_its_weights(hub: FakeHub, bundle, read):
    files = read(bundle)
    manifest = {**json.loads(files["manifest.json"]), "schema_version": "9.0"}
    hub.add(ID, {**files, "manifest.json": json.dumps(manifest).encode()})
    refuse(BundleError, "schema version '9.0'")
    assert not hub.asked("params|functions")


def test_paths_out_of_a_bundle_are_not_written(hub: FakeHub, bundle, read, tmp_path):
    files = read(bundle)
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["../evil"] = {"size": 1, "sha256": "0" * 64}
    hub.add(ID, {**files, "manifest.json": json.dumps(manifest).encode(), "../evil": b"!"})
    refuse(BundleError, "unsafe file path", tmp_path / "out" / "there")
    assert not list(tmp_path.rglob("evil"))


def test_access(hub: FakeHub, bundle, read, tmp_path, monkeypatch):
    hub.add("ada/gated", read(bundle), gated=True)
    hub.add("ada/private", read(bundle), private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    refuse(SourceError, "is gated: accept its terms at .*/ada/gated", repo="ada/gated")
    refuse(SourceError, "hf auth login` if it is private", repo="ada/private")
    refuse(SourceError, "check the spelling", repo="ada/gone")
    refuse(InputError, "expected owner/name", repo="gone")
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    pull("ada/gated", tmp_path / "gated")
    pull("ada/private", tmp_path / "private")


@pytest.mark.parametrize(
    ("refusal", "match"),
    [
        (Refusal(429, "Slow down"), r"allows no more requests \(Slow down\): wait"),
        (Refusal(500, "Sorry"), r"failed \(Sorry\): check the network"),
    ],
)
@pytest.mark.parametrize("pattern", ["/api/models", "GET .*params", "HEAD .*params"])
def test_refusals(hub: FakeHub, bundle, read, pattern, refusal, match):
    hub.add(ID, read(bundle))
    hub.refuse[pattern] = refusal
    refuse(SourceError, match)


def test_no_network(hub: FakeHub, model, monkeypatch, tmp_path):
    deliver(prepare(model, ID))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuse(SourceError, "HF_HUB_OFFLINE forbids downloads", tmp_path / "there")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    pull(ID)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (pull(ID, tmp_path / "there").folder / "model.safetensors").is_file()


def test_no_room(hub: FakeHub, model, monkeypatch, tmp_path):
    deliver(prepare(model, ID))
    pull(ID)
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refuse(PublishError, "but only 0.0 MB are free there: make", tmp_path / "out" / "there")


def test_the_disk_fills_up(hub: FakeHub, model, monkeypatch, tmp_path):
    deliver(prepare(model, ID))

    def fail(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pulling.shutil, "copyfile", fail)
    refuse(PublishError, "No space left.*make room; nothing was left", tmp_path / "out" / "there")
