"""`funcrt push`: everything is checked before anything is sent, and arrives as one commit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from converters.hub import check_client, is_hub_id
from converters.hub.card import Origin, is_ours, make_card
from converters.hub.failures import downloading, uploading
from converters.hub.parcel import BUNDLE, CARD, Parcel, survey
from funcrt.bundle.format.manifest import CERTIFICATE, DIGEST
from funcrt.errors import InputError, PublishError
from funcrt.text import TOKENIZER_FILES

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Files of an earlier push that would be taken for a part of this one.
_STALE_MODEL = ("model*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES)
_STALE_BUNDLE = ("functions/*", "params*.safetensors", CERTIFICATE, *TOKENIZER_FILES)


@dataclass(frozen=True)
class Delivery:
    """What a push will do.

    Attributes:
        parcel: what is sent.
        repo: owner/name.
        branch: where it goes.
        private: whether others cannot see it.
        exists: whether the repository does.
        has_branch: whether the branch does.
        parent: the commit that it was planned on, if the branch exists.
        card: the README.md to send, if any.
        deleted: files of an earlier push that go.
        replaced: how many files are there already.
        notes: what a person should know, one sentence each.
    """

    parcel: Parcel
    repo: str
    branch: str
    private: bool
    exists: bool
    has_branch: bool
    parent: str | None
    card: str | None
    deleted: tuple[str, ...]
    replaced: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Remote:
    """What is on the hub already."""

    names: frozenset[str] = frozenset()
    private: bool = False
    exists: bool = False
    has_branch: bool = False
    commit: str | None = None


def prepare(
    folder: str | Path,
    repo: str,
    *,
    private: bool = False,
    branch: str = "main",
    base_model: str | None = None,
    license: str | None = None,
    ignore: Collection[str] = (),
) -> Delivery:
    """Check a folder, the token and the repository; nothing is sent or created.

    Args:
        folder: a converted model, or a bundle.
        repo: owner/name.
        private: others must not see it.
        branch: where it shall go.
        base_model: hub id of the model that it was made from.
        license: identifier that the hub knows; None takes that of `base_model`, from the hub.
        ignore: see `converters.load`; who loads the model has to name the same.

    Raises:
        InputError: `repo` or `base_model` is no hub id.
        PublishError: no token, one that may only read, a repository of another kind, or a public
            one although `private`.
        SourceError: the hub's client is not installed.
        FuncrtError: see `survey`.
    """
    for name, value in (("repository", repo), ("--base-model", base_model)):
        if value is not None and not is_hub_id(value):
            raise InputError(f"{name}: expected owner/name, got {value!r}")
    check_client()
    parcel = survey(Path(folder), ignore)
    from huggingface_hub import HfApi

    api = HfApi()
    with uploading(repo):
        _check_token(api)
        remote = _look(api, repo, branch)
    _check_remote(remote, parcel, repo, private)
    origin, notes = _origin(api, base_model, license)
    card, about_card = _choose_card(api, remote, parcel, repo, origin)
    stale = _STALE_BUNDLE if parcel.kind == BUNDLE else _STALE_MODEL
    return Delivery(
        parcel=parcel,
        repo=repo,
        branch=branch,
        private=remote.private if remote.exists else private,
        exists=remote.exists,
        has_branch=remote.has_branch,
        parent=remote.commit if remote.has_branch else None,
        card=card,
        deleted=_matching(remote.names - parcel.files.keys(), stale),
        replaced=len(remote.names & parcel.files.keys()),
        notes=(*about_card, *notes),
    )


def deliver(delivery: Delivery, message: str | None = None) -> str:
    """Send what `prepare` planned, as one commit: others see the old files or the new ones.

    Large files are sent first; after an interruption those that arrived are not sent again.

    Returns:
        The address of the commit.

    Raises:
        PublishError: no access, no room, the repository has changed, or the network failed.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, repo, parcel = HfApi(), delivery.repo, delivery.parcel
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(name, parcel.folder / name) for name in parcel.files
    ]
    if delivery.card is not None:
        operations.append(CommitOperationAdd(CARD, delivery.card.encode()))
    operations += [CommitOperationDelete(name) for name in delivery.deleted]
    with uploading(repo):
        if not delivery.exists:
            api.create_repo(repo, private=delivery.private or None, exist_ok=True)
        if not delivery.has_branch and delivery.branch != "main":
            api.create_branch(repo, branch=delivery.branch, exist_ok=True)
        done = api.create_commit(
            repo,
            operations,
            commit_message=message or f"Push a {parcel.kind} with funcrt",
            revision=delivery.branch,
            parent_commit=delivery.parent,
        )
    return str(done.commit_url)


def _check_token(api: HfApi) -> None:
    """Raise PublishError for a token that may only read, and what the client raises for none."""
    token = api.whoami().get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise PublishError(
            f"the token {token.get('displayName', '')!r} may only read: make one that may write at "
            f"{api.endpoint}/settings/tokens, then `hf auth login`"
        )


def _look(api: HfApi, repo: str, branch: str) -> _Remote:
    from huggingface_hub import errors

    has_branch = True
    try:
        try:
            info = api.model_info(repo, revision=branch)
        except errors.RevisionNotFoundError:  # a new branch begins as the default one is
            info, has_branch = api.model_info(repo), False
    except errors.GatedRepoError:
        raise
    except errors.RepositoryNotFoundError:
        return _Remote()
    names = frozenset(file.rfilename for file in info.siblings or ())
    return _Remote(names, bool(info.private), True, has_branch, info.sha)


def _check_remote(remote: _Remote, parcel: Parcel, repo: str, private: bool) -> None:
    if private and remote.exists and not remote.private:
        raise PublishError(
            f"{repo!r} exists and everybody can see it: make it private in its settings on the "
            "hub, choose another name, or leave out --private"
        )
    here = "bundle" if DIGEST in remote.names else "model" if "config.json" in remote.names else ""
    if here and here != parcel.kind:
        raise PublishError(
            f"{repo!r} holds a {here}, and {parcel.folder} is a {parcel.kind}: "
            "push it to a repository of its own"
        )


def _origin(api: HfApi, base: str | None, license: str | None) -> tuple[Origin, list[str]]:
    """Where a model comes from; a licence that nobody named is the base model's."""
    origin, notes = Origin(base, license), []
    if base is None:
        notes.append("the card names no base model; --base-model OWNER/NAME says it")
    elif license is None:
        try:
            with downloading(base):
                info = api.model_info(base)
            card = info.card_data
            if card is not None and card.license:
                origin = Origin(base, card.license, card.license_name, card.license_link)
        except OSError as error:  # a SourceError
            notes.append(f"cannot look up the licence of the base model: {error}")
    if origin.license is None:
        notes.append("the card names no licence; --license NAME says it")
    return origin, notes


def _choose_card(
    api: HfApi, remote: _Remote, parcel: Parcel, repo: str, origin: Origin
) -> tuple[str | None, list[str]]:
    """The README.md to send. What a person wrote, here or on the hub, is never replaced."""
    mine = parcel.readme
    if CARD in remote.names:
        with downloading(repo):
            there = Path(api.hf_hub_download(repo, CARD, revision=remote.commit)).read_text("utf-8")
        if not is_ours(there):
            replace = (
                f"; `hf upload {repo} {CARD}` replaces it" if mine not in (None, there) else ""
            )
            return None, [f"{CARD} on the hub was written by hand and stays{replace}"]
    if mine is not None:
        return mine, [f"{parcel.folder / CARD} was written by hand and is sent as it is"]
    return make_card(parcel, repo, origin), []


def _matching(names: Collection[str], patterns: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(n for n in names if any(fnmatch(n, pattern) for pattern in patterns)))
