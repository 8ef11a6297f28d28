"""Cache states on disk, tied to the model and to the text that made them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from funcrt import storage
from funcrt.cache.layout import CacheState
from funcrt.errors import CacheError, SourceError

FORMAT = "funcrt-cache-1"


class Owner(Protocol):
    """What a saved state belongs to: a model or a bundle."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal config and weights, and hardly ever otherwise."""

    def check_cache(self, state: CacheState) -> CacheState:
        """The state in its fixed order. Raises CacheError for a state of another model."""


def save(
    path: str | Path, state: CacheState, model: Owner, tokens: Sequence[Sequence[int]]
) -> None:
    """Write a state as a safetensors file.

    Args:
        path: of the file; it appears as a whole or not at all.
        state: what the model returned.
        model: the model or bundle that it belongs to.
        tokens: the ids that each row of the state has seen.

    Raises:
        CacheError: a state of another model, or tokens that do not fit its lengths.
        SourceError: the file cannot be written.
    """
    state = model.check_cache(state)
    rows = [[int(token) for token in row] for row in tokens]
    lengths = state["lengths"].tolist()
    if [len(row) for row in rows] != lengths:
        raise CacheError(
            f"cache: rows of {[len(row) for row in rows]} tokens do not belong to a state of "
            f"lengths {lengths}"
        )
    metadata = {"format": FORMAT, "model": model.fingerprint, "tokens": json.dumps(rows)}
    path = Path(path)
    scratch = path.with_name(f".{path.name}.tmp.safetensors")
    try:
        storage.save_arrays(scratch, state, metadata)
        scratch.replace(path)
    except (OSError, RuntimeError) as error:
        raise SourceError(f"cannot write {path}: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def load(
    path: str | Path, model: Owner, tokens: Sequence[Sequence[int]] | None = None
) -> CacheState:
    """Read a state that `save` wrote.

    Args:
        path: of the file.
        model: the model or bundle that will use it.
        tokens: the text of each row that is to be continued; it must begin with what the row has
            seen. None leaves that check to you, see `load_tokens`.

    Raises:
        SourceError: the file is missing, cut short or damaged.
        CacheError: it belongs to another model or to another text.
    """
    metadata = _read_metadata(Path(path))
    if metadata["model"] != model.fingerprint:
        raise CacheError(
            f"{path} was saved with another model (other config or weights): run the text again"
        )
    state = model.check_cache(storage.load_arrays(Path(path)))
    if tokens is not None:
        seen = _rows(metadata, Path(path))
        if len(seen) != len(tokens):
            raise CacheError(f"{path} has {len(seen)} rows, {len(tokens)} texts are given")
        for row, (old, new) in enumerate(zip(seen, tokens, strict=True)):
            if list(new[: len(old)]) != old:
                raise CacheError(
                    f"{path}: row {row} has seen another text than the one to be continued"
                )
    return state


def load_tokens(path: str | Path) -> list[list[int]]:
    """The ids that each row of a saved state has seen. Raises SourceError."""
    return _rows(_read_metadata(Path(path)), Path(path))


def _read_metadata(path: Path) -> dict[str, str]:
    metadata = storage.load_metadata(path)
    if metadata.get("format") != FORMAT or not {"model", "tokens"} <= metadata.keys():
        raise SourceError(f"{path} is not a cache file of format {FORMAT}")
    return metadata


def _rows(metadata: dict[str, str], path: Path) -> list[list[int]]:
    try:
        rows: list[list[int]] = json.loads(metadata["tokens"])
    except ValueError:
        raise SourceError(f"{path}: its list of tokens is damaged") from None
    return rows
