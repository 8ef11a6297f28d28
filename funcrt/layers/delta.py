"""Linear attention by the gated delta rule (arXiv:2412.06464), behind a short convolution."""

from __future__ import annotations

from dataclasses import dataclass

from funcrt import ops
from funcrt.cache import CacheLayout, CacheSpec
from funcrt.cache.layout import CacheEntry
from funcrt.layers.conv import ShortConv
from funcrt.layers.part import Part, Run
from funcrt.ops.scans import gated_delta, unit_norm
from funcrt.params import ParamSpec

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Part):
    """A state for each of H heads, which K key heads write and read; its output is gated.

    Attributes:
        name: of its tensors.
        layer: number of the layer, which names its cache.
        heads: H; neighbours share a key head.
        key_heads: K.
        key_dim: D, of a key and a query.
        value_dim: N, of a value.
        act: activation after the convolution.
        eps: of the norm.
        projections: `[B, T, E]` -> all that `split` takes apart.
        conv: of queries `K D`, keys `K D` and values `H N` side by side.
        out: `[B, T, H N]` -> `[B, T, E]`.
    """

    name: str
    layer: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    act: str
    eps: float
    projections: Part
    conv: ShortConv
    out: Part

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        qkv, gate, rate, decay = self.split(self.projections(run, x))
        qkv = ops.ACTIVATIONS[self.act](self.conv(run, qkv)).astype(mx.float32)
        keys = self.key_heads * self.key_dim
        q, k, v = mx.split(qkv, [keys, 2 * keys], axis=-1)
        q, k = (unit_norm(a.reshape(*a.shape[:2], self.key_heads, self.key_dim)) for a in (q, k))
        kept = f"layers.{self.layer}.state"
        y, state = gated_delta(
            q * self.key_dim**-0.5,
            k,
            v.reshape(*v.shape[:2], self.heads, self.value_dim),
            fade=run.zero_padding(self._fade(run, decay)),
            beta=run.zero_padding(mx.sigmoid(rate.astype(mx.float32))),
            state=run.attend.state[kept],
        )
        run.attend.replace(kept, state)
        y = mx.fast.rms_norm(y, self._vector(run, "norm.weight"), self.eps)
        y = y.reshape(gate.shape) * ops.ACTIVATIONS["silu"](gate.astype(mx.float32))
        return self.out(run, y.astype(run.dtype))

    def split(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """What is convolved, then the gate `[B, T, H N]`, then learning rate and decay `[B, T, H]`.

        The last two as they are before their activations.
        """
        inner = self.heads * self.value_dim
        sizes = (self.conv.channels, inner, self.heads)
        ends = [sum(sizes[:count]) for count in range(1, 4)]
        qkv, gate, rate, decay = mx.split(x, ends, axis=-1)
        return qkv, gate, rate, decay

    def _vector(self, run: Run, part: str) -> mx.array:
        return run.params[f"{self.name}.{part}"].astype(mx.float32)

    def _fade(self, run: Run, decay: mx.array) -> mx.array:
        """Log of how much each head keeps, float32 `[B, T, H]`."""
        step = mx.logaddexp(decay + self._vector(run, "dt_bias"), 0)  # softplus
        return -mx.exp(self._vector(run, "A_log")) * step

    def tensors(self) -> ParamSpec:
        return {
            f"{self.name}.dt_bias": (self.heads,),
            f"{self.name}.A_log": (self.heads,),
            f"{self.name}.norm.weight": (self.value_dim,),
        }

    def entries(self, dtype: str, layout: CacheLayout) -> CacheSpec:
        shape = ("B", self.heads, self.key_dim, self.value_dim)
        return (CacheEntry(f"layers.{self.layer}.state", shape, "float32"),)
