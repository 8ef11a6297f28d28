"""Downloading checkpoints from the Hugging Face hub, through its own client and cache."""

from __future__ import annotations

import re
from pathlib import Path

from funcrt.errors import SourceError

SMALL = ("*.json", "*.jinja", "tokenizer.model")
_FILES = (".gguf", ".safetensors", ".funcrt")  # a mistyped path, not a hub id
WEIGHTS = ("*.safetensors",)
# Copies in other layouts that some repositories carry beside the checkpoint itself.
_NOT_NEEDED = ("*/*", "consolidated*")

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(source: str) -> bool:
    """Whether `source` reads as owner/name."""
    return _ID.fullmatch(source) is not None and not source.endswith(_FILES)


def download(repo: str, patterns: tuple[str, ...]) -> Path:
    """The local folder with the files of a repository that match, downloaded if need be.

    Shows the hub client's progress bars and uses its cache, login and HF_HUB_OFFLINE.

    Raises:
        SourceError: no such repository, no access, no network and not in the cache.
    """
    # Imported here because it takes a while, and local files do without it.
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                repo, allow_patterns=list(patterns), ignore_patterns=list(_NOT_NEEDED)
            )
        )
    except errors.GatedRepoError:
        raise SourceError(
            f"{repo!r} is gated: accept its terms at {constants.ENDPOINT}/{repo}, "
            "then log in with `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise SourceError(
            f"{repo!r} is neither a local path nor a repository on {constants.ENDPOINT}: check the "
            "spelling, or log in with `hf auth login` if it is private"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            raise SourceError(
                f"{repo!r} is neither a local path nor complete in the cache, and HF_HUB_OFFLINE "
                "forbids downloads: unset it, or pass a local folder"
            ) from None
        raise SourceError(_unreachable(repo, error.__cause__ or error)) from None
    except Exception as error:  # also whatever the client's HTTP library raises
        raise SourceError(_unreachable(repo, error)) from error


def _unreachable(repo: str, error: BaseException) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"{repo!r} is no local path, and downloading it failed ({reason}): check the network, "
        "or pass a local folder"
    )
