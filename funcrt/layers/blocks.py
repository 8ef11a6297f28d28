"""How norms, attention and MLP make a layer of a network."""

from __future__ import annotations

from dataclasses import dataclass

from funcrt.layers.part import Part, Run

import mlx.core as mx


@dataclass(frozen=True)
class PreNorm(Part):
    """Norm, then attention (or what stands in its place), added; norm, then MLP, added."""

    mix_norm: Part
    mix: Part
    mlp_norm: Part
    mlp: Part
    scale: float = 1.0  # of what is added

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        if run.fuses and self.scale == 1.0:
            x = self.mix.branch(run, self.mix_norm, x)
            return self.mlp.branch(run, self.mlp_norm, x)
        x = x + self._scaled(self.mix(run, self.mix_norm(run, x)))
        return x + self._scaled(self.mlp(run, self.mlp_norm(run, x)))

    def _scaled(self, x: mx.array) -> mx.array:
        return x if self.scale == 1.0 else x * self.scale


@dataclass(frozen=True)
class PostNorm(Part):
    """Attention, then norm, added; MLP, then norm, added (OLMo 2, arXiv:2501.00656 §3.2)."""

    mix: Part
    mix_norm: Part
    mlp: Part
    mlp_norm: Part

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        x = x + self.mix_norm(run, self.mix(run, x))
        return x + self.mlp_norm(run, self.mlp(run, x))


@dataclass(frozen=True)
class Sandwich(Part):
    """Norms before and after both attention and MLP (Gemma 2, arXiv:2408.00118 §2)."""

    mix_norm: Part
    mix: Part
    mix_post_norm: Part
    mlp_norm: Part
    mlp: Part
    mlp_post_norm: Part

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        x = x + self.mix_post_norm(run, self.mix(run, self.mix_norm(run, x)))
        return x + self.mlp_post_norm(run, self.mlp(run, self.mlp_norm(run, x)))


@dataclass(frozen=True)
class Parallel(Part):
    """Attention and MLP of the same input, both added; `mlp_norm` is None where they share one."""

    mix_norm: Part
    mix: Part
    mlp: Part
    mlp_norm: Part | None = None

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        normed = self.mix_norm(run, x)
        other = normed if self.mlp_norm is None else self.mlp_norm(run, x)
        return x + self.mix(run, normed) + self.mlp(run, other)
