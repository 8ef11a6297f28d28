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
) -> Model:
    """Read a model from a GGUF file, a Hugging Face folder, or the hub.

    Args:
        source: path of a GGUF file or of a folder with config.json and safetensors, or a hub id
            (owner/name). What exists on disk is never looked up on the hub.
        dtype: float32, float16 or bfloat16: cast floating tensors to it and compute in it. None
            keeps tensors as they are stored and computes in what suits the device.
        ignore: names of config keys, GGUF metadata keys and tensors known not to matter for this
            checkpoint, which would otherwise raise; "tokenizer" loads the model without text.

    Raises:
        SourceError: nothing there, no network, or files that are damaged, incomplete or refused.
        ConfigError: an architecture or a setting that is not supported.
        ParamsError: missing, unknown or misshapen tensors, all listed.
        TextError: a tokenizer that cannot be rebuilt.
    """
    try:
        from converters.checkpoint import make_model

        names = (ignore,) if isinstance(ignore, str) else tuple(ignore)
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
