"""The only place that imports mlx-lm: what it makes of a config, and of a checkpoint."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from converters.functional.packing import pack
from converters.functional.rotary import Translation
from funcrt.errors import ConfigError, FuncrtError, SourceError
from funcrt.models import FAMILIES

from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

OLDEST, NEWEST = (0, 32, 2), (0, 33, 0)  # from the first on, before the second
INSTALL = "pip install 'funcrt[mlx-lm]'"

# Modules whose recurrent layers leave padding out, by the validity and the lengths that their
# caches tell: tests/reference/mlx_lm_modules.json. Others run token by token.
LEAVE_PADDING_OUT = {
    "bailing_moe_v3", "falcon_h1", "gear", "granitemoehybrid", "kimi_k3", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba2", "nemotron_h", "plamo2", "qwen3_5", "qwen3_5_moe",
    "qwen3_next",
}  # fmt: skip


# What modules raise for a config with entries that are missing or of another type or range.
_REFUSALS = (
    ValueError, LookupError, TypeError, AttributeError, NotImplementedError, ArithmeticError,
    AssertionError,
)  # fmt: skip


def check_version() -> None:
    """Raise SourceError unless a supported mlx-lm is installed."""
    wanted = f"mlx-lm>={_dotted(OLDEST)},<{_dotted(NEWEST)}"
    try:
        found = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        raise SourceError(
            f"modules of mlx-lm need {wanted}, which is not installed: {INSTALL} (Python 3.11 or "
            "newer)"
        ) from None
    if not _is_supported(found):
        raise SourceError(f"mlx-lm {found} is not supported: pip install '{wanted}'")


def _is_supported(version: str) -> bool:
    """Whether a version is in the range; what comes before the oldest release is not."""
    read = re.match(
        r"v?(\d+(?:\.\d+)*)(?:[._-]?(a|b|c|rc|alpha|beta|pre|preview|dev)\d*)?", version
    )
    if read is None:
        return False
    numbers = (*(int(part) for part in read[1].split(".")), 0, 0)[:3]
    return OLDEST <= numbers < NEWEST and not (numbers == OLDEST and read[2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def make_caches(module: Module) -> list[Any]:
    """The caches that mlx-lm makes for a module. Raises SourceError, see `check_version`."""
    check_version()
    from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

    caches = list(make_prompt_cache(module))
    if type(module).__module__ == "mlx_lm.models.plamo3":
        for cache in caches:
            if isinstance(cache, RotatingKVCache):
                cache.max_size += 1  # made for one token less than the module's mask shows
    return caches


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
    from mlx_lm.models.base import BaseModelArgs
    from mlx_lm.utils import _decode_tagged_floats, _get_classes

    with _refusals(config):
        config = _decode_tagged_floats(dict(config))
        kind, arguments = _get_classes(config=dict(config))
        translation = Translation(config)
        with translation.translating(BaseModelArgs):
            module: Module = kind(arguments.from_dict(translation.fit(arguments, config)))
        return pack(module, config).eval()


def load_module(folder: Path) -> tuple[Module, dict[str, Any]]:
    """The module of a checkpoint folder, its weights not read yet, and its config.

    Raises:
        SourceError: see `check_version`; files that are missing or do not fit.
        ConfigError: no such module, or a config that it refuses.
    """
    check_version()
    from mlx_lm.models.base import BaseModelArgs
    from mlx_lm.utils import _get_classes, load_config, load_model

    config = load_config(folder)
    with _refusals(config):
        translation = Translation(config)
        fitted = translation.fit(_get_classes(config=dict(config))[1], config)
        with translation.translating(BaseModelArgs):
            module, config = load_model(folder, lazy=True, model_config=fitted)
    return module, config


@contextlib.contextmanager
def _refusals(config: Mapping[str, Any]) -> Iterator[None]:
    """What mlx-lm raises for a config or a checkpoint, as errors of ours."""
    name = config.get("model_type")
    said = io.StringIO()  # a module prints why it ends the process; our stdout is not its place
    try:
        with contextlib.redirect_stdout(said):
            yield
    except FuncrtError:
        raise
    except FileNotFoundError as error:
        raise SourceError(str(error)) from None
    except SystemExit:
        why = " ".join(said.getvalue().split())
        raise ConfigError(
            f"mlx-lm's module for {name!r} needs a package of its own: {why}"
        ) from None
    except _REFUSALS as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"mlx-lm cannot make a {name!r} of this checkpoint: {text}") from error
    else:
        sys.stderr.write(said.getvalue())


def model_type_of(config: Mapping[str, Any]) -> str:
    """The model_type of a config, empty if there is none. Raises ConfigError if it is no text."""
    name = config.get("model_type", "")
    if not isinstance(name, str):
        raise ConfigError(f"config.json: expected a name as model_type, got {name!r}")
    return name


def check_has_module(config: Mapping[str, Any]) -> None:
    """Raise ConfigError, saying all that is missing, unless mlx-lm has a module for a config."""
    name = model_type_of(config)
    unknown = f"model_type {name!r} is not supported; known: {', '.join(sorted(FAMILIES))}"
    try:
        check_version()
    except SourceError as error:
        raise ConfigError(f"{unknown}; {error}") from None
    if not _has_module(name):
        raise ConfigError(f"{unknown}, and mlx-lm {metadata.version('mlx-lm')} has no module of it")


@contextlib.contextmanager
def suggesting_module(config: Mapping[str, Any]) -> Iterator[None]:
    """Let errors of a family here name mlx-lm's module, which is never taken in silence.

    It may know settings that the family does not; it would miss the same tensors.
    """
    try:
        yield
    except ConfigError as error:
        way = _way(model_type_of(config))
        if not way:
            raise
        raise ConfigError(
            f"{error}; mlx-lm's module may know what this family does not, or pass over it: {way}"
        ) from error


def _way(model_type: str) -> str:
    """How to read a model type through its module; empty if there is none."""
    way = "converters.load(folder, via='mlx_lm')"
    try:
        check_version()
    except SourceError:
        return f"{INSTALL}, then {way}"
    return way if _has_module(model_type) else ""


def _has_module(model_type: str) -> bool:
    from mlx_lm.utils import MODEL_REMAPPING

    return _defines_model(MODEL_REMAPPING.get(model_type, model_type))


def _defines_model(name: str) -> bool:
    """Whether there is a module of this name that has a `Model`; found without importing it."""
    import mlx_lm

    place = Path(mlx_lm.__file__).parent / "models" / f"{name}.py"
    if not name or Path(name).name != name or not place.is_file():
        return False
    return (
        re.search(r"^class Model\b|^from .* import .*\bModel\b", place.read_text(), re.MULTILINE)
        is not None
    )
