from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from converters.hub.pushing import deliver, prepare
from funcrt.bundle.proof.certificate import load_certificate, save_certificate
from funcrt.errors import FuncrtError, InputError, PublishError, SourceError
from tests.converters.hub.fake_hub import FakeHub, Refusal

import pytest
from huggingface_hub import constants

# The client's own way of sending large files where hf_xet is not used.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

ID = "ada/tiny"
WRITES = r"^(POST (?!/api/validate)|PUT)"


def push(folder: Path, repo: str = ID, message: str | None = None, **options) -> str:
    return deliver(prepare(folder, repo, **options), message)


def refuse(error: type[FuncrtError], match: str, folder: Path, repo: str = ID, **options) -> None:
    with pytest.raises(error, match=match) as caught:
        push(folder, repo, **options)
    assert "\n" not in str(caught.value)


def test_a_bundle_arrives_whole_with_a_card(hub: FakeHub, bundle, read):
    url = push(bundle, base_model=None, license="apache-2.0", message="First")
    there = hub.repositories[ID]
    assert url == f"{hub.url}/{ID}/commit/{there.branches['main']}"
    card = there.files["README.md"].decode()
    own = {name: there.files[name] for name in there.files if name != ".gitattributes"}
    assert own == {**read(bundle), "README.md": card.encode()}
    assert "license: apache-2.0" in card
    assert there.messages == ["", "First"]  # one commit: nobody sees half of it
    assert not (bundle / "README.md").exists()


def test_a_model_arrives_without_files_of_others(hub: FakeHub, model, read):
    sound = read(model)
    for name in ("train.log", ".env", "optimizer.pt", "model.py"):
        (model / name).write_text("secret")
    (model / "LICENSE").write_text("MIT")
    delivery = prepare(model, ID)
    assert delivery.parcel.left_out == ("model.py", "optimizer.pt", "train.log")
    deliver(delivery)
    expected = {*sound, "LICENSE", "README.md", ".gitattributes"}
    assert set(hub.repositories[ID].files) == expected


@pytest.mark.parametrize("shards", [1, 2])
def test_all_weights_are_sent_whatever_their_names(hub: FakeHub, tiny, shards):
    folder = tiny.hf(shards)
    if shards == 1:
        (folder / "model.safetensors").rename(folder / "weights.safetensors")
    push(folder)
    sent = hub.repositories[ID].files
    assert all(sent[path.name] == path.read_bytes() for path in folder.iterdir())


def test_keys_known_not_to_matter_may_be_named(hub: FakeHub, tiny):
    tiny.config["my_switch"] = True
    refuse(FuncrtError, "my_switch", tiny.hf())
    push(tiny.hf(), ignore=["my_switch"])


def test_private_and_public(hub: FakeHub, model):
    push(model, "ada/hidden", private=True)
    push(model, "ada/shown")
    assert hub.repositories["ada/hidden"].private
    assert not hub.repositories["ada/shown"].private
    before = len(hub.asked(WRITES))
    refuse(PublishError, "everybody can see it: make it private", model, "ada/shown", private=True)
    assert len(hub.asked(WRITES)) == before
    push(model, "ada/hidden")  # stays what it is
    assert prepare(model, "ada/hidden").private


def test_a_branch_is_made(hub: FakeHub, model):
    push(model)
    before = hub.repositories[ID].branches["main"]
    (model / "LICENSE").write_text("MIT")
    push(model, branch="four-bit")
    there = hub.repositories[ID]
    assert there.branches["main"] == before
    assert "LICENSE" in there.commits[there.branches["four-bit"]]
    assert prepare(model, ID, branch="four-bit").has_branch


def test_nothing_new_is_no_commit(hub: FakeHub, model):
    push(model)
    count = len(hub.repositories[ID].commits)
    sent = len(hub.asked("PUT"))
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    push(model)
    assert len(hub.repositories[ID].commits) == count + 1
    assert len(hub.asked("PUT")) == sent  # the weights are there


def test_files_of_an_earlier_push_go(hub: FakeHub, bundle):
    (bundle / "certificate.json").unlink()
    push(bundle)
    there = hub.repositories[ID]
    old = {"functions/cpu/old.mlxfn": b"graph", "certificate.json": b"{}", "figure.png": b"mine"}
    there.commit("main", {**there.files, **old})
    delivery = prepare(bundle, ID)
    assert delivery.deleted == ("certificate.json", "functions/cpu/old.mlxfn")
    deliver(delivery)
    assert set(old) & set(there.files) == {"figure.png"}


def test_stale_weights_would_be_read_instead(hub: FakeHub, model):
    hub.add(ID, {"config.json": b"{}", "model-00001-of-00002.safetensors": b"", "a.bin": b""})
    assert prepare(model, ID).deleted == ("model-00001-of-00002.safetensors",)


def test_what_a_person_wrote_on_the_hub_stays(hub: FakeHub, model):
    hub.add(ID, {"README.md": b"# Mine"})
    (model / "README.md").write_text("# Another")
    delivery = prepare(model, ID)
    assert any("by hand and stays; `hf upload" in note for note in delivery.notes)
    deliver(delivery)
    assert hub.repositories[ID].files["README.md"] == b"# Mine"


def test_what_a_person_wrote_here_is_sent_and_ours_is_replaced(hub: FakeHub, model):
    push(model)
    assert b"funcrt push" in hub.repositories[ID].files["README.md"]
    push(model, license="mit")
    ours = hub.repositories[ID].files["README.md"]
    assert b"license: mit" in ours
    (model / "README.md").write_bytes(ours)  # as after a pull
    push(model, license="apache-2.0")
    assert b"license: apache-2.0" in hub.repositories[ID].files["README.md"]
    (model / "README.md").write_text("# Mine")
    push(model)
    assert hub.repositories[ID].files["README.md"] == b"# Mine"


def test_the_licence_is_that_of_the_base_model(hub: FakeHub, model):
    terms = {"license": "other", "license_name": "llama3", "license_link": "https://x.org/l"}
    hub.add("meta/base", {}, card=terms)
    delivery = prepare(model, ID, base_model="meta/base")
    assert not delivery.notes
    assert "license: other\nlicense_name: llama3\nlicense_link: https://x.org/l" in delivery.card
    notes = prepare(model, ID, base_model="meta/gone").notes
    assert "cannot look up the licence of the base model: 'meta/gone'" in notes[0]
    assert "names no licence" in notes[1]


@pytest.mark.parametrize(("repo", "base"), [("tiny", None), ("a/b/c", None), (ID, "base")])
def test_ids_that_are_none(hub: FakeHub, model, repo, base):
    refuse(InputError, "expected owner/name", model, repo, base_model=base)
    assert not hub.log


def test_other_kinds_are_not_mixed(hub: FakeHub, model, bundle):
    push(model)
    refuse(PublishError, "holds a model, and .* is a bundle: push it to a", bundle)
    push(bundle, "ada/bundle")
    refuse(PublishError, "holds a bundle, and .* is a model: push it to a", model, "ada/bundle")


def damage_graph(folder: Path) -> None:
    path = next(folder.glob("functions/*/decode*.mlxfn"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def fail_certificate(folder: Path) -> None:
    found = load_certificate(folder / "certificate.json")
    first = replace(found.checks[0], measured=1.0, allowed=0.1)
    save_certificate(folder, replace(found, checks=(first, *found.checks[1:])))


def mistake_certificate(folder: Path) -> None:
    found = load_certificate(folder / "certificate.json")
    save_certificate(folder, replace(found, manifest="0" * 64))


def lose_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("bundle", damage_graph, "sha256 does not match"),
        ("bundle", lambda f: (f / "manifest.json").write_text("{"), "damaged"),
        ("bundle", lambda f: (f / "params.safetensors").unlink(), "is missing"),
        ("bundle", fail_certificate, r"1 of \d+ checks failed; run `funcrt verify"),
        ("bundle", mistake_certificate, "another manifest.json .*; run `funcrt verify"),
        ("bundle", lambda f: (f / "certificate.json").write_text("{}"), "expected format"),
        ("model", lambda f: os.truncate(f / "model.safetensors", 999), "truncated"),
        ("model", lose_layers, r"missing: model\.layers\.2|lacks|model.layers.2"),
        ("model", lambda f: (f / "config.json").unlink(), "neither manifest.json nor config.json"),
        ("model", lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer"),
    ],
)
def test_damaged_folders_are_not_sent(hub: FakeHub, request, kind, change, match):
    folder = request.getfixturevalue(kind)
    change(folder)
    refuse(FuncrtError, match, folder)
    assert not hub.log


def test_no_folder(hub: FakeHub, tmp_path):
    refuse(SourceError, "is not a folder", tmp_path / "none")


def test_files_too_large_for_the_hub(hub: FakeHub, model, monkeypatch):
    monkeypatch.setattr("converters.hub.parcel._LARGEST_FILE", 1000)
    refuse(SourceError, "`funcrt convert` writes smaller ones", model)


@pytest.mark.parametrize(
    ("token", "match"),
    [
        (None, "needs a token that may write: make one at .*hf auth login"),
        ("hf_wrong", "does not accept the token"),
        ("hf_read", "the token 'laptop' may only read"),
    ],
)
def test_tokens(hub: FakeHub, model, monkeypatch, token, match):
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    refuse(PublishError, match, model)
    assert not hub.asked(WRITES)


FULL = "Private repository storage limit reached, please upgrade your plan"


@pytest.mark.parametrize(
    ("pattern", "refusal", "match"),
    [
        ("repos/create", Refusal(403, "You don't have the rights"), "no access to write .*rights"),
        ("preupload", Refusal(403, FULL), "no room on the hub .*limit reached.*/settings/storage"),
        ("batch", Refusal(403, FULL), "no room on the hub"),
        ("PUT", Refusal(403, FULL), "no room on the hub"),
        ("commit/", Refusal(413, "Storage quota exceeded"), "no room on the hub"),
        ("commit/", Refusal(429, "Too many requests"), "allows no more requests .*run the same"),
        ("commit/", Refusal(412, "A commit has happened"), "changed by somebody else meanwhile"),
        ("commit/", Refusal(500, "Sorry"), r"was interrupted \(Sorry\): check the network, then"),
        ("model_info|/api/models/ada/tiny", Refusal(503, "Down"), r"interrupted \(Down\)"),
    ],
)
def test_refusals(hub: FakeHub, model, pattern, refusal, match):
    hub.refuse[pattern] = refusal
    refuse(PublishError, match, model)
    assert set(hub.repositories.get(ID, hub.add("x/y", {})).files) <= {".gitattributes"}


def test_a_card_that_the_hub_refuses(hub: FakeHub, model):
    refuse(PublishError, "refuses the model card .*--license", model, license="no-such-license")


def test_an_interrupted_push_goes_on(hub: FakeHub, bundle):
    hub.refuse["commit/"] = Refusal(500, "Sorry")
    refuse(PublishError, "files that have arrived are not sent again", bundle)
    sent = len(hub.asked("PUT"))
    assert sent
    hub.refuse.clear()
    push(bundle)
    assert len(hub.asked("PUT")) == sent
    assert "manifest.json" in hub.repositories[ID].files


def test_somebody_else_pushes_meanwhile(hub: FakeHub, model):
    push(model)
    delivery = prepare(model, ID, license="mit")
    there = hub.repositories[ID]
    there.commit("main", {**there.files, "config.json": b"{}"})
    with pytest.raises(PublishError, match="changed by somebody else"):
        deliver(delivery)


def test_no_network(hub: FakeHub, model, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuse(PublishError, "HF_HUB_OFFLINE forbids it", model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refuse(PublishError, "was interrupted .*check the network", model)
