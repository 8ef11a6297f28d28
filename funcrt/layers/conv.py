"""A short causal convolution that keeps its last inputs."""

from __future__ import annotations

from dataclasses import dataclass

from funcrt.cache import CacheLayout, CacheSpec, conv_window
from funcrt.cache.layout import CacheEntry
from funcrt.layers.part import Part, Run
from funcrt.ops.scans import short_conv
from funcrt.params import ParamSpec

import mlx.core as mx


@dataclass(frozen=True)
class ShortConv(Part):
    """Causal convolution of each channel by itself, `[B, T, C]` -> `[B, T, C]`, or flat.

    Attributes:
        name: of its taps `[C, 1, k]` and bias `[C]`.
        layer: number of the layer, which names its cache.
        channels: C.
        width: k, at least 2.
        bias: whether it has one.
    """

    FLAT = True

    name: str
    layer: int
    channels: int
    width: int
    bias: bool = False

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        kept = f"layers.{self.layer}.conv"
        x = x[:, None] if run.flat else x
        window, last = conv_window(run.attend.state[kept], x, run.call)
        run.attend.replace(kept, last)
        bias = run.params[f"{self.name}.bias"] if self.bias else None
        out = short_conv(window, run.params[f"{self.name}.weight"], bias)
        return out.squeeze(1) if run.flat else out

    def tensors(self) -> ParamSpec:
        spec: ParamSpec = {f"{self.name}.weight": (self.channels, 1, self.width)}
        if self.bias:
            spec[f"{self.name}.bias"] = (self.channels,)
        return spec

    def entries(self, dtype: str, layout: CacheLayout) -> CacheSpec:
        shape = ("B", self.width - 1, self.channels)
        return (CacheEntry(f"layers.{self.layer}.conv", shape, dtype),)
