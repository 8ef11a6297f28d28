"""The only place that imports mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from funcrt.errors import SourceError

from mlx import nn

OLDEST, NEWEST = (0, 32, 0), (0, 33, 0)  # from the first on, before the second

# Modules whose recurrent layers leave padding out, by the validity and the lengths that their
# caches tell: tests/reference/mlx_lm_modules.json. Others run token by token.
LEAVE_PADDING_OUT = {
    "bailing_moe_v3", "falcon_h1", "gear", "granitemoehybrid", "kimi_k3", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe",
    "qwen3_next",
}  # fmt: skip


def check_version() -> None:
    """Raise SourceError unless a supported mlx-lm is installed."""
    wanted = f"mlx-lm>={_dotted(OLDEST)},<{_dotted(NEWEST)}"
    try:
        found = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        raise SourceError(
            f"modules of mlx-lm need {wanted}, which is not installed: pip install 'funcrt[mlx-lm]'"
        ) from None
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < NEWEST:
        raise SourceError(f"mlx-lm {found} is not supported: pip install '{wanted}'")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def make_caches(module: nn.Module) -> list[Any]:
    """The caches that mlx-lm makes for a module. Raises SourceError, see `check_version`."""
    check_version()
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(module))


def needs_single_tokens(module: nn.Module, caches: Sequence[Any]) -> bool:
    """Whether a module's recurrent layers would take padding for tokens."""
    from mlx_lm.models.cache import ArraysCache, CacheList

    flat = [
        part
        for cache in caches
        for part in (cache.caches if isinstance(cache, CacheList) else [cache])
    ]
    name = type(module).__module__.rpartition(".")[2]
    return name not in LEAVE_PADDING_OUT and any(isinstance(part, ArraysCache) for part in flat)
