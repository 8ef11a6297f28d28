"""Mixtures of experts (arXiv:1701.06538) in place of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from funcrt import ops
from funcrt.layers.basic import Linear
from funcrt.layers.part import Part, Run
from funcrt.ops.experts import Pick, dispatch, expert_linear, expert_weights, stored_stack
from funcrt.ops.routing import Route
from funcrt.params import Fusions, Params, ParamSpec

import mlx.core as mx


@dataclass(frozen=True)
class Experts(Part):
    """X gated MLPs, `down(act(gate(x)) * up(x))`, stored one by one; see `StackedExperts`.

    Attributes:
        name: the first has `name.0.gate_proj.weight [F, E]`, and so on.
        count: X.
        width: E.
        inner: F.
        act: of the gate.
        projections: what gate, up and down are called.

    Class attributes:
        IN_TURNS: whether rows of `gate_up` are gates and ups in turns, not all gates first.
    """

    FLAT = True

    IN_TURNS: ClassVar[bool] = False

    name: str
    count: int
    width: int
    inner: int
    act: str
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def gate_up(self) -> str:
        """Name of the stack `[X, 2 F, E]`: of each expert the gate, then up."""
        return f"{self.name}.gate_up_proj"

    @property
    def down(self) -> str:
        """Name of the stack `[X, E, F]`."""
        return f"{self.name}.down_proj"

    def mix(self, run: Run, x: mx.array, route: Route) -> mx.array:
        """`x [..., E]` -> `[..., E]`: what its experts make of each token, added by weight."""
        stacks = self.stacks(run.params)

        def experts(rows: mx.array, pick: Pick) -> mx.array:
            inner = self.activate(expert_linear(stacks, self.gate_up, rows, pick))
            return expert_linear(stacks, self.down, inner, pick)

        chosen, weights = route
        return dispatch(x, chosen=chosen, weights=weights, experts=experts, total=self.count)

    def activate(self, gate_up: mx.array) -> mx.array:
        """`[..., 2 F]` -> `[..., F]`."""
        gate, up = mx.split(gate_up, 2, axis=-1)
        return ops.ACTIVATIONS[self.act](gate) * up

    def stacks(self, params: Params) -> Params:
        """Both stacks, as `expert_linear` takes them."""
        stacks: Params = {}
        for fused, members in self.fused().items():
            stacks |= expert_weights(params, fused, members, self.count)
        return stacks

    def tensors(self) -> ParamSpec:
        gate, up, down = self.projections
        sizes = {gate: (self.inner, self.width), up: (self.inner, self.width)}
        sizes[down] = (self.width, self.inner)
        return {
            f"{self.name}.{expert}.{projection}.weight": size
            for expert in range(self.count)
            for projection, size in sizes.items()
        }

    def fused(self) -> Fusions:
        gate, up, down = self.projections
        return {
            self.gate_up: tuple(
                f"{self.name}.{i}.{member}" for i in range(self.count) for member in (gate, up)
            ),
            self.down: tuple(f"{self.name}.{i}.{down}" for i in range(self.count)),
        }


@dataclass(frozen=True)
class StackedExperts(Experts):
    """The same, stored as the stacks themselves: `name.gate_up_proj`, `name.down_proj`."""

    FLAT = True

    def stacks(self, params: Params) -> Params:
        return {**stored_stack(params, self.gate_up), **stored_stack(params, self.down)}

    def tensors(self) -> ParamSpec:
        return {
            self.gate_up: (self.count, 2 * self.inner, self.width),
            self.down: (self.count, self.width, self.inner),
        }

    def fused(self) -> Fusions:
        return {}


@dataclass(frozen=True, kw_only=True)
class MoE(Part):
    """A router, the experts that it chooses from, and one that every token goes through.

    Attributes:
        router: `[..., E]` -> scores `[..., X]`.
        rule: from scores to the chosen experts and their weights, see `funcrt.ops.routing`.
        experts: all that may be chosen.
        shared: what is added; or None.
    """

    FLAT = True

    router: Part
    rule: Callable[[mx.array], Route]
    experts: Experts
    shared: Part | None = None

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        out = self.experts.mix(run, x, self.route(run, self.router(run, x)))
        return out if self.shared is None else out + self.shared(run, x)

    def route(self, run: Run, scores: mx.array) -> Route:
        """`rule`; a router with tensors of its own overrides this."""
        return self.rule(scores)


@dataclass(frozen=True)
class Gated(Part):
    """`sigmoid(gate(x)) * part(x)`, with a gate `[1, E]` (shared experts of Qwen's)."""

    FLAT = True

    part: Part
    gate: Linear

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return mx.sigmoid(self.gate(run, x)) * self.part(run, x)
