"""Reading a Hugging Face folder: config.json, safetensors files, tokenizer.json."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from converters.checkpoint import Checkpoint
from funcrt.errors import ParamsError, SourceError
from funcrt.models import read_config
from funcrt.params import Params
from funcrt.storage import load_arrays, load_json
from funcrt.text import Tokenizer

from safetensors import SafetensorError, safe_open

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# float64 and 8-bit floats have no form that the graphs could take; uint32 holds packed weights.
_DTYPES = ("F32", "F16", "BF16", "U32")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read(folder: Path, ignore: Collection[str] = ()) -> Checkpoint:
    """Read config, tensors and tokenizer of a checkpoint folder; no network.

    Args:
        folder: the folder.
        ignore: config keys known not to matter; "tokenizer" leaves the tokenizer out.

    Raises:
        SourceError: a file is missing, damaged, outside the folder, or in a format that is refused.
        ConfigError: see `check_config`.
        ParamsError: tensors of types that are not supported.
        TextError: see `Tokenizer.from_folder`.
    """
    config = check_config(folder, ignore)
    params: Params = {}
    for name, expected in _weight_files(folder).items():
        for key, array in read_safetensors(folder / name, expected).items():
            if key in params:
                raise SourceError(f"{folder}: tensor {key!r} is in {name} and in another file")
            params[key] = array
    has_tokenizer = (folder / "tokenizer.json").is_file() and "tokenizer" not in ignore
    tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
    return Checkpoint(config, params, tokenizer)


def check_weights(folder: Path) -> None:
    """Raise SourceError unless a folder has safetensors files with sound headers."""
    for name, expected in _weight_files(folder).items():
        _check_header(folder / name, expected)


def check_config(folder: Path, ignore: Collection[str] = ()) -> dict[str, Any]:
    """The folder's config.json, once it is known to describe a supported model.

    Raises SourceError if there is no readable config.json, ConfigError for unsupported models.
    """
    if not (folder / CONFIG).is_file():
        raise SourceError(
            f"{folder} has no {CONFIG}: a Hugging Face checkpoint has one{_hint(folder)}"
        )
    config = load_json(folder / CONFIG)
    read_config(config, ignore=ignore)
    return config


def read_safetensors(path: Path, expected: Iterable[str] = ()) -> Params:
    """The tensors of one file, read lazily.

    MLX trusts headers, so the `safetensors` library checks this one first: sizes, offsets, length.

    Args:
        path: the file.
        expected: names that it must hold.

    Raises:
        SourceError: a damaged file, or one without the expected tensors.
        ParamsError: tensors of types that are not supported.
    """
    kinds = _check_header(path, expected)
    refused = sorted(f"{name} ({kind})" for name, kind in kinds.items() if kind not in _DTYPES)
    if refused:
        raise ParamsError(
            f"{path} has tensors of types that are not supported: {_listed(refused)}; "
            f"supported: {', '.join(_DTYPES)}"
        )
    return load_arrays(path)


def _check_header(path: Path, expected: Iterable[str]) -> dict[str, str]:
    """The type of each tensor of one file. Raises SourceError, see `read_safetensors`."""
    try:
        with safe_open(path, framework="np") as file:
            kinds = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SourceError(
            f"{path} is truncated, damaged or not a safetensors file ({error}); download it again"
        ) from None
    missing = sorted(set(expected) - kinds.keys())
    if missing:
        raise SourceError(f"{path} lacks tensors that the index places there: {_listed(missing)}")
    return kinds


def _weight_files(folder: Path) -> dict[str, list[str]]:
    """File name -> tensors that it must hold (none named without an index)."""
    if (folder / SINGLE).is_file():
        return {SINGLE: []}
    if (folder / INDEX).is_file():
        return _read_index(folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: []}
    if found:
        raise SourceError(
            f"{folder} has {len(found)} safetensors files but no {INDEX}: {_listed(found)}"
        )
    if any(any(folder.glob(pattern)) for pattern in _PICKLES):
        raise SourceError(
            f"{folder} has its weights only as PyTorch pickles, which can run code when they are "
            "read and so are refused; save them as safetensors first (in transformers: "
            "`model.save_pretrained(folder)`)"
        )
    raise SourceError(f"{folder} has no safetensors files{_hint(folder)}")


def _read_index(folder: Path) -> dict[str, list[str]]:
    weight_map = load_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{folder / INDEX}: expected a `weight_map` of tensor names to files")
    files: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        # By spelling, not by resolving: the hub's cache is made of links that lead elsewhere.
        if not isinstance(name, str) or _leaves(name):
            raise SourceError(f"{folder / INDEX} points outside its folder: {tensor!r} in {name!r}")
        files.setdefault(name, []).append(tensor)
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise SourceError(f"{folder} lacks files that its index names: {_listed(missing)}")
    return files


def _leaves(name: str) -> bool:
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not name or any(path.anchor or ".." in path.parts for path in paths)


def _hint(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    return f"; to read a GGUF file name it: {folder / files[0]}" if files else ""


def _listed(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
