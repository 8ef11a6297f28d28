"""Grouped-query softmax attention over a cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from funcrt.cache import CacheLayout, CacheSpec, attention_entries
from funcrt.config.rope import RopeConfig
from funcrt.layers.basic import Linear, Stacked
from funcrt.layers.fusing import added, normed, normed_heads
from funcrt.layers.part import Part, Run
from funcrt.ops import heads as one_kernel
from funcrt.ops.attention import join_heads, split_heads
from funcrt.ops.heads import Waves
from funcrt.params import ParamSpec

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class Attention(Part):
    """Grouped-query attention (arXiv:2305.13245) with rotary embedding.

    Attributes:
        layer: number of the layer, which names its cache.
        heads: H.
        kv_heads: K.
        head_dim: D.
        qkv: `[B, T, E]` -> `[B, T, (H + 2 K) D]`: queries, keys and values side by side.
        out: `[B, T, H D]` -> `[B, T, E]`.
        scale: of the scores.
        rope: None for layers that do not turn.
        window: a query sees q - k < W.
        q_norm, k_norm: of every head, before turning.
        softcap: see `ops.soft_cap`.
        sinks: name of a tensor `[H]`, see `ops.masked_softmax`.
    """

    FLAT = True

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv: Part
    out: Part
    scale: float
    rope: RopeConfig | None
    window: int | None = None
    q_norm: Part | None = None
    k_norm: Part | None = None
    softcap: float | None = None
    sinks: str | None = None

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return self.out(run, self.look(run, *self.split(run, self.qkv(run, x))))

    def branch(self, run: Run, norm: Part, x: mx.array) -> mx.array:
        waves, parts = self.waves(run), None
        if waves is not None:
            parts = normed_heads(run, norm, self.qkv, x, self.heads, self.kv_heads, waves)
        if parts is None:
            parts = self.split(run, normed(run, norm, self.qkv, x))
        return added(run, self.out, self.look(run, *parts), x)

    def split(self, run: Run, qkv: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries `[B, H, T, D]`, keys and values `[B, K, T, D]`, normed and turned.

        `qkv` is what the part of that name gives. Subclasses may have it in another order.
        """
        heads, kv, waves = self.heads, self.kv_heads, self.waves(run)
        if waves is not None:
            return one_kernel.split(qkv, heads, kv, waves)
        qkv = split_heads(qkv, heads + 2 * kv)
        qk, v = mx.split(qkv, [heads + kv], axis=1)
        if self._is_plain:
            q, k = mx.split(self.turn(run, qk), [heads], axis=1)  # one rotation for both
            return q, k, v
        return *self.norm_and_turn(run, qk[:, :heads], qk[:, heads:]), v

    def waves(self, run: Run) -> Waves | None:
        """How heads turn, where kernels split and turn them."""
        if not run.fuses or not self._is_plain or self.rope is None:
            return None
        return run.waves(self.rope, self.head_dim)

    @property
    def _is_plain(self) -> bool:
        return self.q_norm is None and self.k_norm is None

    def norm_and_turn(self, run: Run, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        """Norm and turn queries and keys that are apart."""
        q = q if self.q_norm is None else self.q_norm(run, q)
        k = k if self.k_norm is None else self.k_norm(run, k)
        return self.turn(run, q), self.turn(run, k)

    def turn(self, run: Run, x: mx.array) -> mx.array:
        """`x [B, N, T, D]` by its positions."""
        return x if self.rope is None else run.rotary(self.rope, self.head_dim)(x)

    def look(self, run: Run, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """What queries see, all three as `split` gives them: `[B, T, H D]`, or flat."""
        out = run.attend(
            self.layer, q, k, v, scale=self.scale, softcap=self.softcap, window=self.window,
            sinks=None if self.sinks is None else run.params[self.sinks],
        )  # fmt: skip
        return join_heads(out, run.flat)

    def tensors(self) -> ParamSpec:
        return {} if self.sinks is None else {self.sinks: (self.heads,)}

    def entries(self, dtype: str, layout: CacheLayout) -> CacheSpec:
        return attention_entries(
            self.layer, self.kv_heads, self.head_dim, dtype, layout, self.window
        )

    def windows(self) -> bool:
        return self.window is not None


@dataclass(frozen=True, kw_only=True)
class GatedAttention(Attention):
    """Attention whose output is gated (arXiv:2505.06708); `qkv` gives 2 D for each query head.

    Those are its query, then its gate.
    """

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        heads, kv, width = self.heads, self.kv_heads, self.head_dim
        gated, kept = mx.split(self.qkv(run, x), [2 * heads * width], axis=-1)
        q, gate = mx.split(gated.reshape(*x.shape[:2], heads, 2 * width), 2, axis=-1)
        kept = split_heads(kept, 2 * kv)
        q, k = self.norm_and_turn(run, q.swapaxes(1, 2), kept[:, :kv])
        out = self.look(run, q, k, kept[:, kv:])
        return self.out(run, out * mx.sigmoid(gate.reshape(out.shape)))


def split_qkv(
    name: str, *, width: int, heads: int, kv_heads: int, head_dim: int, bias: bool = False
) -> Stacked:
    """`q_proj`, `k_proj` and `v_proj` of the attention `name`, for inputs of this width."""
    sizes = (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    members = tuple(
        Linear(f"{name}.{member}", width, count * head_dim, bias) for member, count in sizes
    )
    return Stacked(f"{name}.qkv_proj", members)
