"""Rotary position embedding (arXiv:2104.09864) of one call, in all its kinds. Traceable."""

from __future__ import annotations

import math
from typing import NamedTuple

from funcrt.config.rope import RopeConfig
from funcrt.machine import is_on_gpu

import mlx.core as mx


class Rotary(NamedTuple):
    """Rotary embedding for one call; made once, applied in every layer.

    Attributes:
        positions: int32 `[B]` (position of the first packed token) or `[B, T]`.
        periods: float32 `[R/2]`, positions per radian of each plane, shared by all rows; or None.
        waves: what `_pair` gives, where frequencies differ by row, or where MLX has no kernel that
            makes them on the way: made once, not in every layer. Or None.
        dims: R, how much of each head's width turns.
        interleaved: whether neighbours form the planes, not the two halves.
        factor: what is multiplied before it turns.
        past: bool `[B, 1, 1, 1]`, rows that turn by `long_periods`; or None.
        long_periods: like `periods`.
    """

    positions: mx.array
    periods: mx.array | None
    waves: tuple[mx.array, mx.array] | None
    dims: int
    interleaved: bool = False
    factor: float = 1.0
    past: mx.array | None = None
    long_periods: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """Turn the first R of the last axis of `x [B, N, T, D]`."""
        x = x if self.factor == 1.0 else self._scaled(x)
        if self.waves is not None:
            return self._turn_by_waves(x, *self.waves)
        assert self.periods is not None
        turned = self._turn(x, self.periods)
        if self.past is None or self.long_periods is None:
            return turned
        return mx.where(self.past, self._turn(x, self.long_periods), turned)

    def _scaled(self, x: mx.array) -> mx.array:
        rest = x.shape[-1] - self.dims
        if not rest:
            return x * self.factor
        return x * mx.array([self.factor] * self.dims + [1.0] * rest, dtype=x.dtype)

    def _turn(self, x: mx.array, periods: mx.array) -> mx.array:
        if self.positions.ndim == 1:
            return self._turn_by_periods(x, periods, self.positions)
        batch, heads, tokens, width = x.shape
        folded = x.swapaxes(1, 2).reshape(batch * tokens, heads, 1, width)
        folded = self._turn_by_periods(folded, periods, self.positions.reshape(-1))
        return folded.reshape(batch, tokens, heads, width).swapaxes(1, 2)

    def _turn_by_periods(self, x: mx.array, periods: mx.array, offset: mx.array) -> mx.array:
        return mx.fast.rope(
            x, self.dims, traditional=self.interleaved, base=None, scale=1.0,
            offset=offset, freqs=periods,
        )  # fmt: skip

    def _turn_by_waves(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        part, rest = x[..., : self.dims], x[..., self.dims :]
        sizes = (-1, 2) if self.interleaved else (2, self.dims // 2)
        pairs = part.reshape(*part.shape[:-1], *sizes)
        # A view backwards: to split and join again would be nodes that copy.
        others = pairs[..., ::-1] if self.interleaved else pairs[..., ::-1, :]
        turned = pairs * cos.astype(x.dtype) + others * sin.astype(x.dtype)
        turned = turned.reshape(part.shape)
        return turned if not rest.shape[-1] else mx.concatenate([turned, rest], axis=-1)


def make_rotary(
    rope: RopeConfig,
    width: int,
    offset: mx.array,
    total: mx.array,
    tokens: int,
    positions: mx.array | None,
) -> Rotary:
    """Rotary embedding of one call.

    Args:
        rope: base and scaling.
        width: D, of which `rope.partial` turns.
        offset: int32 `[B]`, lengths before the call.
        total: int32 `[B]`, lengths after it (`dynamic` and `longrope` choose by it).
        tokens: T.
        positions: int32 `[B, T]`, or None where position = offset + index.
    """
    dims = rotary_dims(rope, width)
    where, longest = offset, total
    if positions is not None:
        where, longest = positions, mx.max(positions, axis=1) + 1
    if rope.kind == "dynamic":
        waves = _dynamic_waves(rope, dims, where, longest, tokens)
        return Rotary(where, None, waves, dims, rope.interleaved)
    rotary = Rotary(
        where, _periods(frequencies(rope, dims)), None, dims, rope.interleaved,
        attention_factor(rope),
    )  # fmt: skip
    if rope.kind == "longrope":
        past = longest > rope.original_max_positions
        rotary = rotary._replace(
            past=past[:, None, None, None],
            long_periods=_periods(_divided(rope, dims, rope.long_factor)),
        )
    return rotary if is_on_gpu() else rotary._replace(waves=_waves(rotary, tokens))


def _waves(rotary: Rotary, tokens: int) -> tuple[mx.array, mx.array]:
    """Of what `mx.fast.rope` computes where it is no kernel, to the bit; see `_pair`."""
    assert rotary.periods is not None
    rates = 1.0 / rotary.periods
    if rotary.past is not None and rotary.long_periods is not None:
        rates = mx.where(rotary.past, 1.0 / rotary.long_periods, rates)  # [B,1,1,R/2]
    return _pair(_each(rotary.positions, tokens) * rates, rotary.interleaved)


def _pair(angles: mx.array, interleaved: bool) -> tuple[mx.array, mx.array]:
    """Cos, and sin with the sign that each half of a pair takes of the other, float32.

    `[B, 1, T, R/2]` -> `[B, 1, T, 1, R/2]` and `[B, 1, T, 2, R/2]`; interleaved `[B, 1, T, R/2, 1]`
    and `[B, 1, T, R/2, 2]`.
    """
    axis = -1 if interleaved else -2
    cos, sin = (mx.expand_dims(f(angles), axis) for f in (mx.cos, mx.sin))
    return cos, mx.concatenate([-sin, sin], axis=axis)


def _each(positions: mx.array, tokens: int) -> mx.array:
    """Float32 `[B, 1, T, 1]`, of positions `[B, T]` or of the first of each row."""
    if positions.ndim == 1:
        positions = positions[:, None] + mx.arange(tokens, dtype=mx.int32)
    return positions.astype(mx.float32)[:, None, :, None]


def _periods(frequencies: list[float]) -> mx.array:
    return mx.array([1.0 / frequency for frequency in frequencies])


def rotary_dims(rope: RopeConfig, width: int) -> int:
    """R: how much of heads of this width turns."""
    return int(width * rope.partial)


def frequencies(rope: RopeConfig, dims: int) -> list[float]:
    """Radians per position of each of the R/2 planes, in double precision.

    `linear` divides them all (arXiv:2306.15595); `llama3` divides the long waves and blends the
    middle ones (as released with Llama 3.1); `yarn` blends by turns over the original context
    (arXiv:2309.00071 §3.2); `longrope` divides each by its own (arXiv:2402.13753), here those of
    texts within the original context.
    """
    plain = [rope.theta ** (-2 * i / dims) for i in range(dims // 2)]
    if rope.kind == "linear":
        return [f / rope.factor for f in plain]
    if rope.kind == "llama3":
        return [_llama3_frequency(rope, f) for f in plain]
    if rope.kind == "yarn":
        keep = _yarn_ramp(rope, dims)
        return [f / rope.factor * (1 - k) + f * k for f, k in zip(plain, keep, strict=True)]
    if rope.kind == "longrope":
        return _divided(rope, dims, rope.short_factor)
    return plain


def _divided(rope: RopeConfig, dims: int, divisors: tuple[float, ...]) -> list[float]:
    return [rope.theta ** (-2 * i / dims) / divisors[i] for i in range(dims // 2)]


def _llama3_frequency(rope: RopeConfig, frequency: float) -> float:
    turns = rope.original_max_positions * frequency / (2 * math.pi)
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    if turns > rope.high_freq_factor:
        return frequency
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn_ramp(rope: RopeConfig, dims: int) -> list[float]:
    """Share of the unscaled frequency kept in each plane: 1 for fast planes, 0 for slow ones."""

    def plane(turns: float) -> float:
        wave = rope.original_max_positions / (turns * 2 * math.pi)
        return dims * math.log(wave) / (2 * math.log(rope.theta))

    low, high = plane(rope.beta_fast), plane(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001  # the paper's ramp divides by zero where both ends meet
    return [1 - min(max((i - low) / width, 0.0), 1.0) for i in range(dims // 2)]


def _dynamic_waves(
    rope: RopeConfig, dims: int, where: mx.array, total: mx.array, tokens: int
) -> tuple[mx.array, mx.array]:
    """What turns each row by a base that grows with its length past the original context.

    That is NTK-aware; see `_pair`.
    """
    length = mx.maximum(total, rope.original_max_positions).astype(mx.float32)
    stretch = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
    base = rope.theta * stretch ** (dims / (dims - 2))  # [B]
    exponent = mx.arange(0, dims, 2, dtype=mx.float32) / dims
    inverse = mx.exp(-mx.log(base)[:, None] * exponent)  # [B,R/2]
    return _pair(_each(where, tokens) * inverse[:, None, None], rope.interleaved)


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 but for yarn and longrope (papers: `RopeConfig`)."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
    if rope.mscale and rope.mscale_all_dim:
        return yarn_magnitude(rope, rope.mscale) / yarn_magnitude(rope, rope.mscale_all_dim)
    return yarn_magnitude(rope, 1.0)


def yarn_magnitude(rope: RopeConfig, scale: float) -> float:
    """What a context stretched by `rope.factor` multiplies attention by (arXiv:2309.00071 §3.4)."""
    return 0.1 * scale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
