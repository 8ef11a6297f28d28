"""What a model family is: some functions, of a file here or of a module of another library."""

from __future__ import annotations

from typing import Protocol

from funcrt.cache import CacheLayout, CacheSpec, CacheState, Sight
from funcrt.config import ModelConfig
from funcrt.low_rank import Places
from funcrt.params import Fusions, Params, ParamSpec

import mlx.core as mx


class Family(Protocol):
    """The functions of a family. The config settles everything but arrays."""

    def param_spec(self, config: ModelConfig) -> ParamSpec:
        """Name -> shape of every tensor."""

    def cache_spec(self, config: ModelConfig, layout: CacheLayout) -> CacheSpec:
        """The arrays of a cache state. Raises CacheError for an impossible layout."""

    def fusions(self, config: ModelConfig) -> Fusions:
        """Matrices that are stacked into one."""

    def adaptable(self, config: ModelConfig) -> Places:
        """Matrices that can have a change of low rank beside them."""

    def hidden(
        self,
        config: ModelConfig,
        params: Params,
        tokens: mx.array,
        mask: Sight,
        cache_state: CacheState,
        positions: mx.array | None = None,
    ) -> tuple[mx.array, CacheState]:
        """What `unembed` takes, `[B, T, ...]` in the caller's token order, and the new state."""

    def unembed(self, config: ModelConfig, params: Params, x: mx.array) -> mx.array:
        """Logits `[..., V]`."""
