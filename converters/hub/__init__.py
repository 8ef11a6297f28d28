"""Checkpoints and bundles on the Hugging Face hub, through its own client, cache and login."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from converters.hub.failures import downloading
from funcrt.errors import SourceError

SMALL = ("*.json", "*.jinja", "tokenizer.model")
_FILES = (".gguf", ".safetensors", ".funcrt")  # a mistyped path, not a hub id
WEIGHTS = ("*.safetensors",)
# Copies in other layouts that some repositories carry beside the checkpoint itself.
NOT_NEEDED = ("*/*", "consolidated*")

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(source: str) -> bool:
    """Whether `source` reads as owner/name."""
    return _ID.fullmatch(source) is not None and not source.endswith(_FILES)


def check_client() -> None:
    """Raise SourceError without the hub's client."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise SourceError("the hub needs huggingface_hub: pip install 'funcrt[convert]'")


def download(
    repo: str,
    patterns: tuple[str, ...],
    revision: str | None = None,
    ignore: tuple[str, ...] = NOT_NEEDED,
) -> Path:
    """The local folder with the files of a repository that match, downloaded if need be.

    Shows the hub client's progress bars and uses its cache, login and HF_HUB_OFFLINE. Files that
    were complete before an interruption are not downloaded again.

    Args:
        repo: owner/name.
        patterns: globs of names to take; a star stands for slashes, too.
        revision: branch, tag or commit; None is the default branch.
        ignore: globs of names to leave.

    Returns:
        The folder of one commit in the cache, named by its hash; its files are links.

    Raises:
        SourceError: no such repository or revision, no access, no network and not in the cache, no
            client.
    """
    check_client()
    # Imported here because it takes a while, and local files do without it.
    from huggingface_hub import snapshot_download

    with downloading(repo, revision):
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignore),
            )
        )
