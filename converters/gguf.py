"""Reading a GGUF file as a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters import gguf_llama, gguf_tokenizer
from converters.checkpoint import Checkpoint
from converters.gguf_file import GGUFFile, read_gguf
from converters.gguf_tensors import check_kinds
from funcrt.errors import ConfigError, SourceError
from funcrt.params import Params


@dataclass(frozen=True)
class Architecture:
    """How one value of `general.architecture` becomes a Hugging Face config and params."""

    config: Callable[[GGUFFile, Collection[str]], dict[str, Any]]
    params: Callable[[GGUFFile, dict[str, Any]], Params]


ARCHITECTURES = {"llama": Architecture(gguf_llama.hf_config, gguf_llama.hf_params)}


def read(path: Path, ignore: Collection[str] = ()) -> Checkpoint:
    """Read config, tensors and tokenizer of a GGUF file.

    Args:
        path: the file.
        ignore: metadata keys known not to matter; "tokenizer" leaves the tokenizer out.

    Raises:
        SourceError: damaged file, unsupported tensor type, or one part of a split file.
        ConfigError: unsupported architecture or metadata.
        ParamsError: tensors that do not fit their description.
        TextError: a tokenizer that cannot be rebuilt.
    """
    file = read_gguf(path)
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: GGUF architecture {name!r} is not supported; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise SourceError(
            f"{path} is one part of {file.metadata['split.count']}; "
            "join them first with `llama-gguf-split --merge`"
        )
    check_kinds(file)
    architecture = ARCHITECTURES[name]
    config = architecture.config(file, ignore)
    # Before the tensors: its errors are cheap to find, reading the tensors is not.
    tokenizer = None if "tokenizer" in ignore else gguf_tokenizer.build(file.metadata)
    return Checkpoint(config, architecture.params(file, config), tokenizer)
