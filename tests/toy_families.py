"""Three tiny families for kinds of cache that no real family here has yet, each with an oracle.

| model_type | layers |
|---|---|
| `toy_latent` | two of latent attention (arXiv:2405.04434 §2.1) with a shared rotary key |
| `toy_hybrid` | a gated linear recurrence behind a short convolution, then full attention |
| `toy_recurrent` | two such recurrences, no slots at all |

The recurrence is that of arXiv:2405.21060 (§6, one block): `h = exp(-a dt) h + dt x b^T` and
`y = h c`, with `dt` a softplus. The oracles walk token by token in float64, without cache or masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from funcrt import cache, models, ops
from funcrt.attention import Attend
from funcrt.cache import CacheEntry, CacheLayout, CacheSpec, CacheState, Placement
from funcrt.config import ModelConfig
from funcrt.model import Model
from funcrt.ops.rotary import Rotary, make_rotary
from funcrt.params import FLOATS, Params, ParamSpec
from tests.helpers import TINY, Array, to_numpy

import mlx.core as mx
import numpy as np
import pytest

LATENT, ROPE = 16, 8  # widths of the latent and of the rotated part
KEPT = 3  # inputs that the convolution keeps: it is one wider
STATE = 4  # N of the recurrence
LAYERS = {
    "toy_latent": ("latent", "latent"),
    "toy_hybrid": ("recurrent", "attention"),
    "toy_recurrent": ("recurrent", "recurrent"),
}
CONFIG = replace(TINY, vocab_size=64, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=32)


def param_spec(config: ModelConfig) -> ParamSpec:
    e, h, d = config.hidden_size, config.num_heads, config.head_dim
    inner = h * d + 2 * STATE
    shapes: dict[str, ParamSpec] = {
        "latent": {
            "q.weight": (h * (d + ROPE), e),
            "kv_down.weight": (LATENT + ROPE, e),
            "k_up.weight": (h * d, LATENT),
            "v_up.weight": (h * d, LATENT),
        },
        "attention": {"qkv.weight": ((h + 2 * config.num_kv_heads) * d, e)},
        "recurrent": {
            "in.weight": (inner + h, e),
            "conv": (KEPT + 1, inner),
            "decay": (h,),
            "step": (h,),
        },
    }
    spec: ParamSpec = {"embed.weight": (config.vocab_size, e)}
    for name, kind in _layers(config):
        spec[f"{name}.norm.weight"] = (e,)
        spec.update({f"{name}.{part}": shape for part, shape in shapes[kind].items()})
        spec[f"{name}.out.weight"] = (e, h * d)
    spec["norm.weight"] = (e,)
    return spec


def cache_spec(config: ModelConfig, layout: CacheLayout) -> CacheSpec:
    entries = [*cache.row_entries(layout)]
    heads, width, dtype = config.num_heads, config.head_dim, config.dtype
    for i, (name, kind) in enumerate(_layers(config)):
        if kind == "attention":
            entries += cache.attention_entries(i, config.num_kv_heads, width, dtype, layout)
        elif kind == "latent":
            entries.append(CacheEntry(f"{name}.latent", ("B", 1, "S", LATENT), dtype))
            entries.append(CacheEntry(f"{name}.latent_rope", ("B", 1, "S", ROPE), dtype))
        else:
            inner = heads * width + 2 * STATE
            entries.append(CacheEntry(f"{name}.conv_inputs", ("B", KEPT, inner), dtype))
            entries.append(CacheEntry(f"{name}.state", ("B", heads, width, STATE), "float32"))
    return tuple(entries)


def fusions(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    return {}


def hidden(
    config: ModelConfig,
    params: Params,
    tokens: mx.array,
    mask: cache.Sight,
    cache_state: CacheState,
    positions: mx.array | None = None,
) -> tuple[mx.array, CacheState]:
    cache.check_call(tokens, mask, cache_state, positions)
    call = cache.place(mask, cache_state["lengths"], positions)
    if "recurrent" in LAYERS[config.model_type]:
        cache.check_recurrent(call)
    dims = ROPE if config.model_type == "toy_latent" else config.head_dim
    rotary = make_rotary(
        config.rope, dims, call.offset, call.lengths, tokens.shape[1], call.positions
    )
    packed = cache.pack(tokens, call)
    x = ops.embed(params, "embed", packed, config.hidden_size, FLOATS[config.dtype])
    x = mx.where(call.real[..., None], x, 0)
    attend = Attend(call, cache_state)
    for i, (name, kind) in enumerate(_layers(config)):
        normed = ops.rms_norm(params, f"{name}.norm", x, config.norm_eps)
        if kind == "latent":
            out = _latent(config, params, i, normed, rotary, attend)  # [B,H,T,D]
        elif kind == "attention":
            out = _attention(config, params, i, normed, rotary, attend)
        else:
            out = _recurrent(config, params, i, normed, call, attend)
        out = out.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        x = x + ops.linear(params, f"{name}.out", out)
    return cache.unpack(ops.rms_norm(params, "norm", x, config.norm_eps), call), attend.state


def unembed(config: ModelConfig, params: Params, x: mx.array) -> mx.array:
    return ops.linear(params, "embed", x)


def _layers(config: ModelConfig) -> list[tuple[str, str]]:
    return [(f"layers.{i}", kind) for i, kind in enumerate(LAYERS[config.model_type])]


def _latent(
    config: ModelConfig, params: Params, i: int, x: mx.array, rotary: Rotary, attend: Attend
) -> mx.array:
    name, heads, width = f"layers.{i}", config.num_heads, config.head_dim
    q = ops.linear(params, f"{name}.q", x).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
    down = ops.linear(params, f"{name}.kv_down", x)[:, None]  # [B,1,T,C+R]
    k_up, v_up = (
        params[f"{name}.{part}.weight"].astype(x.dtype).reshape(heads, width, LATENT)
        for part in ("k_up", "v_up")
    )
    out = attend.latent(
        i,
        q[..., :width] @ k_up,
        rotary(q[..., width:]),
        down[..., :LATENT],
        rotary(down[..., LATENT:]),
        scale=(width + ROPE) ** -0.5,
    )  # [B,H,T,C]
    return out @ v_up.swapaxes(-1, -2)


def _attention(
    config: ModelConfig, params: Params, i: int, x: mx.array, rotary: Rotary, attend: Attend
) -> mx.array:
    heads, kv = config.num_heads, config.num_kv_heads
    qkv = ops.linear(params, f"layers.{i}.qkv", x).reshape(*x.shape[:2], heads + 2 * kv, -1)
    qkv = qkv.swapaxes(1, 2)
    qk, v = rotary(qkv[:, : heads + kv]), qkv[:, heads + kv :]
    return attend(i, qk[:, :heads], qk[:, heads:], v, scale=config.head_dim**-0.5)


def _recurrent(
    config: ModelConfig, params: Params, i: int, x: mx.array, call: Placement, attend: Attend
) -> mx.array:
    """All tokens of the call at once: pairs of them, and what they see of the old state."""
    name, heads, width = f"layers.{i}", config.num_heads, config.head_dim
    tokens = x.shape[1]
    both = ops.linear(params, f"{name}.in", x).astype(mx.float32)
    inner, step = both[..., :-heads], both[..., -heads:] + params[f"{name}.step"]
    buffer = attend.state[f"{name}.conv_inputs"]
    joined, kept = cache.conv_window(buffer, inner.astype(x.dtype), call)
    attend.replace(f"{name}.conv_inputs", kept)
    taps = params[f"{name}.conv"].astype(mx.float32)
    inner = sum(taps[j] * joined[:, j : j + tokens] for j in range(KEPT + 1))
    inner = inner * mx.sigmoid(inner)
    u = inner[..., : heads * width].reshape(*x.shape[:2], heads, width).swapaxes(1, 2)
    b, c = (part[:, None] for part in mx.split(inner[..., heads * width :], 2, axis=-1))

    step = cache.zero_padding(mx.logaddexp(step, 0), call).swapaxes(1, 2)  # [B,H,T]
    u = u * step[..., None]  # [B,H,T,D]
    decay = mx.cumsum(step * -mx.exp(params[f"{name}.decay"].astype(mx.float32))[:, None], axis=-1)
    order = mx.arange(tokens)
    apart = mx.where(order <= order[:, None], decay[..., None] - decay[..., None, :], -mx.inf)
    state = attend.state[f"{name}.state"]  # [B,H,D,N]
    out = (mx.exp(apart) * (c @ b.swapaxes(-1, -2))) @ u
    out = out + mx.exp(decay)[..., None] * (c @ state.swapaxes(-1, -2))
    left = mx.exp(decay[..., -1:] - decay)  # [B,H,T]
    added = (u * left[..., None]).swapaxes(-1, -2) @ b
    attend.replace(f"{name}.state", mx.exp(decay[..., -1])[..., None, None] * state + added)
    return out.astype(x.dtype)


# --- for tests ------------------------------------------------------------------------------------

FAMILY = SimpleNamespace(
    param_spec=param_spec, cache_spec=cache_spec, fusions=fusions, hidden=hidden, unembed=unembed
)


@contextmanager
def registered() -> Iterator[None]:
    """`Model` knows the toy families within this context."""
    with pytest.MonkeyPatch.context() as patch:
        for model_type in LAYERS:
            patch.setitem(models.FAMILIES, model_type, FAMILY)  # type: ignore[arg-type]
        yield


def make_toy(model_type: str, seed: int = 0, **changes: Any) -> Model:
    """A random model of a toy family, which must be registered."""
    config = replace(CONFIG, model_type=model_type, **changes)
    rng = np.random.default_rng(seed)
    params: Params = {}
    for name, shape in param_spec(config).items():
        mean, spread = {"norm.weight": (1.0, 0.2), "decay": (-1.0, 1.0), "step": (-1.0, 1.0)}.get(
            name.rpartition("norm.")[1] + name.rpartition(".")[2], (0.0, 1.0)
        )
        if len(shape) == 2 and "embed" not in name:
            spread = 1.5 / np.sqrt(KEPT if name.endswith("conv") else shape[1])
        array = rng.normal(mean, spread, shape).astype(np.float32)
        params[name] = mx.array(array).astype(FLOATS[config.dtype])
    return Model(config, params)


def oracle(model: Model, tokens: Sequence[int], visible: Array | None = None) -> Array:
    """Logits [T, V] of one sequence, in float64; `visible` [T, T] is causal by default."""
    config, weights = model.config, {k: to_numpy(a) for k, a in model.params.items()}
    count = len(tokens)
    see = np.tril(np.ones((count, count))) if visible is None else visible
    where = np.asarray(see).sum(1) - 1  # of a tree too

    def norm(x: Array, name: str) -> Array:
        size = np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
        return x / size * weights[f"{name}.weight"]

    def turn(x: Array) -> Array:  # [T,N,D]
        half = x.shape[-1] // 2
        angles = where[:, None] * config.rope.theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def attend(q: Array, k: Array, v: Array) -> Array:
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
        scores = np.exp(np.where(see, scores, -np.inf))
        return np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v)

    def latent(name: str, x: Array) -> Array:
        q = (x @ weights[f"{name}.q.weight"].T).reshape(count, config.num_heads, -1)
        down = x @ weights[f"{name}.kv_down.weight"].T
        k, v = (
            (down[:, :LATENT] @ weights[f"{name}.{part}_up.weight"].T).reshape(
                count, config.num_heads, -1
            )
            for part in "kv"
        )
        shared = turn(down[:, None, LATENT:]).repeat(config.num_heads, axis=1)
        rotated = turn(q[..., config.head_dim :])
        q = np.concatenate([q[..., : config.head_dim], rotated], -1)
        return attend(q, np.concatenate([k, shared], -1), v)

    def attention(name: str, x: Array) -> Array:
        heads, kv = config.num_heads, config.num_kv_heads
        qkv = (x @ weights[f"{name}.qkv.weight"].T).reshape(count, heads + 2 * kv, -1)
        k, v = (
            a.repeat(heads // kv, axis=1)
            for a in (turn(qkv[:, heads : heads + kv]), qkv[:, heads + kv :])
        )
        return attend(turn(qkv[:, :heads]), k, v)

    def recurrent(name: str, x: Array) -> Array:
        heads, width = config.num_heads, config.head_dim
        both = x @ weights[f"{name}.in.weight"].T
        state, rows = np.zeros((heads, width, STATE)), []
        past = np.zeros((KEPT + 1, both.shape[1] - heads))
        for line in both:
            past = np.concatenate([past[1:], line[None, :-heads]])
            inner = (past * weights[f"{name}.conv"]).sum(0)
            inner = inner / (1 + np.exp(-inner))
            u, (b, c) = inner[: heads * width], np.split(inner[heads * width :], 2)
            step = np.log1p(np.exp(line[-heads:] + weights[f"{name}.step"]))[:, None, None]
            fade = np.exp(-np.exp(weights[f"{name}.decay"])[:, None, None] * step)
            state = fade * state + step * u.reshape(heads, width, 1) * b
            rows.append(state @ c)
        return np.stack(rows)

    x = weights["embed.weight"][list(tokens)]
    layer = {"latent": latent, "attention": attention, "recurrent": recurrent}
    for name, kind in _layers(config):
        out = layer[kind](name, norm(x, f"{name}.norm")).reshape(count, -1)
        x = x + out @ weights[f"{name}.out.weight"].T
    return norm(x, "norm") @ weights["embed.weight"].T
