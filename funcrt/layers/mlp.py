"""Feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

from funcrt import ops
from funcrt.layers.basic import Linear, Stacked
from funcrt.layers.fusing import added, normed, normed_silu
from funcrt.layers.part import Part, Run

import mlx.core as mx


@dataclass(frozen=True)
class GatedMLP(Part):
    """`down(act(gate(x)) * up(x))` (arXiv:2002.05202); `gate_up` gives both side by side."""

    FLAT = True

    gate_up: Part
    down: Part
    act: str

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return self.down(run, self._gate(self.gate_up(run, x)))

    def branch(self, run: Run, norm: Part, x: mx.array) -> mx.array:
        inner = normed_silu(run, norm, self.gate_up, x) if self.act == "silu" else None
        if inner is None:
            inner = self._gate(normed(run, norm, self.gate_up, x))
        return added(run, self.down, inner, x)

    def _gate(self, x: mx.array) -> mx.array:
        gate, up = mx.split(x, 2, axis=-1)
        return ops.ACTIVATIONS[self.act](gate) * up


@dataclass(frozen=True)
class MLP(Part):
    """`down(act(up(x)))`."""

    FLAT = True

    up: Part
    down: Part
    act: str

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return self.down(run, ops.ACTIVATIONS[self.act](self.up(run, x)))

    def branch(self, run: Run, norm: Part, x: mx.array) -> mx.array:
        inner = ops.ACTIVATIONS[self.act](normed(run, norm, self.up, x))
        return added(run, self.down, inner, x)


def gated_mlp(name: str, width: int, inner: int, act: str, bias: bool = False) -> GatedMLP:
    """A gated MLP of `gate_proj`, `up_proj` and `down_proj`."""
    members = tuple(Linear(f"{name}.{part}_proj", width, inner, bias) for part in ("gate", "up"))
    down = Linear(f"{name}.down_proj", inner, width, bias)
    return GatedMLP(Stacked(f"{name}.gate_up_proj", members), down, act)


def joined_gated_mlp(name: str, width: int, inner: int, act: str) -> GatedMLP:
    """A gated MLP of `gate_up_proj`, whose rows are those of the gate, then the others; no bias."""
    gate_up = Linear(f"{name}.gate_up_proj", width, 2 * inner)
    return GatedMLP(gate_up, Linear(f"{name}.down_proj", inner, width), act)
