"""Tiny random llamas, and an independent float64 oracle of what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from funcrt import masks, models, sampling
from funcrt.cache import CacheState, state_size
from funcrt.config import ModelConfig, RopeConfig
from funcrt.model import Model
from funcrt.params import Params

import mlx.core as mx
import numpy as np

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

TINY = ModelConfig(
    model_type="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0, original_max_positions=2048),
    max_positions=2048,
)
KINDS = ("float32", "float16", "bfloat16", "affine")  # affine: 4 bits, groups of 32, in float32
POISON = 1e4  # in float16 one product away from infinity
TOLERANCE = 2e-5  # float32, as a share of the largest logit
ROUNDING = 1.25  # 16-bit: how far the error may exceed that of the plain run


def make_params(config: ModelConfig, kind: str = "float32", seed: int = 0) -> Params:
    """Weights under Hugging Face names; scores are large enough for attention to be peaked."""
    rng = np.random.default_rng(seed)
    params: Params = {}
    for name, shape in models.family("llama").param_spec(config).items():
        if len(shape) == 1:
            array = rng.normal(1.0 if "norm" in name else 0.0, 0.2, shape)
        elif "embed" in name:
            array = rng.normal(0.0, 1.0, shape)
        else:
            gain = 1.7 if "q_proj" in name or "k_proj" in name else 1.0
            array = rng.normal(0.0, gain / np.sqrt(shape[1]), shape)
        params[name] = mx.array(array.astype(np.float32))
    if kind == "affine":
        return quantize(params)
    return {name: array.astype(getattr(mx, kind)) for name, array in params.items()}


def quantize(params: Mapping[str, mx.array], group_size: int = 32, bits: int = 4) -> Params:
    """The same with every matrix packed."""
    packed: Params = {}
    for name, array in params.items():
        if array.ndim == 1:
            packed[name] = array
            continue
        base = name.removesuffix(".weight")
        parts = mx.quantize(array, group_size=group_size, bits=bits)
        packed.update(
            {f"{base}.{p}": a for p, a in zip(("weight", "scales", "biases"), parts, strict=True)}
        )
    return packed


def make_model(kind: str = "float32", seed: int = 0, **changes: Any) -> Model:
    """A tiny model that stores and computes in `kind` (packed weights compute in float32)."""
    config = replace(TINY, dtype="float32" if kind == "affine" else kind, **changes)
    return Model(config, make_params(config, kind, seed))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Ids of the tiny vocabulary."""
    return np.random.default_rng([seed, count]).integers(0, TINY.vocab_size, count).tolist()


def ids(*rows: Sequence[int]) -> mx.array:
    """Rows of one length as int32 [B, T]."""
    return mx.array(rows, dtype=mx.int32)


def poison(state: CacheState, value: float = POISON) -> CacheState:
    """The same state with `value` in every slot that holds no token, scratch included."""
    capacity = state_size(state)[1]
    slots = mx.arange(capacity)
    unused = (slots >= state["lengths"][:, None]) | (slots == capacity - 1)  # [B,S]
    return {
        name: array
        if name == "lengths"
        else mx.where(unused[:, None, :, None], value, array).astype(array.dtype)
        for name, array in state.items()
    }


def filled(state: CacheState, row: int) -> list[Array]:
    """What a row holds in the slots that its tokens took."""
    length = state["lengths"][row].item()
    return [to_numpy(a)[row, :, :length] for name, a in state.items() if name != "lengths"]


def to_numpy(array: mx.array | Array) -> Array:
    """float64, from any dtype."""
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32))
    return array.astype(np.float64)


def relative_error(array: mx.array | Array, reference: mx.array | Array) -> float:
    """Largest difference over the largest magnitude of the reference; infinite if not finite."""
    ours, theirs = to_numpy(array), to_numpy(reference)
    assert ours.shape == theirs.shape
    assert np.isfinite(theirs).all()
    if not np.isfinite(ours).all():
        return float("inf")
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def assert_same(ours: Mapping[str, mx.array], theirs: Mapping[str, mx.array]) -> None:
    """Bitwise, in names, dtypes, shapes and values."""
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        np.testing.assert_array_equal(to_numpy(array), to_numpy(theirs[name]), err_msg=name)


def run_plain(
    model: Model, tokens: Sequence[int], capacity: int | None = None
) -> tuple[Array, CacheState]:
    """Logits [T, V] and state of one row: `forward` on stored weights, eager, uncached."""
    capacity = len(tokens) + 1 if capacity is None else capacity
    row, column = mx.arange(len(tokens))[:, None], mx.arange(capacity)
    mask = (column <= row)[None, None]
    state = model.init_cache(1, capacity)
    logits, state = model.forward(model.params, ids(tokens), mask, state)
    return to_numpy(logits[0]), state


def generate_plain(model: Model, prompt: Sequence[int], count: int, **settings: Any) -> list[int]:
    """New tokens of one prompt: token by token, uncached, without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        last = run_plain(model, tokens)[0][-1:]
        row = sampling.make_settings(1, model.vocab_size, **settings)
        position = mx.array([len(tokens)])
        drawn = sampling.sample(mx.array(last.astype(np.float32)), row, position).tokens.item()
        tokens.append(drawn if settings else int(last.argmax()))
    return tokens[len(prompt) :]


# --- the oracle: llama in plain numpy, without cache, masks or anything else of ours --------------


def expand(model: Model) -> Weights:
    """The model's weights in float64, packed matrices (4 or 8 bits) unpacked by hand."""
    weights: Weights = {}
    for name, array in model.params.items():
        base, _, part = name.rpartition(".")
        if part == "bias" or f"{base}.scales" not in model.params:
            weights[name] = to_numpy(array)
        elif part == "weight":
            scales, biases = (to_numpy(model.params[f"{base}.{p}"]) for p in ("scales", "biases"))
            columns = model.spec[name][1]
            bits, group = array.shape[1] * 32 // columns, columns // scales.shape[1]
            shifts = np.arange(0, 32, bits, dtype=np.uint32)
            values = (np.array(array)[..., None] >> shifts) & (2**bits - 1)
            values = values.reshape(len(scales), -1)
            weights[name] = values * scales.repeat(group, 1) + biases.repeat(group, 1)
    return weights


def oracle(
    config: ModelConfig,
    weights: Weights,
    tokens: Sequence[int],
    positions: Sequence[int] | None = None,
    visible: Any = None,
) -> Array:
    """Logits [T, V] of one sequence; `visible` [T, T] is causal by default. Plain rope, silu."""
    count, half = len(tokens), config.head_dim // 2
    see = np.tril(np.ones((count, count), bool)) if visible is None else np.asarray(visible, bool)
    where = np.arange(count) if positions is None else np.array(positions)
    angles = where[:, None] * config.rope.theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]  # [T,1,D/2]

    def norm(x: Array, name: str) -> Array:
        size = np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
        return x / size * weights[f"{name}.weight"]

    def linear(x: Array, name: str) -> Array:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def turn(x: Array) -> Array:
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    x = weights["model.embed_tokens.weight"][list(tokens)]  # [T,E]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            linear(normed, f"{layer}.self_attn.{n}_proj").reshape(count, -1, config.head_dim)
            for n in "qkv"
        )
        k, v = (a.repeat(config.num_heads // config.num_kv_heads, axis=1) for a in (turn(k), v))
        scores = np.einsum("thd,shd->hts", turn(q), k) / np.sqrt(config.head_dim)
        scores = np.exp(np.where(see, scores, -np.inf))
        out = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v)
        x = x + linear(out.reshape(count, -1), f"{layer}.self_attn.o_proj")
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(normed, f"{layer}.mlp.gate_proj")
        gated = gate / (1 + np.exp(-gate)) * linear(normed, f"{layer}.mlp.up_proj")
        x = x + linear(gated, f"{layer}.mlp.down_proj")
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return linear(norm(x, "model.norm"), name)


def run_in_pieces(
    model: Model, tokens: mx.array, sizes: Sequence[int], state: CacheState
) -> mx.array:
    """Logits `[T, V]` of one prompt `[1, T]` fed in calls of these sizes, eager and uncompiled."""
    capacity = state_size(state)[1]
    pieces = []
    start = 0
    for size in sizes:
        piece = tokens[:, start : start + size]
        mask = masks.causal(mx.ones_like(piece), state["lengths"], capacity)
        logits, state = model.forward(model.params, piece, mask, state)
        pieces.append(logits[0])
        mx.eval(logits, state)
        start += size
    assert start == tokens.shape[1]
    assert state["lengths"].tolist() == [start]
    return mx.concatenate(pieces)
