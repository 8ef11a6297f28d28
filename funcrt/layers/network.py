"""`Network`: a whole decoder of parts; `NetworkFamily`: the family that it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from funcrt import ops
from funcrt.cache import (
    CacheLayout,
    CacheSpec,
    CacheState,
    Sight,
    check_call,
    pack,
    row_entries,
    unpack,
)
from funcrt.cache.layout import CacheEntry
from funcrt.config import ModelConfig
from funcrt.layers.basic import Embedding, Linear
from funcrt.layers.part import Part, Run, apply
from funcrt.low_rank import Places
from funcrt.ops import kernels
from funcrt.params import FLOATS, Fusions, Params, ParamSpec

import mlx.core as mx


@dataclass(frozen=True)
class Network(Part):
    """Embedding, layers, norm and last projection.

    Attributes:
        embed: ids `[B, T]` -> `[B, T, E]`.
        layers: in order.
        norm: after the last of them.
        head: `[..., E]` -> `[..., V]`; the embedding's matrix where they are tied (None).
        logit_scale: multiplies the logits.
        softcap: of the logits, see `ops.soft_cap`.
    """

    embed: Part
    layers: tuple[Part, ...]
    norm: Part
    head: Linear | None
    tied_to: str = "model.embed_tokens"
    logit_scale: float = 1.0
    softcap: float | None = None

    def hidden(self, run: Run, tokens: mx.array) -> mx.array:
        """Packed ids `[B, T]` -> `[B, T, E]`: everything but the last projection."""
        x = run.zero_padding(self.embed(run, tokens))  # harmless through every layer
        # MLX multiplies matrices: products of [B, 1, E] would be reshaped before and after.
        are_flat = all(layer.is_flat for layer in self.layers)
        run.flat = tokens.shape[1] == 1 and are_flat and not run.by_row
        # Causal calls are those of step functions, which nobody differentiates.
        run.fuses = run.flat and run.call.causal and kernels.are_there()
        x = x[:, 0] if run.flat else x
        for layer in self.layers:
            x = layer(run, x)
        x = apply(run, self.norm, x)
        return x[:, None] if run.flat else x

    def unembed(self, params: Params, x: mx.array) -> mx.array:
        """Logits `[..., V]` of `x [..., E]`."""
        logits = ops.linear(params, self.tied_to if self.head is None else self.head.name, x)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.softcap is None else ops.soft_cap(logits, self.softcap)


class NetworkFamily:
    """The functions of a family (see `Family`), from the network of each config.

    Args:
        config: class that reads the family's config.json.
        network: builds the network of one config.
    """

    def __init__(
        self, config: type[ModelConfig], network: Callable[..., Network], name: str
    ) -> None:
        self.config = config
        self.name = name
        self.network: Callable[[ModelConfig], Network] = lru_cache(network)
        self.cache_spec = lru_cache(self._cache_spec)

    def param_spec(self, config: ModelConfig) -> ParamSpec:
        """Name -> dense shape of every tensor, in the order of the network."""
        spec: ParamSpec = {}
        for part in self.network(config).walk():
            spec.update(part.tensors())
        return spec

    def fusions(self, config: ModelConfig) -> Fusions:
        """Matrices that read the same input, stacked by `prepare` into one."""
        fused: Fusions = {}
        for part in self.network(config).walk():
            fused.update(part.fused())
        return fused

    def adaptable(self, config: ModelConfig) -> Places:
        """Matrices that can have a change beside them.

        Embeddings and the last projection, which are not read with the cache state at hand, can
        have the same for all rows only.
        """
        network = self.network(config)
        parts = list(network.walk())
        shared = frozenset(name for part in parts for name in part.adaptable())
        ends = {part.name for part in parts if isinstance(part, Embedding)}
        ends.add(network.tied_to if network.head is None else network.head.name)
        return Places(shared, shared - ends)

    def _cache_spec(self, config: ModelConfig, layout: CacheLayout) -> CacheSpec:
        """What every layer keeps. Raises CacheError for an impossible layout."""
        parts = list(self.network(config).walk())
        rows = row_entries(layout, windows=any(part.windows() for part in parts))
        kept = [entry for part in parts for entry in part.entries(config.dtype, layout)]
        if not any("S" in entry.shape for entry in (*rows, *kept)):
            # Nothing has slots. With one small array that has, capacities mean the same as ever.
            rows = (*rows, CacheEntry("positions", ("B", "S"), "int32"))
        return (*rows, *kept)

    def hidden(
        self,
        config: ModelConfig,
        params: Params,
        tokens: mx.array,
        mask: Sight,
        cache_state: CacheState,
        positions: mx.array | None = None,
    ) -> tuple[mx.array, CacheState]:
        """Everything but the last projection: `[B, T]` -> `[B, T, E]` in the caller's order."""
        check_call(tokens, mask, cache_state, positions)
        run = Run(params, mask, cache_state, positions, FLOATS[config.dtype])
        x = self.network(config).hidden(run, pack(tokens, run.call))
        return unpack(x, run.call), run.attend.state

    def unembed(self, config: ModelConfig, params: Params, x: mx.array) -> mx.array:
        """Logits `[..., V]` of `x [..., E]`."""
        return self.network(config).unembed(params, x)
