"""Reading GGUF files: metadata as a Hugging Face config, tensors under Hugging Face names.

`architectures.py` lists what is known, `tensors.py` the types, `tokenizer.py` the tokenizers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.checkpoint import Checkpoint
from converters.gguf import tokenizer as gguf_tokenizer
from converters.gguf.architectures import ARCHITECTURES
from converters.gguf.file import GGUFFile, read_header
from converters.gguf.metadata import Metadata
from converters.gguf.names import Architecture
from converters.gguf.placing import Piece, plan, read_piece
from converters.gguf.splits import read_parts
from converters.gguf.tensors import check_kinds
from funcrt.errors import ConfigError, ParamsError
from funcrt.params import Params
from funcrt.text import Tokenizer

import mlx.core as mx

__all__ = ["ARCHITECTURES", "Opened", "open_gguf", "read", "read_header"]


@dataclass(frozen=True)
class Opened:
    """A GGUF file of which everything but the tensors has been read.

    Attributes:
        config: a Hugging Face config.
        tokenizer: None if the file has none, or it is ignored.
        pieces: what there is to read, see `read_piece`; each is small next to the whole.
    """

    config: dict[str, Any]
    tokenizer: Tokenizer | None
    pieces: list[Piece]
    architecture: Architecture

    def params(self) -> Iterator[Params]:
        """The tensors of each piece in turn, none of them held here.

        Raises ParamsError, also for two tensors of one name.
        """
        seen: set[str] = set()
        for piece in self.pieces:
            params = read_piece(piece, self.architecture, self.config)
            if twice := sorted(seen & params.keys()):
                raise ParamsError(f"{piece.tensors[0].path}: two tensors are both {twice[0]}")
            seen |= params.keys()
            mx.eval(list(params.values()))  # or each expert would keep its whole stack alive
            yield params


def read(path: Path, ignore: Collection[str] = ()) -> Checkpoint:
    """Read config, tensors and tokenizer of a GGUF file.

    Args:
        path: the file; of a model in several files, any one of them.
        ignore: metadata keys known not to matter; "tokenizer" leaves the tokenizer out.

    Raises:
        SourceError: damaged or missing files, or tensor types that are not supported.
        ConfigError: unsupported architecture or metadata.
        ParamsError: tensors that do not fit their description.
        TextError: a tokenizer that cannot be rebuilt.
    """
    opened = open_gguf(path, ignore)
    params: Params = {}
    for piece in opened.params():
        params |= piece
    return Checkpoint(opened.config, params, opened.tokenizer)


def open_gguf(path: Path, ignore: Collection[str] = ()) -> Opened:
    """Read all but the tensors. See `read` for arguments and errors."""
    file = read_parts(path)
    architecture, own = _describe(file, ignore)
    check_kinds(file)
    config = architecture.config(own)
    own.check_known()
    # Before the tensors: its errors are cheap to find, reading the tensors is not.
    tokenizer = None if "tokenizer" in ignore else gguf_tokenizer.build(file.metadata)
    if tokenizer is not None:
        config["eos_token_id"] = list(tokenizer.eos_token_ids) or None
    return Opened(config, tokenizer, plan(file, architecture, config), architecture)


def _describe(file: GGUFFile, ignore: Collection[str]) -> tuple[Architecture, Metadata]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {name!r} is not supported; "
            f"known: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name], Metadata(file, name, ignore)
