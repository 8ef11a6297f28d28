"""Memory of a model before anything runs: its weights, its cache states and one call.

The sizes of arrays that live are exact. What a call needs besides was fitted to peaks of MLX's CPU
backend (float32 and float16; full, ring and packed caches; many widths): it is 0.95 to 1.6 times
what a compiled call takes, and up to 1.9 times what an eager one does. The first call of a shape is
traced and may take more, and an eager `verify` copies the state. MLX keeps freed buffers for later
calls; they are not counted here, and `mx.set_cache_limit` bounds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from funcrt.cache.layout import DTYPES, FULL, CacheSpec, attention_entries, state_bytes
from funcrt.errors import ConfigError
from funcrt.ops.scans import BLOCK
from funcrt.steps import FIRST, STEPS

if TYPE_CHECKING:
    from funcrt.calling import CallForm

_SIZES = (
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)
# Float32 arrays as large as the logits that live at once.
_DRAWN = 17  # where a call draws tokens
_RANKED = 6  # where it lists the most likely ones


@dataclass(frozen=True)
class Footprint:
    """Bytes that a model takes, by shape.

    Attributes:
        params: prepared weights, which every call reads.
        stored: weights as stored that a `Model` keeps beside them; 0 for a bundle.
        cache_spec: the arrays of a cache state.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.
        hidden_size: E.
        intermediate_size: F.
        vocab_size: V.
        value_bytes: of one activation.
    """

    params: int
    stored: int
    cache_spec: CacheSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    value_bytes: int

    @classmethod
    def of(cls, model: CallForm, cache_spec: CacheSpec | None = None) -> Footprint:
        """The footprint of a model or a bundle whose states are laid out like `cache_spec`.

        None takes a bundle's own layout, and of a model the one that keeps every slot. Nothing is
        evaluated: the weights of a bundle that is only opened stay on disk.

        Raises ConfigError for a model whose config lacks one of the sizes.
        """
        cache_spec = model.whole_cache_spec if cache_spec is None else cache_spec
        return cls.from_config(model.config_values, cache_spec, *model.weight_bytes)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], cache_spec: CacheSpec, params: int, stored: int = 0
    ) -> Footprint:
        """The footprint of a model of which only this is known.

        Raises ConfigError if the config lacks one of the sizes.
        """
        sizes = {name: _size(config, name) for name in _SIZES}
        dtype = DTYPES[str(config.get("dtype", "float32"))]
        return cls(params, stored, cache_spec, **sizes, value_bytes=dtype.size)

    @property
    def weights(self) -> int:
        """All weights that live."""
        return self.params + self.stored

    def state(self, batch: int, capacity: int) -> int:
        """A cache state of B rows and S slots: what `init_cache` allocates."""
        return state_bytes(self.cache_spec, batch, capacity)

    def call(self, batch: int, tokens: int, capacity: int, step: str | None = None) -> int:
        """The most that one call allocates beside weights and state, outputs included.

        Layers need two rounds of scores `[B, H, T, S]` (read and written at once; six of one token
        in float32 without latents, see `ops.exponentials`), the mask and its inputs, and the
        activations of about two layers, since MLX runs ahead of what it frees.
        Rings look at few columns of the mask: what it was made of is gone when they score. The
        first call of rows looks at its own tokens.

        Args:
            batch: B.
            tokens: T.
            capacity: S.
            step: a name of `funcrt.steps.STEPS`; None takes `prefill`, or `decode` for one token.
        """
        signature = STEPS[step or ("decode" if tokens == 1 else "prefill")]
        places = batch * tokens
        logits = 4 * self.vocab_size * (places if signature.by_place else batch)
        if not signature.has_params:
            return (_DRAWN if "temperature" in signature.inputs else _RANKED) * logits
        queries, keys = (heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads))
        values = 11 * self.hidden_size + 6 * self.intermediate_size + 11 * queries + 9 * keys
        values += 3 * self.num_heads * self._latent_width()
        scan = self._scan(tokens)
        activations = places * values * (max(self.value_bytes, 4) if scan else self.value_bytes)
        if signature.name == FIRST:
            capacity = min(capacity, tokens)
        columns, mask = self._columns(capacity), places * capacity
        in_place = tokens > 1 or self.value_bytes < 4 or self._latent_width() > 0
        rounds = 2 if in_place else 6
        scores = places * rounds * self.num_heads * columns * self.value_bytes
        looked = scores + 3 * mask if columns == capacity else max(scores + mask, 3 * mask)
        # Log-probabilities are made of something as large as the logits.
        layers = looked + activations + logits * (2 if "logprobs" in signature.outputs else 1)
        layers += batch * scan
        if "temperature" in signature.inputs:
            # Scores are gone when tokens are drawn, what stands between layers may not be.
            return max(layers, activations + _DRAWN * logits)
        return layers

    def total(self, batch: int, tokens: int, capacity: int) -> int:
        """Everything at once: weights, the states before and after a move, the largest call.

        Args:
            batch: B.
            tokens: the largest T that is declared.
            capacity: S.
        """
        settings = batch * self.vocab_size * 8  # bias and history
        call = max(self.call(batch, t, capacity) for t in {1, tokens})
        return self.weights + 2 * self.state(batch, capacity) + settings + call

    def _scan(self, tokens: int) -> int:
        """Bytes of a row for recurrences, which compute in float32.

        That is some states, more before each block of tokens, a few matrices between the tokens of
        a block for each head, and wider activations.
        """
        states = [entry.shape for entry in self.cache_spec if entry.kind == "recurrent"]
        states = [shape for shape in states if len(shape) == 4]  # [B,H,D,N], no convolution
        if not states:
            return 0
        heads, *rest = (int(size) for size in max(states, key=_row)[1:])
        blocks = -(-tokens // BLOCK) if tokens > 1 else 0
        return 4 * heads * (math.prod(rest) * (3 + 6 * blocks) + 6 * tokens * min(tokens, BLOCK))

    def _latent_width(self) -> int:
        """C, where queries and results of all heads are as wide as what the cache keeps; or 0."""
        kept = [entry for entry in self.cache_spec if entry.kind == "latent"]
        return max((int(entry.shape[-1]) for entry in kept), default=0)

    def _columns(self, capacity: int) -> int:
        """Slots of the layer that looks at most of them."""
        sizes = [
            capacity if "S" in entry.shape else int(entry.shape[2])
            for entry in self.cache_spec
            if entry.kind in ("full", "quantized", "latent", "ring")
        ]
        return max(sizes, default=0)


def _row(shape: tuple[int | str, ...]) -> int:
    return math.prod(size for size in shape if isinstance(size, int))


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"cannot tell this model's memory: its config has no {name} (found {value!r})"
        )
    return value


def stand_in() -> Footprint:
    """What stands for a model that is not known: the cache and the calls of a 1B llama in bfloat16.

    32 KiB of cache per token, shapes as released with Llama 3.2; weights are left out, since they
    are what differs most. So a budget is then for states and calls alone.
    """
    spec = tuple(
        entry for i in range(16) for entry in attention_entries(i, 8, 64, "bfloat16", FULL)
    )
    return Footprint(
        params=0, stored=0, cache_spec=spec, num_heads=32, num_kv_heads=8, head_dim=64,
        hidden_size=2048, intermediate_size=8192, vocab_size=128256, value_bytes=2,
    )  # fmt: skip


def footprint_of(source: Footprint | CallForm | None) -> Footprint:
    """A footprint, that of a model or a bundle with whole caches, or the stand-in for None."""
    if source is None:
        return stand_in()
    return source if isinstance(source, Footprint) else Footprint.of(source)
