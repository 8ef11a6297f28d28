"""Checkpoints as people have them, read into funcrt models."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    adapter: str | Path | Sequence[str | Path] | None = None,
    *,
    fuse: bool = True,
    ignore: Collection[str] = (),
    via: str | None = None,
    lazy: bool = False,
) -> Model:
    """Read a model from a GGUF file, a Hugging Face folder, or the hub.

    A `model_type` without a family in `funcrt.models` is read through mlx-lm's module for it, if
    mlx-lm is installed (`pip install 'funcrt[mlx-lm]'`), see `functionalize`. So is any other with
    `via="mlx_lm"`: errors name this way where a family refuses what mlx-lm's module may know.

    Args:
        source: path of a GGUF file or of a folder with config.json and safetensors, or a hub id
            (owner/name). What exists on disk is never looked up on the hub.
        dtype: float32, float16 or bfloat16: cast floating tensors to it and compute in it. None
            keeps tensors as they are stored and computes in what suits the device.
        adapter: folder, or hub id, of a LoRA adapter of PEFT or mlx-lm, see `converters.adapters`;
            or a list of them, with `fuse=False`.
        fuse: add the adapter to the matrices that it changes; a packed one is packed again in the
            same way. False keeps it beside them, as params `NAME.lora_A` and `NAME.lora_B`; of a
            list every row of a batch takes the one that its cache names, see `funcrt.adapters`.
        ignore: names of config keys, GGUF metadata keys and tensors known not to matter for this
            checkpoint, which would otherwise raise; "tokenizer" loads the model without text.
        via: "mlx_lm" takes mlx-lm's module whatever the model_type; None where there is no family.
        lazy: leave tensors unread where the format allows it, as they are stored whatever `dtype`,
            and their values unchecked: for who reads each once, while the files stay as they are.

    Raises:
        SourceError: nothing there, no network, or files that are damaged, incomplete or refused.
        ConfigError: an architecture or a setting that is not supported.
        ParamsError: missing, unknown or misshapen tensors, all listed; an adapter of another base.
        TextError: a tokenizer that cannot be rebuilt.
        ModuleError: a module of mlx-lm that cannot be turned into a pure function.
        ValueError: an unknown `via`; several adapters to be fused.
    """
    if via not in (None, "mlx_lm"):
        raise ValueError(f"via: expected 'mlx_lm' or None, got {via!r}")
    if fuse and adapter is not None and not isinstance(adapter, (str, Path)):
        raise ValueError("adapter: a list of adapters is kept beside the model: pass fuse=False")
    try:
        names = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        model = _load(source, dtype, names, via, lazy)
        return model if adapter is None else _adapt(model, adapter, fuse, lazy)
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


def _load(
    source: str | Path,
    dtype: mx.Dtype | str | None,
    ignore: Collection[str],
    via: str | None,
    lazy: bool,
) -> Model:
    from converters import hub
    from converters.checkpoint import make_model

    place, remote = _locate(source)
    if _goes_through_mlx_lm(place, via):
        from converters.functional import loading

        if remote:
            loading.check(place)
            place = hub.download(str(source), hub.SMALL + hub.WEIGHTS)
        return loading.load(place, dtype, ignore, lazy=lazy)
    with _suggesting_mlx_lm(place):
        checkpoint = _read(source, place, remote, ignore, dtype)
        return make_model(checkpoint, dtype, ignore, lazy=lazy)


def _adapt(
    model: Model, adapter: str | Path | Sequence[str | Path], fuse: bool, lazy: bool
) -> Model:
    from converters import adapters
    from funcrt.adapters import fuse as fuse_adapter
    from funcrt.adapters import keep, stack

    if isinstance(adapter, (str, Path)):
        one = adapters.read(adapters.locate(adapter), model)
        return fuse_adapter(model, one, lazy=lazy) if fuse else keep(model, one)
    return stack(model, [adapters.read(adapters.locate(place), model) for place in adapter])


def _locate(source: str | Path) -> tuple[Path, bool]:
    """What to read, and whether only its small files are there: the rest is on the hub."""
    from converters import hub

    path = Path(source).expanduser()
    if path.exists():
        return path, False
    if not isinstance(source, str) or not hub.is_hub_id(source):
        raise SourceError(
            f"{source} is neither an existing file or folder nor a hub id (owner/name): "
            "check the path"
        )
    # The small files first: an unsupported model is refused before its weights are downloaded.
    return hub.download(source, hub.SMALL), True


def _goes_through_mlx_lm(place: Path, via: str | None) -> bool:
    from converters import huggingface, multimodal
    from converters.functional import mlx_lm_source
    from funcrt.models import FAMILIES
    from funcrt.storage import load_json

    if not (place / huggingface.CONFIG).is_file():
        if via is not None:
            raise SourceError(f"{place}: mlx-lm reads folders with a {huggingface.CONFIG} only")
        return False
    config = load_json(place / huggingface.CONFIG)
    name = mlx_lm_source.model_type_of(config)
    if via is not None:
        mlx_lm_source.check_version()
        return True
    if name in FAMILIES:
        return False
    part = multimodal.text_part(config)
    if part is not None:
        if part.config["model_type"] in FAMILIES:
            return False
        mlx_lm_source.check_has_module(part.config)  # its modules take any text for a known one
    mlx_lm_source.check_has_module(config)
    return True


def _suggesting_mlx_lm(place: Path) -> AbstractContextManager[None]:
    from converters import huggingface
    from converters.functional import mlx_lm_source
    from funcrt.storage import load_json

    config = place / huggingface.CONFIG
    if not config.is_file():
        return nullcontext()
    return mlx_lm_source.suggesting_module(load_json(config))


def _read(
    source: str | Path,
    place: Path,
    remote: bool,
    ignore: Collection[str],
    dtype: mx.Dtype | str | None,
) -> Checkpoint:
    from converters import gguf, hub, huggingface
    from funcrt.params import dtype_name

    wanted = None if dtype is None else dtype_name(dtype)
    if remote:
        huggingface.check_config(place, ignore)
        place = hub.download(str(source), hub.SMALL + hub.WEIGHTS)
    if place.is_dir():
        return huggingface.read(place, ignore, wanted)
    if place.suffix == ".safetensors":
        raise SourceError(f"{place} holds tensors only: pass its folder, which has config.json too")
    return gguf.read(place, ignore)
