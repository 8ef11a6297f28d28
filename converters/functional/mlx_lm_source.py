"""The only place that imports mlx-lm: what it makes of a config, and of a checkpoint."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from funcrt.errors import ConfigError, SourceError

from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear, quantize

OLDEST, NEWEST = (0, 32, 0), (0, 33, 0)  # from the first on, before the second
INSTALL = "pip install 'funcrt[mlx-lm]'"

# Modules whose recurrent layers leave padding out, by the validity and the lengths that their
# caches tell: tests/reference/mlx_lm_modules.json. Others run token by token.
LEAVE_PADDING_OUT = {
    "bailing_moe_v3", "falcon_h1", "gear", "granitemoehybrid", "kimi_k3", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba2", "nemotron_h", "plamo2", "qwen3_5", "qwen3_5_moe",
    "qwen3_next",
}  # fmt: skip


def check_version() -> None:
    """Raise SourceError unless a supported mlx-lm is installed."""
    wanted = f"mlx-lm>={_dotted(OLDEST)},<{_dotted(NEWEST)}"
    try:
        found = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        raise SourceError(
            f"modules of mlx-lm need {wanted}, which is not installed: {INSTALL}"
        ) from None
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < NEWEST:
        raise SourceError(f"mlx-lm {found} is not supported: pip install '{wanted}'")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def make_caches(module: Module) -> list[Any]:
    """The caches that mlx-lm makes for a module. Raises SourceError, see `check_version`."""
    check_version()
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(module))


def needs_single_tokens(module: Module, caches: Sequence[Any]) -> bool:
    """Whether a module's recurrent layers would take padding for tokens."""
    from mlx_lm.models.cache import ArraysCache, CacheList

    flat = [
        part
        for cache in caches
        for part in (cache.caches if isinstance(cache, CacheList) else [cache])
    ]
    name = type(module).__module__.rpartition(".")[2]
    return name not in LEAVE_PADDING_OUT and any(isinstance(part, ArraysCache) for part in flat)


def dense_kinds() -> dict[type, type]:
    """Kinds of layers with packed weights, and the same with dense ones."""
    check_version()
    from mlx_lm.models import mla, switch_layers

    return {
        QuantizedLinear: Linear,
        QuantizedEmbedding: Embedding,
        switch_layers.QuantizedSwitchLinear: switch_layers.SwitchLinear,
        mla.QuantizedMultiLinear: mla.MultiLinear,
    }


def make_module(config: Mapping[str, Any]) -> Module:
    """The module of a config.json, its weights random and not computed yet.

    Raises:
        SourceError: see `check_version`.
        ConfigError: no such module, or a config that it refuses.
    """
    check_version()
    from mlx_lm.utils import _get_classes

    with _refusals(config):
        kind, arguments = _get_classes(config=dict(config))
        module: Module = kind(arguments.from_dict(complete(config)))
        quantization = config.get("quantization")
        if quantization is not None:
            _quantize(module, quantization)
        return module.eval()


def _quantize(module: Module, quantization: Mapping[str, Any]) -> None:
    """Pack the layers that a checkpoint would have packed, as far as its config tells."""
    group_size = quantization["group_size"]

    def choose(path: str, part: Module) -> bool | dict[str, Any]:
        if path in quantization:  # how this layer is packed, or that it is not
            chosen: bool | dict[str, Any] = quantization[path]
            return chosen
        return hasattr(part, "to_quantized") and part.weight.shape[-1] % group_size == 0

    mode = quantization.get("mode", "affine")
    quantize(module, group_size, quantization["bits"], mode=mode, class_predicate=choose)


def load_module(folder: Path) -> tuple[Module, dict[str, Any]]:
    """The module of a checkpoint folder, its weights not read yet, and its config.

    Raises:
        SourceError: see `check_version`; files that are missing or do not fit.
        ConfigError: no such module, or a config that it refuses.
    """
    check_version()
    from mlx_lm.utils import load_config, load_model

    config = load_config(folder)
    with _refusals(config):
        module, config = load_model(folder, lazy=True, model_config=complete(config))
    return module, config


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what modules read in the older spelling of rotary embedding.

    Modules that do not know `rope_parameters` (transformers 5 writes it) would silently use their
    defaults.
    """
    config = dict(config)
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or _reads(config, "rope_parameters"):
        return config
    if any(isinstance(value, Mapping) for value in rope.values()):
        return config  # one for each type of layer: only modules that read the key have those
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope and config.get(key) is None:
            config[key] = rope[key]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and config.get("rope_scaling") is None:
        left_out = ("rope_theta", "partial_rotary_factor")
        config["rope_scaling"] = {k: v for k, v in rope.items() if k not in left_out}
        config["rope_scaling"]["type"] = kind
    return config


def _reads(config: Mapping[str, Any], key: str) -> bool:
    from mlx_lm.utils import _get_classes

    _, arguments = _get_classes(config=dict(config))
    return any(field.name == key for field in dataclasses.fields(arguments))


@contextmanager
def _refusals(config: Mapping[str, Any]) -> Iterator[None]:
    """What mlx-lm raises for a config or a checkpoint, as errors of ours."""
    name = config.get("model_type")
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(str(error)) from None
    except SystemExit:
        raise ConfigError(f"mlx-lm's module for {name!r} needs a package of its own") from None
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"mlx-lm cannot make a {name!r} of this checkpoint: {text}") from error


def has_module(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm is installed and has a module for the model_type of a config."""
    try:
        check_version()
        from mlx_lm.utils import MODEL_REMAPPING

        name = config.get("model_type")
        name = MODEL_REMAPPING.get(str(name), name)
        return importlib.util.find_spec(f"mlx_lm.models.{name}") is not None
    except (SourceError, ImportError, ValueError):
        return False
