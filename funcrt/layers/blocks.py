"""How norms, attention and MLP make a layer of a network."""

from __future__ import annotations

from dataclasses import dataclass

from funcrt.layers.part import Part, Run, apply

import mlx.core as mx


@dataclass(frozen=True)
class PreNorm(Part):
    """Norm, then attention (or what stands in its place), added; norm, then MLP, added."""

    FLAT = True

    mix_norm: Part
    mix: Part
    mlp_norm: Part
    mlp: Part
    scale: float = 1.0  # of what is added

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return self._add(run, self.mlp_norm, self.mlp, self._add(run, self.mix_norm, self.mix, x))

    def _add(self, run: Run, norm: Part, part: Part, x: mx.array) -> mx.array:
        if run.flat and self.scale == 1.0 and part.takes_flat:
            return part.branch(run, norm, x)
        out = apply(run, part, apply(run, norm, x))
        return x + (out if self.scale == 1.0 else out * self.scale)


@dataclass(frozen=True)
class PostNorm(Part):
    """Attention, then norm, added; MLP, then norm, added (OLMo 2, arXiv:2501.00656 §3.2)."""

    FLAT = True

    mix: Part
    mix_norm: Part
    mlp: Part
    mlp_norm: Part

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        x = x + apply(run, self.mix_norm, apply(run, self.mix, x))
        return x + apply(run, self.mlp_norm, apply(run, self.mlp, x))


@dataclass(frozen=True)
class Sandwich(Part):
    """Norms before and after both attention and MLP (Gemma 2, arXiv:2408.00118 §2)."""

    FLAT = True

    mix_norm: Part
    mix: Part
    mix_post_norm: Part
    mlp_norm: Part
    mlp: Part
    mlp_post_norm: Part

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        for parts in (
            (self.mix_norm, self.mix, self.mix_post_norm),
            (self.mlp_norm, self.mlp, self.mlp_post_norm),
        ):
            out = x
            for part in parts:
                out = apply(run, part, out)
            x = x + out
        return x


@dataclass(frozen=True)
class Parallel(Part):
    """Attention and MLP of the same input, both added; `mlp_norm` is None where they share one."""

    FLAT = True

    mix_norm: Part
    mix: Part
    mlp: Part
    mlp_norm: Part | None = None

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        normed = apply(run, self.mix_norm, x)
        other = normed if self.mlp_norm is None else apply(run, self.mlp_norm, x)
        return x + apply(run, self.mix, normed) + apply(run, self.mlp, other)
