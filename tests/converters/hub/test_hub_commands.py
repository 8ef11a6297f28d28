"""The commands, in processes of their own, against a hub over HTTP."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.commands import run, run_here
from tests.converters.hub.fake_hub import FakeHub, Refusal

import pytest

# The client's own way of sending large files where hf_xet is not used.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

ID = "ada/tiny"


@pytest.fixture
def funcrt(hub: FakeHub, tmp_path: Path):
    """Runs a command that knows this hub."""

    def start(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        return run(*arguments, **{**known, "HF_TOKEN": "hf_write", **variables})

    return start


def test_there_and_back(hub: FakeHub, funcrt, bundle, tmp_path):
    done = funcrt("push", bundle, ID, "--private", "--license", "mit", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["commit"].startswith(f"{hub.url}/{ID}/commit/")
    assert (facts["kind"], facts["private"], facts["deleted"]) == ("bundle", True, [])
    assert "note: the card names no base model" in done.stderr
    assert f"to {ID} (new, private)" in done.stderr
    target = tmp_path / "back.funcrt"
    done = funcrt("pull", ID, target)
    assert done.stdout == f"{target}\n", done.stderr
    assert "bundle of " in done.stderr
    answer = ("--prompt", "abc", "--raw", "--max-tokens", "4", "--json")
    here, there = (json.loads(funcrt("generate", p, *answer).stdout) for p in (target, ID))
    assert here["tokens"] == there["tokens"]
    assert json.loads(funcrt("inspect", ID, "--json").stdout)["plan"]["capacity"] == [16]
    refused = funcrt("pull", ID, HF_TOKEN="", HF_HOME=str(tmp_path / "other"))
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: 'ada/tiny' is neither a local path nor a repository")
    assert refused.stderr.count("\n") == 1


def test_nothing_is_sent_unasked(hub: FakeHub, model):
    for options in ((), ("--json",)):
        done = run_here("push", model, ID, *options)
        assert done.returncode == 1
        assert "error: nothing was sent: nobody is there to ask, so pass --yes" in done.stderr
    assert not hub.repositories


def test_one_may_say_no(hub: FakeHub, model, monkeypatch):
    monkeypatch.setattr("funcrt.cli.hub._is_asked", lambda: True)
    for answer, count in (("", 0), ("n", 0), ("y", 1)):
        monkeypatch.setattr("funcrt.cli.terminal.ask", lambda question, quiet, a=answer: a)
        done = run_here("push", model, ID)
        assert done.returncode == 1 - count
        assert len(hub.repositories) == count


def test_a_refusal_through_the_other_way_to_send_large_files(hub: FakeHub, funcrt, model):
    hub.refuse["xet-write-token"] = Refusal(403, "No")
    done = funcrt("push", model, ID, "--yes", HF_HUB_DISABLE_XET="0")
    assert done.returncode == 1
    assert "error: no access to write to 'ada/tiny' (Network error: " in done.stderr
