"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 §2.1) over a cache of latents."""

from __future__ import annotations

from dataclasses import dataclass

from funcrt.cache import CacheEntry, CacheLayout, CacheSpec
from funcrt.config.rope import RopeConfig
from funcrt.layers.basic import Linear
from funcrt.layers.part import Part, Run
from funcrt.low_rank import LORA_A, LORA_B
from funcrt.ops.attention import join_heads, split_heads
from funcrt.ops.products import packed_product
from funcrt.packing import PARTS, quantization_of

import mlx.core as mx


@dataclass(frozen=True)
class LowRank(Part):
    """`up(norm(x))`: the second half of a matrix of low rank with a norm in the middle."""

    norm: Part
    up: Part

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return self.up(run, self.norm(run, x))


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Part):
    """All heads look at one latent for each token, from which each has keys and values of its own.

    The matrix that makes them of it, `up`, is absorbed: its rows for keys multiply queries, its
    rows for values what the latents add up to. So no token but the new ones is ever multiplied.

    Attributes:
        layer: number of the layer, which names its cache.
        heads: H.
        head_dim: D of the part of queries and keys that does not turn.
        rope_dim: R of the part that does; its keys are shared by all heads.
        value_dim: of a head's values.
        rank: C, width of a latent.
        down: `[B, T, E]` -> `[B, T, Q + C + R]`: queries, latent and turning key side by side.
        query: `[B, T, Q]` -> `[B, T, H (D + R)]`; None where they are that already.
        latent_norm: of latents.
        up: holds the matrix `[H (D + value_dim), C]`.
        out: `[B, T, H value_dim]` -> `[B, T, E]`.
        scale: of the scores.
        rope: of queries and shared keys.
    """

    layer: int
    heads: int
    head_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    down: Part
    query: Part | None
    latent_norm: Part
    up: Linear
    out: Part
    scale: float
    rope: RopeConfig

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        down = self.down(run, x)
        query_width = down.shape[-1] - self.rank - self.rope_dim
        q, latent, k_rope = mx.split(down, [query_width, query_width + self.rank], axis=-1)
        if self.query is not None:
            q = self.query(run, q)
        q = split_heads(q, self.heads)  # [B,H,T,D+R]
        rotary = run.rotary(self.rope, self.rope_dim)
        keys, values = slice(0, self.head_dim), slice(self.head_dim, None)
        out = run.attend.latent(
            self.layer,
            self._by_head(run, q[..., : self.head_dim], keys, transpose=False),
            rotary(q[..., self.head_dim :]),
            self.latent_norm(run, latent)[:, None],
            rotary(k_rope[:, None]),
            scale=self.scale,
        )  # [B,H,T,C]
        out = self._by_head(run, out, values, transpose=True)  # [B,H,T,value_dim]
        return self.out(run, join_heads(out))

    def _by_head(self, run: Run, x: mx.array, rows: slice, *, transpose: bool) -> mx.array:
        """`x [B, H, T, I]` times some rows of each head's share of `up`, or their transpose."""
        name, params = self.up.name, run.params
        own = {}
        for part in PARTS:
            array = params.get(f"{name}.{part}")
            if array is not None:
                own[f"{name}.{part}"] = array.reshape(self.heads, -1, array.shape[-1])[:, rows]
        change = self._change(run, x, rows, transpose=transpose)
        batch, heads, tokens, width = x.shape
        # Rows of a batch go into the token axis: the matrix is then read once for all of them.
        x = x.swapaxes(0, 1).reshape(heads, batch * tokens, width)
        packing = quantization_of(params, name, self.rank)
        if packing is None:
            weight = own[f"{name}.weight"].astype(x.dtype)
            y = x @ (weight.swapaxes(-1, -2) if transpose else weight)
        else:
            y = packed_product(own, name, x, packing, transpose=transpose)
        y = y.reshape(heads, batch, tokens, -1).swapaxes(0, 1)
        return y if change is None else y + change

    def _change(self, run: Run, x: mx.array, rows: slice, *, transpose: bool) -> mx.array | None:
        """What a change of `up` adds to `_by_head`: `[B, H, T, O]`; None without one."""
        a = run.params.get(self.up.name + LORA_A)
        if a is None:
            return None
        b = run.params[self.up.name + LORA_B]
        a, b = a.astype(x.dtype), b.astype(x.dtype)
        b = b.reshape(*b.shape[:-2], self.heads, -1, b.shape[-1])[..., rows, :]  # [.., H, D, r]
        a = a[..., None, :, :]  # [.., 1, r, C]
        return (x @ a.swapaxes(-1, -2)) @ b.swapaxes(-1, -2) if transpose else (x @ b) @ a

    def entries(self, dtype: str, layout: CacheLayout) -> CacheSpec:
        name = f"layers.{self.layer}"
        return (
            CacheEntry(f"{name}.latent", ("B", 1, "S", self.rank), dtype),
            CacheEntry(f"{name}.latent_rope", ("B", 1, "S", self.rope_dim), dtype),
        )
