"""What goes wrong between here and the hub, in one line that says what to do."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from funcrt.errors import FuncrtError, PublishError, SourceError

_AGAIN = "run the same command again: files that have arrived are not sent again"
_IN_TEXT = re.compile(r"HTTP status \w+ error \((\d{3})")  # all that hf_xet's errors have of it
_STORAGE = ("storage", "quota")  # words of the hub's refusals for lack of room


@contextmanager
def downloading(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn what the hub client raises while it reads from a repository into SourceError."""
    try:
        yield
    except FuncrtError:
        raise
    except Exception as error:  # also whatever the client's HTTP library raises
        raise SourceError(_explain_download(error, repo, revision)) from error


@contextmanager
def uploading(repo: str) -> Iterator[None]:
    """Turn what the hub client raises while it writes to a repository into PublishError."""
    try:
        yield
    except FuncrtError:
        raise
    except Exception as error:  # also whatever the client's HTTP library raises
        raise PublishError(_explain_upload(error, repo)) from error


def _explain_download(error: Exception, repo: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    cause = error.__cause__ or error
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo!r} is gated: accept its terms at {constants.ENDPOINT}/{repo}, "
            "then log in with `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repo!r} is neither a local path nor a repository on {constants.ENDPOINT}: check the "
            "spelling, or log in with `hf auth login` if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo!r} has no branch, tag or commit {revision!r}: check the spelling"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        if constants.HF_HUB_OFFLINE:
            return (
                f"{repo!r} is neither a local path nor complete in the cache, and HF_HUB_OFFLINE "
                "forbids downloads: unset it, or pass a local folder"
            )
        error = cause if isinstance(cause, Exception) else error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no room for {repo!r} in {constants.HF_HUB_CACHE} ({_reason(error)}): make some, or "
            "set HF_HOME to another disk; files that are complete are kept"
        )
    if _status(error) == 429:
        return f"{constants.ENDPOINT} allows no more requests ({_reason(error)}): wait, then again"
    return (
        f"{repo!r} is no local path, and downloading it failed ({_reason(error)}): check the "
        "network, or pass a local folder; files that are complete are kept"
    )


def _explain_upload(error: Exception, repo: str) -> str:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the client's "while uploading FILE"
    reason, status = _reason(error), _status(error)
    if isinstance(error, errors.LocalTokenNotFoundError):
        return (
            f"pushing needs a token that may write: make one at {hub}/settings/tokens, then log in "
            "with `hf auth login`, or set HF_TOKEN"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"cannot push to {repo!r}: HF_HUB_OFFLINE forbids it; unset it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo!r} has no such branch: check --revision"
    if status == 401:
        return f"{hub} does not accept the token ({reason}): log in anew with `hf auth login`"
    if status in (402, 403, 413, 507) and any(word in reason.lower() for word in _STORAGE):
        return (
            f"no room on the hub for {repo!r} ({reason}): delete what you no longer need at "
            f"{hub}/settings/storage, push to a public repository, or upgrade the account"
        )
    if status in (402, 403) or isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no access to write to {repo!r} ({reason}): check the owner's name, at "
            f"{hub}/settings/tokens that the token may write there, and that the account has room"
        )
    if status in (409, 412):
        return f"{repo!r} was changed by somebody else meanwhile ({reason}): push again"
    if status == 429:
        return f"{hub} allows no more requests ({reason}): wait, then {_AGAIN}"
    if isinstance(error, ValueError) and "README.md" in str(error):
        what = " ".join(str(error).split())
        return f"the hub refuses the model card ({what}): check --license, --base-model, README.md"
    return f"pushing to {repo!r} was interrupted ({reason}): check the network, then {_AGAIN}"


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status
    said = _IN_TEXT.search(str(error))
    return int(said[1]) if said else None


def _reason(error: BaseException) -> str:
    """What the server said, or the first line of the error that says anything."""
    said = getattr(error, "server_message", None) or ""
    lines = [line.strip() for line in f"{said}\n{error}".splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".:")
