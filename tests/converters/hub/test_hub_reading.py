from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import converters
from converters import hub
from funcrt.errors import ConfigError, SourceError

import huggingface_hub
import pytest
from huggingface_hub import errors

ID = "some-owner/some-model"


def refuse(source: str | Path, match: str) -> None:
    with pytest.raises(SourceError, match=match) as caught:
        converters.load(source)
    assert "\n" not in str(caught.value)


@pytest.fixture
def snapshot(monkeypatch):
    """Replaces the download; records the patterns of each call."""

    class Snapshot:
        folder: Path | None = None
        error: Exception | None = None
        calls: list[list[str]] = []  # noqa: RUF012

        def __call__(self, repo, *, revision, allow_patterns, ignore_patterns):
            assert repo == ID
            self.calls.append(allow_patterns)
            if self.error is not None:
                raise self.error
            return str(self.folder)

    fake = Snapshot()
    fake.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    error = kind.__new__(kind)
    Exception.__init__(error, f"{status} Client Error\nRequest ID: 7")
    return error


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ID, True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("models/tiny.gguf", False),
        ("no-slash", False),
        ("a/b/c", False),
        ("./a/b", False),
        ("/a/b", False),
        ("../b", False),
        ("a/", False),
    ],
)
def test_what_reads_as_a_hub_id(source, expected):
    assert hub.is_hub_id(source) is expected


@pytest.mark.parametrize("source", ["/no/such/place", "no-such-file.gguf", Path("a/b")])
def test_path_that_does_not_exist(source):
    refuse(source, r"neither an existing file or folder nor a hub id \(owner/name\)")


def test_weights_are_downloaded_after_the_config_is_known_to_fit(snapshot, tiny):
    snapshot.folder = tiny.hf()
    assert converters.load(ID).config.num_layers == 2
    assert snapshot.calls == [list(hub.SMALL), [*hub.SMALL, *hub.WEIGHTS]]


def test_weights_of_an_unsupported_model_are_not_downloaded(snapshot, tiny):
    tiny.config["model_type"] = "mamba"
    snapshot.folder = tiny.hf()
    with pytest.raises(ConfigError, match="mamba"):
        converters.load(ID)
    assert snapshot.calls == [list(hub.SMALL)]


def test_an_existing_folder_is_never_looked_up(snapshot, tiny, monkeypatch, tmp_path):
    target = tmp_path / ID
    target.parent.mkdir()
    tiny.hf().rename(target)
    monkeypatch.chdir(tmp_path)
    assert converters.load(ID).config.num_layers == 2
    assert not snapshot.calls


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (http_error(errors.GatedRepoError, 403), "is gated: accept its terms at .*hf auth login"),
        (http_error(errors.RepositoryNotFoundError, 404), "neither a local path nor a repository"),
        (http_error(errors.HfHubHTTPError, 500), r"failed \(500 Client Error\): check the network"),
        (Exception("proxy says no"), r"failed \(proxy says no\)"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (errors.LocalEntryNotFoundError("not there\nat all"), r"failed \(not there\)"),
    ],
)
def test_failed_downloads(snapshot, error, match):
    snapshot.error = error
    refuse(ID, match)


def test_no_network(monkeypatch, tmp_path):
    """The real client against a port where nothing listens."""
    code = f"import converters; converters.load({ID!r})"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    for offline, match in (("0", "check the network"), ("1", "HF_HUB_OFFLINE forbids downloads")):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "HF_HUB_OFFLINE": offline},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "funcrt.errors.SourceError" in result.stderr
        assert match in result.stderr
