"""Embeddings, linear maps and norms."""

from __future__ import annotations

from dataclasses import dataclass

from funcrt import ops
from funcrt.layers.part import Part, Run
from funcrt.params import Fusions, ParamSpec

import mlx.core as mx


@dataclass(frozen=True)
class Linear(Part):
    """`x [..., I]` -> `[..., O]` by a matrix `[O, I]`, and a bias."""

    FLAT = True

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return ops.linear(run.params, self.name, x)

    def tensors(self) -> ParamSpec:
        spec: ParamSpec = {f"{self.name}.weight": (self.outputs, self.inputs)}
        if self.bias:
            spec[f"{self.name}.bias"] = (self.outputs,)
        return spec

    def adaptable(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class Float32Linear(Linear):
    """The same in float32: for scores of which differences decide."""

    FLAT = True

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return super().__call__(run, x.astype(mx.float32))


@dataclass(frozen=True)
class Stacked(Part):
    """Linear maps of the same input, side by side; `prepare` makes one of them."""

    FLAT = True

    name: str
    members: tuple[Linear, ...]

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return ops.fused_linear(run.params, self.name, self._names(), x)

    def fused(self) -> Fusions:
        return {self.name: self._names()}

    def _names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)


@dataclass(frozen=True)
class Embedding(Part):
    """Token ids `[B, T]` -> `[B, T, E]`, multiplied by `scale`."""

    name: str
    vocab: int
    width: int
    scale: float = 1.0

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        rows = ops.embed(run.params, self.name, x, self.width, run.dtype)
        # Rounded to the compute dtype first, as it was in training.
        return rows if self.scale == 1.0 else rows * mx.array(self.scale, dtype=run.dtype)

    def tensors(self) -> ParamSpec:
        return {f"{self.name}.weight": (self.vocab, self.width)}

    def adaptable(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class RMSNorm(Part):
    """Root mean square norm over the last axis, times weight + offset."""

    FLAT = True

    name: str
    width: int
    eps: float
    offset: float = 0.0

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return ops.rms_norm(run.params, self.name, x, self.eps, self.offset)

    def tensors(self) -> ParamSpec:
        return {f"{self.name}.weight": (self.width,)}


@dataclass(frozen=True)
class LayerNorm(Part):
    """Layer norm over the last axis."""

    FLAT = True

    name: str
    width: int
    eps: float
    bias: bool = True

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return ops.layer_norm(run.params, self.name, x, self.eps)

    def tensors(self) -> ParamSpec:
        spec: ParamSpec = {f"{self.name}.weight": (self.width,)}
        if self.bias:
            spec[f"{self.name}.bias"] = (self.width,)
        return spec
