"""Pure forms of single functions of mlx-lm that read values or need Metal kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from converters.functional.caches import Call
from converters.functional.muse_spark import KERNELS
from funcrt.cache import give_sight

import mlx.core as mx


def mix_all_experts(self: Any, x: mx.array) -> mx.array:
    """dbrx: the chosen experts of each token, found by running all of them over all tokens.

    The module picks experts by reading their numbers.
    """
    gates = mx.softmax(self.router(x).astype(mx.float32), axis=-1)  # [..., X]
    chosen = self.num_experts_per_tok
    index = mx.argpartition(-gates, kth=chosen - 1, axis=-1)[..., :chosen]
    scores = mx.take_along_axis(gates, index, axis=-1)
    scores = scores / mx.sum(mx.abs(scores), axis=-1, keepdims=True)
    weights = mx.put_along_axis(mx.zeros_like(gates), index, scores, axis=-1).astype(x.dtype)
    outputs = mx.stack([expert(x) for expert in self.experts], axis=-1)  # [..., E, X]
    return mx.sum(outputs * weights[..., None, :], axis=-1)


def multiply_ternary(self: Any, x: mx.array, packed_weights: mx.array) -> mx.array:
    """BitNet's product: four weights of -1, 0, 1 in each byte, one quarter of the rows apart."""
    quarters = [((packed_weights >> shift) & 3).astype(x.dtype) - 1 for shift in (0, 2, 4, 6)]
    product = x @ mx.concatenate(quarters, axis=0).T
    scale = self.weight_scale.astype(x.dtype)
    scaled: mx.array = product / scale if self.invert_weight_scales else product * scale
    return scaled


def make_dynamic_rope(call: Call) -> Callable[..., mx.array]:
    """Rotary embedding whose base grows with the length of each row so far."""

    def rotate(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
        dims, limit = self.dims, self.max_position_embeddings
        length = mx.maximum(call.placement.lengths, limit).astype(mx.float32)  # [B]
        stretch = self.factor * length / limit - (self.factor - 1)
        base = self.base * stretch ** (dims / (dims - 2))
        half = mx.arange(dims // 2, dtype=mx.float32) * (2 / dims)
        inverse = mx.exp(-half * mx.log(base)[:, None])  # [B, dims / 2]
        step = mx.arange(x.shape[-2], dtype=mx.float32)
        position = mx.array(offset).reshape(-1, 1).astype(mx.float32) + step  # [B,T]
        angles = (position[..., None] * inverse[:, None])[:, None]  # [B,1,T,dims / 2]
        cos, sin = mx.cos(angles).astype(x.dtype), mx.sin(angles).astype(x.dtype)
        turned, kept = x[..., :dims], x[..., dims:]
        if self.traditional:
            a, b = turned[..., ::2], turned[..., 1::2]
            out = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
        else:
            a, b = mx.split(turned, 2, axis=-1)
            out = mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return mx.concatenate([out, kept], axis=-1)

    return rotate


def make_block_attention(call: Call) -> Callable[..., mx.array]:
    """Phi-3-small: attention over near blocks and every n-th block, which differs by head.

    The module counts blocks back from the end of the keys, and adds boolean masks as numbers.
    """

    def attend(
        self: Any, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array
    ) -> mx.array:
        batch, heads, tokens, _ = q.shape
        size, stride = self.blocksparse_block_size, self.blocksparse_vert_stride
        position = call.placement.offset[:, None] + mx.arange(tokens)
        mine = (position // size)[:, None, :, None]  # [B,1,T,1]
        theirs = mx.arange(k.shape[2]) // size  # [S]
        head = mx.arange(1, heads + 1)[:, None, None]
        near = mine - theirs < self.blocksparse_num_local_blocks
        seen = call.mask() & (near | ((theirs + head) % stride == 0))  # [B,H,T,S]
        seen = give_sight(seen, call.placement.slots)
        q = (q * scale).reshape(batch, self.n_kv_heads, -1, tokens, q.shape[3])
        scores = (q @ k[:, :, None].swapaxes(-1, -2)).reshape(batch, heads, tokens, -1)
        scores = mx.where(seen, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        weights = mx.softmax(scores, axis=-1, precise=True)
        weights = weights.reshape(batch, self.n_kv_heads, -1, *weights.shape[2:])
        return (weights @ v[:, :, None]).reshape(batch, heads, tokens, -1)

    return attend


def make_reusing_attention(call: Call) -> Callable[..., mx.array]:
    """AFM 7: attention over the keys of another layer, whose end is taken for the last token."""

    def attend(
        self: Any, x: mx.array, keys: mx.array, values: mx.array, mask: Any = None
    ) -> mx.array:
        batch, tokens, _ = x.shape
        q = self.q_proj(x).reshape(batch, tokens, self.n_heads, -1).swapaxes(1, 2)
        q = self.q_norm(self.rope(q, offset=call.placement.offset))
        out = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=self.scale, mask=call.widest(mask)
        )
        projected: mx.array = self.out_proj(out.swapaxes(1, 2).reshape(batch, tokens, -1))
        return projected

    return attend


def _make_start(original: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """RecurrentGemma's unit, which takes the first token of a text differently, row by row.

    Written out for one token: running the module's own code for both cases and choosing gives a
    graph that MLX 0.32.4 cannot compile when it holds two of them (IndexError).
    """

    def run(self: Any, x: mx.array, cache: mx.array | None = None) -> Any:
        if cache is None or x.shape[1] > 1:
            return original(self, x, cache)

        def gate(weight: mx.array, bias: mx.array) -> mx.array:
            heads = x.reshape(-1, 1, self.num_heads, self.head_dim).swapaxes(1, 2)  # [B,H,1,D]
            return mx.sigmoid(((heads @ weight).swapaxes(1, 2) + bias).flatten(2, 3))

        first = (call.placement.offset == 0)[:, None, None]  # [B,1,1]
        input_gate = gate(self.input_gate_weight, self.input_gate_bias)
        decay = -8.0 * gate(self.recurrent_gate_weight, self.recurrent_gate_bias)
        decay = decay * mx.logaddexp(self.recurrent_param, 0)
        scale = mx.where(first, 1.0, mx.sqrt(1 - mx.exp(2 * decay)))
        new = x * input_gate * scale.astype(x.dtype)
        y = mx.where(first, 0.0, mx.exp(decay) * cache[:, None]) + new
        return y, y[:, -1]

    return run


_LENGTHS = 11  # arguments of ssm_update with lengths among them


class ArrayRanges:
    """`numpy` for a module that makes positions with it (GPT-BigCode)."""

    @staticmethod
    def arange(start: Any, stop: Any) -> mx.array:
        """Int32 `[B, N]` between two offsets."""
        steps = mx.arange(stop.distance - start.distance, dtype=mx.int32)
        return mx.array(start)[:, None] + steps


class _CountsFromTheEnd:
    """`mlx.core` for a module that counts the newest slots back from the end of the buffer.

    Of MiniMax M3, whose only range between two numbers those slots are.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def arange(self, start: int, stop: int | None = None, **options: Any) -> mx.array:
        """A range from zero; or the slots of the call's tokens, int32 `[B, T, 1]`."""
        if stop is None:
            return mx.arange(start, **options)
        steps = mx.arange(stop - start, dtype=mx.int32)
        return (self._call.placement.offset[:, None] + steps)[..., None]


def runs_metal() -> bool:
    """Whether modules keep their Metal kernels, which export for that device class."""
    return mx.default_device() == mx.gpu and bool(mx.metal.is_available())


def replacements(call: Call) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Class, attribute and replacement, of the modules of mlx-lm that are loaded."""
    for path, attribute, function in (
        ("dbrx.SparseMoeBlock", "__call__", mix_all_experts),
        ("bitlinear_layers.BitLinear", "execute_matmul_kernel", multiply_ternary),
        ("phi3small.Attention", "_block_sparse_attention", make_block_attention(call)),
        ("afm7.KVReuseAttention", "__call__", make_reusing_attention(call)),
        ("rope_utils.DynamicNTKScalingRoPE", "__call__", make_dynamic_rope(call)),
    ):
        if function is multiply_ternary and runs_metal():
            continue
        module, _, name = path.partition(".")
        owner = getattr(sys.modules.get(f"mlx_lm.models.{module}"), name, None)
        if owner is not None:
            yield owner, attribute, function
    unit: Any = getattr(sys.modules.get("mlx_lm.models.recurrent_gemma"), "RGLRU", None)
    if unit is not None:
        yield unit, "__call__", _make_start(unit.__call__, call)


def globals_of_modules(call: Call) -> Iterator[tuple[Any, str, Any]]:
    """Names that loaded modules of mlx-lm find in their globals, and what to put there."""
    module: Any = sys.modules.get("mlx_lm.models.gpt_bigcode")
    if module is not None:
        yield module, "np", ArrayRanges
    module = sys.modules.get("mlx_lm.models.minimax_m3_vl")
    if module is not None:
        yield module, "mx", _CountsFromTheEnd(call)
    module = sys.modules.get("mlx_lm.models.muse_spark")
    if module is not None and not runs_metal():
        yield from ((module, name, kernel) for name, kernel in KERNELS.items())
    module = sys.modules.get("mlx_lm.models.nemotron_h")
    if module is not None:
        yield module, "ssm_update", _with_lengths(module.ssm_update, call)


def _with_lengths(update: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """A recurrence whose caller leaves out how many tokens are real."""

    def run(*args: Any, **options: Any) -> Any:
        if len(args) < _LENGTHS and "lengths" not in options:
            options["lengths"] = call.placement.lengths - call.placement.offset
        return update(*args, **options)

    return run
