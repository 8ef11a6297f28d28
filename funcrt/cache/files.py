"""Cache states on disk, tied to the model and to the text that made them."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from funcrt import storage
from funcrt.cache.layout import CacheState
from funcrt.errors import CacheError, SourceError
from funcrt.params import array_bytes

import mlx.core as mx

FORMAT = "funcrt-cache-1"
_FIELDS = ("model", "tokens", "sha256")


Texts = Sequence[int] | Sequence[Sequence[int]]


class Owner(Protocol):
    """What a saved state belongs to: a model or a bundle."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal config and weights, and for no others."""

    def check_cache(self, state: CacheState) -> CacheState:
        """The state in its fixed order. Raises CacheError for a state of another model."""


def save(path: str | Path, state: CacheState, model: Owner, tokens: Texts) -> None:
    """Write a state as a safetensors file.

    The file holds the arrays, the tokens, the model's fingerprint and a sha256 of all of it.

    Args:
        path: of the file; it appears as a whole or not at all, in place of an older one.
        state: what the model returned.
        model: the model or bundle that it belongs to.
        tokens: the ids that each row of the state has seen; one flat list is one row.

    Raises:
        CacheError: a state of another model, or tokens that do not fit its lengths.
        SourceError: the file cannot be written.
    """
    state = model.check_cache(state)
    rows = _as_rows(tokens)
    _check_lengths(rows, state, "save")
    if not model.fingerprint:
        raise CacheError("save: a bundle of an older funcrt has no fingerprint: export it again")
    metadata = {"format": FORMAT, "model": model.fingerprint, "tokens": json.dumps(rows)}
    metadata["sha256"] = _digest(state, metadata)
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.safetensors")
    try:
        storage.save_arrays(scratch, state, metadata)
        scratch.replace(path)
    except (OSError, RuntimeError) as error:
        raise SourceError(f"cannot write {path}: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def load(path: str | Path, model: Owner, tokens: Texts | None = None) -> CacheState:
    """Read a state that `save` wrote.

    Args:
        path: of the file.
        model: the model or bundle that will use it.
        tokens: the text of each row that is to be continued; it must begin with what the row has
            seen. None leaves that check to you, see `load_tokens`.

    Returns:
        The state, evaluated: the file is not needed any more.

    Raises:
        SourceError: the file is missing, cut short or damaged.
        CacheError: it belongs to another model or to another text.
    """
    path = Path(path)
    metadata = _read_metadata(path)
    if metadata["model"] != model.fingerprint:
        raise CacheError(
            f"{path} was saved with another model (other config or weights): run the text again"
        )
    seen = _rows(metadata, path)
    arrays = storage.load_arrays(path)
    try:
        mx.eval(arrays)
    except RuntimeError as error:
        raise SourceError(f"cannot read {path}: {error}") from None
    state = model.check_cache(arrays)
    if _digest(state, metadata) != metadata["sha256"]:
        raise SourceError(f"{path} is damaged: its sha256 does not match: run the text again")
    _check_lengths(seen, state, str(path))
    if tokens is not None:
        _check_prefix(seen, _as_rows(tokens), path)
    return state


def load_tokens(path: str | Path) -> list[list[int]]:
    """The ids that each row of a saved state has seen. Raises SourceError."""
    return _rows(_read_metadata(Path(path)), Path(path))


def _as_rows(tokens: Texts) -> list[list[int]]:
    rows: list[Any] = list(tokens)
    if rows and isinstance(rows[0], Integral):
        rows = [rows]
    return [[int(token) for token in row] for row in rows]


def _digest(state: CacheState, metadata: dict[str, str]) -> str:
    """sha256 of everything that a file holds, in the state's order."""
    described = {name: [str(array.dtype), array.shape] for name, array in state.items()}
    fields = {name: text for name, text in metadata.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps([fields, described], sort_keys=True).encode())
    for array in state.values():
        digest.update(array_bytes(array))
    return digest.hexdigest()


def _check_lengths(rows: list[list[int]], state: CacheState, what: str) -> None:
    lengths: Any = state["lengths"].tolist()
    if [len(row) for row in rows] != lengths:
        raise CacheError(
            f"{what}: rows of {[len(row) for row in rows]} tokens do not belong to a state of "
            f"lengths {lengths}"
        )


def _check_prefix(seen: list[list[int]], tokens: Sequence[Sequence[int]], path: Path) -> None:
    if len(seen) != len(tokens):
        raise CacheError(f"{path} has {len(seen)} rows, {len(tokens)} texts are given")
    for row, (old, new) in enumerate(zip(seen, tokens, strict=True)):
        if [int(token) for token in new[: len(old)]] != old:
            raise CacheError(
                f"{path}: row {row} has seen another text than the one to be continued"
            )


def _read_metadata(path: Path) -> dict[str, str]:
    metadata = storage.load_metadata(path)
    if metadata.get("format") != FORMAT or any(name not in metadata for name in _FIELDS):
        raise SourceError(f"{path} is not a cache file of format {FORMAT}")
    return metadata


def _rows(metadata: dict[str, str], path: Path) -> list[list[int]]:
    try:
        rows = json.loads(metadata["tokens"])
        sound = all(type(token) is int for row in rows for token in row)
    except (ValueError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise SourceError(f"{path}: its list of tokens is damaged")
    return list(rows)
