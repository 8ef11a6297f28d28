"""Checkpoints as people have them, read into funcrt models."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import funcrt  # noqa: F401  (first: it picks the host BLAS, which mlx would settle on import)
from funcrt.errors import SourceError

if TYPE_CHECKING:
    from converters.checkpoint import Checkpoint
    from funcrt.model import Model

    import mlx.core as mx

from converters.functional import functionalize

__all__ = ["functionalize", "load"]


def load(
    source: str | Path,
    dtype: mx.Dtype | str | None = None,
    *,
    ignore: Collection[str] = (),
    via: str | None = None,
) -> Model:
    """Read a model from a GGUF file, a Hugging Face folder, or the hub.

    A `model_type` without a family in `funcrt.models` is read through mlx-lm's module for it, if
    mlx-lm is installed (`pip install 'funcrt[mlx-lm]'`), see `functionalize`.

    Args:
        source: path of a GGUF file or of a folder with config.json and safetensors, or a hub id
            (owner/name). What exists on disk is never looked up on the hub.
        dtype: float32, float16 or bfloat16: cast floating tensors to it and compute in it. None
            keeps tensors as they are stored and computes in what suits the device.
        ignore: names of config keys, GGUF metadata keys and tensors known not to matter for this
            checkpoint, which would otherwise raise; "tokenizer" loads the model without text.
        via: "mlx_lm" takes mlx-lm's module whatever the model_type; None where there is no family.

    Raises:
        SourceError: nothing there, no network, or files that are damaged, incomplete or refused.
        ConfigError: an architecture or a setting that is not supported.
        ParamsError: missing, unknown or misshapen tensors, all listed.
        TextError: a tokenizer that cannot be rebuilt.
        ModuleError: a module of mlx-lm that cannot be turned into a pure function.
        ValueError: an unknown `via`.
    """
    if via not in (None, "mlx_lm"):
        raise ValueError(f"via: expected 'mlx_lm' or None, got {via!r}")
    try:
        from converters.checkpoint import make_model

        names = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        folder = _find_module(source, via)
        if folder is not None:
            from converters.functional import loading

            return loading.load(folder, dtype, names)
        return make_model(_read(source, names), dtype, names)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in (
            "gguf",
            "safetensors",
            "huggingface_hub",
            "numpy",
        ):
            raise
        raise SourceError(
            f"reading checkpoints needs {error.name}: pip install 'funcrt[convert]'"
        ) from None


def _find_module(source: str | Path, via: str | None) -> Path | None:
    """The folder to read through mlx-lm, downloaded if need be; None if it is not to be used."""
    from converters import hub, huggingface
    from converters.functional import mlx_lm_source
    from funcrt.models import FAMILIES
    from funcrt.storage import load_json

    path = Path(source).expanduser()
    remote = not path.exists() and isinstance(source, str) and hub.is_hub_id(source)
    if not path.is_dir() and not remote:
        if via is not None:
            raise SourceError(f"{source}: mlx-lm reads folders and hub ids only")
        return None
    folder = hub.download(str(source), hub.SMALL) if remote else path
    if not (folder / huggingface.CONFIG).is_file():
        return None
    config = load_json(folder / huggingface.CONFIG)
    if via is None and (
        config.get("model_type") in FAMILIES or not mlx_lm_source.has_module(config)
    ):
        return None
    mlx_lm_source.check_version()
    return hub.download(str(source), hub.SMALL + hub.WEIGHTS) if remote else folder


def _read(source: str | Path, ignore: Collection[str]) -> Checkpoint:
    from converters import gguf, hub, huggingface

    path = Path(source).expanduser()
    if path.is_dir():
        return huggingface.read(path, ignore)
    if path.suffix == ".safetensors" and path.exists():
        raise SourceError(f"{path} holds tensors only: pass its folder, which has config.json too")
    if path.exists():
        return gguf.read(path, ignore)
    if not isinstance(source, str) or not hub.is_hub_id(source):
        raise SourceError(
            f"{source} is neither an existing file or folder nor a hub id (owner/name): "
            "check the path"
        )
    # The small files first: an unsupported model is refused before its weights are downloaded.
    huggingface.check_config(hub.download(source, hub.SMALL), ignore)
    return huggingface.read(hub.download(source, hub.SMALL + hub.WEIGHTS), ignore)
