"""Reading a Hugging Face folder: config.json, safetensors files, tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from converters import multimodal, published
from converters.checkpoint import Checkpoint
from funcrt.errors import ParamsError, SourceError, some_of
from funcrt.models import read_config
from funcrt.params import Params
from funcrt.storage import load_arrays, load_json
from funcrt.text import Tokenizer

from safetensors import SafetensorError, safe_open

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Other floats have no form that the graphs could take; uint32 holds packed weights, one byte their
# scales, or values that `published` expands.
_DTYPES = ("F32", "F16", "BF16", "U32", "U8", "F8_E4M3", "F8_E8M0")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read(folder: Path, ignore: Collection[str] = (), dtype: str | None = None) -> Checkpoint:
    """Read config, tensors and tokenizer of a checkpoint folder; no network.

    Args:
        folder: the folder.
        ignore: config keys known not to matter; "tokenizer" leaves the tokenizer out.
        dtype: of what is expanded, see `published.expand`.

    Raises:
        SourceError: a file is missing, damaged, outside the folder, or in a format that is refused.
        ConfigError: see `check_config`.
        ParamsError: tensors of types that are not supported, or scales that do not fit.
        TextError: see `Tokenizer.from_folder`.
    """
    whole = read_json(folder)
    config = check_config(folder, ignore)
    part = multimodal.text_part(whole)
    params = read_tensors(folder, multimodal.other_part)
    notes: tuple[str, ...] = ()
    if part is not None:
        params, note = part.take(params)
        notes = (note,)
        # Published configs of the whole and of the text disagree about it; the file knows.
        config["tie_word_embeddings"] = not any(name.startswith("lm_head.") for name in params)
    elif "vision_config" in whole:  # families that know their images by themselves
        kind, special = config["model_type"], multimodal.special_ids(whole)
        notes = (multimodal.note(kind, f"{kind}_text", params, special),)
    params = published.expand(whole if part is None else part.config, params, dtype)
    has_tokenizer = (folder / "tokenizer.json").is_file() and "tokenizer" not in ignore
    tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
    return Checkpoint(config, params, tokenizer, notes)


def read_tensors(folder: Path, other_part: Callable[[str], str] = lambda _: "") -> Params:
    """All tensors of a folder under the names in its files, read lazily.

    Args:
        folder: the folder.
        other_part: says of names that may be of any type what they belong to.

    Raises SourceError, ParamsError: see `read`.
    """
    params: Params = {}
    for name, expected in _weight_files(folder).items():
        for key, array in read_safetensors(folder / name, expected, other_part).items():
            if key in params:
                raise SourceError(f"{folder}: tensor {key!r} is in {name} and in another file")
            params[key] = array
    return params


def check_weights(folder: Path) -> None:
    """Raise SourceError unless a folder has safetensors files with sound headers."""
    for name, expected in _weight_files(folder).items():
        _check_header(folder / name, expected)


def check_config(folder: Path, ignore: Collection[str] = ()) -> dict[str, Any]:
    """The config of the text model in a folder, once it is known to be supported.

    Of a checkpoint that sees or hears it is that of its text model, see `multimodal`.

    Raises SourceError if there is no readable config.json, ConfigError for unsupported models.
    """
    config = text_config(read_json(folder))
    read_config(config, ignore=ignore)
    return config


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `funcrt.models.read_config` takes of a config.json.

    Raises ConfigError for weights that are quantized in a way that is not read.
    """
    part = multimodal.text_part(config)
    return published.without_settings(config if part is None else part.config)


def read_json(folder: Path) -> dict[str, Any]:
    """The config.json of a folder as it is. Raises SourceError if there is none to be read."""
    if not (folder / CONFIG).is_file():
        raise SourceError(
            f"{folder} has no {CONFIG}: a Hugging Face checkpoint has one{_hint(folder)}"
        )
    return load_json(folder / CONFIG)


def read_safetensors(
    path: Path, expected: Iterable[str] = (), other_part: Callable[[str], str] = lambda _: ""
) -> Params:
    """The tensors of one file, read lazily.

    MLX trusts headers, so the `safetensors` library checks this one first: sizes, offsets, length.

    Args:
        path: the file.
        expected: names that it must hold.
        other_part: see `read_tensors`.

    Raises:
        SourceError: a damaged file, or one without the expected tensors.
        ParamsError: tensors of types that are not supported.
    """
    kinds = _check_header(path, expected)
    refused = sorted(
        f"{name} ({kind})"
        for name, kind in kinds.items()
        if kind not in _DTYPES and not other_part(name)
    )
    if refused:
        raise ParamsError(
            f"{path} has tensors of types that are not supported: {some_of(refused)}; "
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
        raise SourceError(f"{path} lacks tensors that the index places there: {some_of(missing)}")
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
            f"{folder} has {len(found)} safetensors files but no {INDEX}: {some_of(found)}"
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
        raise SourceError(f"{folder} lacks files that its index names: {some_of(missing)}")
    return files


def _leaves(name: str) -> bool:
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not name or any(path.anchor or ".." in path.parts for path in paths)


def _hint(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    return f"; to read a GGUF file name it: {folder / files[0]}" if files else ""
