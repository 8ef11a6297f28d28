"""The operations that models are made of. Pure; every one traces, exports and differentiates.

Shape key: B batch, T tokens this call, S capacity, E model width, F MLP width, H query heads,
K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from funcrt.config import RopeConfig
from funcrt.params import Params, dequantize, quantization_of

import mlx.core as mx


def embed(params: Params, name: str, tokens: mx.array, width: int, dtype: mx.Dtype) -> mx.array:
    """Rows of the (possibly packed) matrix `name`: `[B, T]` -> `[B, T, E]`.

    Ids are clipped to the vocabulary, since MLX reads past the end of the table without a check;
    hosts refuse such ids before they come here.
    """
    tokens = mx.clip(tokens, 0, params[f"{name}.weight"].shape[0] - 1)
    packing = quantization_of(params, name, width)
    if packing is None:
        return params[f"{name}.weight"][tokens].astype(dtype)
    rows = {
        f"{name}.{part}": params[f"{name}.{part}"][tokens]
        for part in ("weight", "scales", "biases")
    }
    return dequantize(rows, name, packing).astype(dtype)


def linear(params: Params, name: str, x: mx.array) -> mx.array:
    """`x [..., I]` -> `[..., O]` by the dense or packed matrix `name` `[O, I]` and its bias."""
    weight = params[f"{name}.weight"]
    packing = quantization_of(params, name, x.shape[-1])
    if packing is None:
        y = x @ weight.astype(x.dtype).T
    else:
        y = mx.quantized_matmul(
            x,
            weight,
            params[f"{name}.scales"].astype(x.dtype),
            params[f"{name}.biases"].astype(x.dtype),
            transpose=True,
            group_size=packing.group_size,
            bits=packing.bits,
        )
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias.astype(x.dtype)


def fused_linear(params: Params, fused: str, members: tuple[str, ...], x: mx.array) -> mx.array:
    """The outputs of several linears side by side: one product if `prepare` stacked them."""
    if f"{fused}.weight" in params:
        return linear(params, fused, x)
    return mx.concatenate([linear(params, member, x) for member in members], axis=-1)


def rms_norm(params: Params, name: str, x: mx.array, eps: float) -> mx.array:
    """Root mean square norm (arXiv:1910.07467), accumulated in float32."""
    return mx.fast.rms_norm(x, params[f"{name}.weight"].astype(x.dtype), eps)


def attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array, scale: float) -> mx.array:
    """Grouped-query attention: q `[B,H,T,D]`, k and v `[B,K,S,D]`, mask bool `[B,1,T,S]`."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def masked_softmax(scores: mx.array, mask: mx.array) -> mx.array:
    """Softmax over the last axis of what a bool `mask` shows, accumulated in float32."""
    lowest = mx.finfo(scores.dtype).min
    return mx.softmax(mx.where(mask, scores, lowest), axis=-1, precise=True)


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": lambda x: x * mx.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + mx.erf(x / math.sqrt(2))),
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "relu": lambda x: mx.maximum(x, 0),
}


# --- rotary embedding (arXiv:2104.09864) ---------------------------------------------------------


class Rotary(NamedTuple):
    """Rotary embedding for one call; made once, applied in every layer.

    Attributes:
        positions: int32 `[B]` (position of the first packed token) or `[B, T]`.
        periods: float32 `[D/2]`, radians per turn inverted, shared by all rows; or None.
        angles: float32 `[B, 1, T, D/2]` where frequencies differ by row; or None.
    """

    positions: mx.array
    periods: mx.array | None
    angles: mx.array | None

    def __call__(self, x: mx.array) -> mx.array:
        """Rotate `x [B, N, T, D]` (halves, not pairs)."""
        if self.periods is None:
            return self._rotate(x)
        dims = x.shape[-1]
        if self.positions.ndim == 1:
            return mx.fast.rope(
                x, dims, traditional=False, base=None, scale=1.0,
                offset=self.positions, freqs=self.periods,
            )  # fmt: skip
        batch, heads, tokens, _ = x.shape
        folded = x.swapaxes(1, 2).reshape(batch * tokens, heads, 1, dims)
        folded = mx.fast.rope(
            folded, dims, traditional=False, base=None, scale=1.0,
            offset=self.positions.reshape(-1), freqs=self.periods,
        )  # fmt: skip
        return folded.reshape(batch, tokens, heads, dims).swapaxes(1, 2)

    def _rotate(self, x: mx.array) -> mx.array:
        assert self.angles is not None
        cos, sin = mx.cos(self.angles).astype(x.dtype), mx.sin(self.angles).astype(x.dtype)
        low, high = mx.split(x, 2, axis=-1)
        return mx.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def make_rotary(
    rope: RopeConfig,
    dims: int,
    offset: mx.array,
    total: mx.array,
    tokens: int,
    positions: mx.array | None,
) -> Rotary:
    """Rotary embedding of one call.

    Args:
        rope: base and scaling.
        dims: D.
        offset: int32 `[B]`, lengths before the call.
        total: int32 `[B]`, lengths after it (`dynamic` picks its base by it).
        tokens: T.
        positions: int32 `[B, T]`, or None where position = offset + index.
    """
    if rope.kind == "dynamic":
        where = positions
        if where is None:
            where = offset[:, None] + mx.arange(tokens, dtype=mx.int32)
        else:
            total = mx.max(where, axis=1) + 1
        inverse = _dynamic_frequencies(rope, dims, total)  # [B,D/2]
        angles = where.astype(mx.float32)[:, None, :, None] * inverse[:, None, None]
        return Rotary(where, None, angles)
    periods = [1.0 / f for f in rope_frequencies(rope, dims)]
    return Rotary(offset if positions is None else positions, mx.array(periods), None)


def rope_frequencies(rope: RopeConfig, dims: int) -> list[float]:
    """Radians per position of each of the D/2 planes, in double precision.

    `linear` divides them all (arXiv:2306.15595); `llama3` divides the long waves and blends the
    middle ones (as released with Llama 3.1); `yarn` blends by turns over the original context
    (arXiv:2309.00071 §3.2).
    """
    plain = [rope.theta ** (-2 * i / dims) for i in range(dims // 2)]
    if rope.kind == "linear":
        return [f / rope.factor for f in plain]
    if rope.kind == "llama3":
        return [_llama3_frequency(rope, f) for f in plain]
    if rope.kind == "yarn":
        keep = _yarn_ramp(rope, dims)
        return [f / rope.factor * (1 - k) + f * k for f, k in zip(plain, keep, strict=True)]
    return plain


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


def _dynamic_frequencies(rope: RopeConfig, dims: int, total: mx.array) -> mx.array:
    """`[B, D/2]`: the base grows with each row's length past the original context (NTK-aware)."""
    length = mx.maximum(total, rope.original_max_positions).astype(mx.float32)
    stretch = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
    base = rope.theta * stretch ** (dims / (dims - 2))  # [B]
    exponent = mx.arange(0, dims, 2, dtype=mx.float32) / dims
    return mx.exp(-mx.log(base)[:, None] * exponent)


def rope_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 except for yarn (arXiv:2309.00071 §3.4)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
