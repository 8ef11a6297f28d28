"""From the tensors of a GGUF file to params under Hugging Face names, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from converters.gguf.changes import Change, Join
from converters.gguf.file import GGUFFile, GGUFTensor
from converters.gguf.names import Architecture
from converters.gguf.rope import ROPE_TENSORS
from converters.gguf.tensors import Parts, read_tensor
from funcrt.errors import ParamsError
from funcrt.params import Params

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)\.weight")  # before stacks there were these


@dataclass(frozen=True)
class Piece:
    """One tensor, or several that become one.

    Attributes:
        name: what it becomes, with `{x}` or `{qkv}` for several names, see `names`.
        tensors: what it is read from.
        key: of the change to be undone: the stem or the whole name.
        join: what makes one of several.
    """

    name: str
    tensors: tuple[GGUFTensor, ...]
    key: str = ""
    join: Join | None = None


def plan(file: GGUFFile, architecture: Architecture, config: dict[str, Any]) -> list[Piece]:
    """What is to be read, from the header alone. Unknown tensors keep their names.

    Blocks after the last layer predict tokens further ahead; they are left out.
    """
    pieces: list[Piece] = []
    blocks: dict[int, dict[str, GGUFTensor]] = {}
    for tensor in file.tensors.values():
        if tensor.name in ROPE_TENSORS:
            continue  # they are in the config
        if match := _BLOCK.fullmatch(tensor.name):
            blocks.setdefault(int(match[1]), {})[match[2]] = tensor
        else:
            name, key = _name(tensor.name, architecture.top)
            pieces.append(Piece(name or tensor.name, (tensor,), key))
    ahead = _ahead(file)
    for number, tensors in sorted(blocks.items()):
        if ahead and number >= config["num_hidden_layers"]:
            continue
        pieces += _plan_block(f"{architecture.layers}.{number}", tensors, architecture)
    return pieces


def _ahead(file: GGUFFile) -> bool:
    name = file.metadata.get("general.architecture")
    return bool(file.metadata.get(f"{name}.nextn_predict_layers"))


def _plan_block(
    layer: str, tensors: dict[str, GGUFTensor], architecture: Architecture
) -> Iterator[Piece]:
    joined: set[str] = set()
    for target, (stems, join) in architecture.joins.items():
        if all(stem in tensors for stem in stems):
            joined |= {*stems}
            yield Piece(f"{layer}.{target}", tuple(tensors[s] for s in stems), target, join)
    for rest, tensor in tensors.items():
        if rest in joined:
            continue
        if match := _EXPERT.fullmatch(rest):
            name, key = _name(f"{match[1]}_exps.weight", architecture.block)
            name = name and name.replace("{x}", match[2])
        else:
            name, key = _name(rest, architecture.block)
        yield Piece(f"{layer}.{name}" if name else tensor.name, (tensor,), key)


def _name(rest: str, names: Any) -> tuple[str | None, str]:
    """The Hugging Face name, and the key under which changes are found."""
    if rest in names:
        return names[rest], rest
    stem, _, part = rest.rpartition(".")
    return (f"{names[stem]}.{part}", stem) if stem in names else (None, rest)


def read_piece(
    piece: Piece,
    architecture: Architecture,
    config: dict[str, Any],
    read: Callable[[GGUFTensor], Parts] = read_tensor,
) -> Params:
    """The params of a piece: dense, or packed as `funcrt.packing` has it.

    Args:
        piece: what to read.
        architecture: names and changes.
        config: sizes that changes need.
        read: gives the tensors; others than the file's tell shapes and dtypes without reading it.

    Raises:
        SourceError: the file changed meanwhile.
        ParamsError: values that are not finite, or shapes that do not allow what has to be undone.
    """
    try:
        parts = [read(tensor) for tensor in piece.tensors]
        whole = _undo(piece, parts, architecture, config)
        params: Params = {}
        if "{qkv}" in piece.name:
            for letter, rows in _queries_keys_values(whole, config).items():
                params |= _placed(piece.name.replace("{qkv}", letter), rows)
            return params
        if "{x}" not in piece.name:
            return _placed(piece.name, whole)
        for x in range(next(iter(whole.values())).shape[0]):
            one = {part: array[x] for part, array in whole.items()}
            params |= _placed(piece.name.replace("{x}", str(x)), one)
        return params
    except (ValueError, IndexError) as error:
        names = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in piece.tensors)
        raise ParamsError(f"{names} cannot become {piece.name}: {error}") from None
    except ParamsError as error:
        names = ", ".join(tensor.name for tensor in piece.tensors)
        raise ParamsError(f"{names}: {error}") from None


def is_plain(piece: Piece, architecture: Architecture) -> bool:
    """Whether a piece is one tensor as it is, or matrices of a stack, so that rows stay rows."""
    return piece.join is None and "{qkv}" not in piece.name and _change(piece, architecture) is None


def _change(piece: Piece, architecture: Architecture) -> Change | None:
    whole = piece.tensors[0].name.rpartition("blk.")[2].partition(".")[2]  # without the number
    return architecture.changes.get(piece.key) or architecture.changes.get(whole)


def _undo(
    piece: Piece, parts: Sequence[Parts], architecture: Architecture, config: dict[str, Any]
) -> Parts:
    if piece.join is not None:
        return piece.join(parts, config)
    change = _change(piece, architecture)
    return parts[0] if change is None else change(parts[0], config)


def _queries_keys_values(parts: Parts, config: dict[str, Any]) -> dict[str, Parts]:
    heads = (config["num_attention_heads"], *[config["num_key_value_heads"]] * 2)
    starts = [0, *accumulate(count * config["head_dim"] for count in heads)]
    rows = next(iter(parts.values())).shape[0]
    if rows != starts[-1]:
        raise ParamsError(f"{rows} rows are not {heads} heads of {config['head_dim']}")
    return {
        letter: {part: array[start:end] for part, array in parts.items()}
        for letter, (start, end) in zip("qkv", pairwise(starts), strict=True)
    }


def _placed(name: str, parts: Parts) -> Params:
    if "" in parts:
        return {name: parts[""]}
    base = name.removesuffix(".weight")
    return {f"{base}.{part}": array for part, array in parts.items()}
