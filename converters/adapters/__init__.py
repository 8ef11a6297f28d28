"""Adapters as people have them, of PEFT and of mlx-lm, read for a model."""

from __future__ import annotations

from pathlib import Path

from converters import hub, huggingface
from converters.adapters import mlx_lm, peft
from converters.adapters.places import Places
from funcrt.adapters import Adapter
from funcrt.bundle import Bundle
from funcrt.errors import ParamsError, SourceError
from funcrt.model import Model
from funcrt.storage import load_json

import mlx.core as mx

CONFIG = "adapter_config.json"
FILES = (CONFIG, peft.WEIGHTS, mlx_lm.WEIGHTS)


def locate(source: str | Path) -> Path:
    """The folder of an adapter: `source`, or what is downloaded of a hub id.

    Raises SourceError where there is none.
    """
    path = Path(source).expanduser()
    if path.exists() or not isinstance(source, str) or not hub.is_hub_id(source):
        return path
    return hub.download(source, FILES)


def read(folder: str | Path, base: Model | Bundle) -> Adapter:
    """Read an adapter of a model or a bundle.

    Args:
        folder: with adapter_config.json, and adapter_model.safetensors as PEFT writes it or
            adapters.safetensors as mlx-lm does.
        base: what it adapts, whose matrices its tensors are matched with.

    Returns:
        Changes under the names of the base, scales included. Its notes say what it is and which
        base it names; that name is not compared with anything.

    Raises:
        SourceError: a file is missing, damaged, or a pickle.
        ConfigError: a kind of adapter, or a setting that changes results, that is not supported.
        ParamsError: an adapter of another base, or tensors that are incomplete or not finite; all
            of them named.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SourceError(f"adapter {folder}: expected a folder with {CONFIG}")
    found = [name for name in FILES[1:] if (folder / name).is_file()]
    if not found:
        pickled = any((folder / name).is_file() for name in ("adapter_model.bin", "adapters.npz"))
        why = " (pickles, which can run code when they are read, are refused)" if pickled else ""
        raise SourceError(f"adapter {folder}: has neither {FILES[1]} nor {FILES[2]}{why}")
    config = load_json(folder / CONFIG)
    tensors = huggingface.read_safetensors(folder / found[0])
    _check_finite(folder, tensors)
    read_form = peft.read if found[0] == peft.WEIGHTS else mlx_lm.read
    return read_form(folder.name, config, tensors, Places(base))


def _check_finite(folder: Path, tensors: dict[str, mx.array]) -> None:
    finite = {name: mx.all(mx.isfinite(array)) for name, array in tensors.items()}
    mx.eval(finite)
    if broken := [name for name, is_finite in finite.items() if not is_finite.item()]:
        listed = ", ".join(sorted(broken)[:8])
        raise ParamsError(f"adapter {folder}: values that are not finite in {listed}")
