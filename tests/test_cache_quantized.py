"""Packed keys and values: attention over what packing leaves of them."""

from __future__ import annotations

from funcrt import cache as caches
from funcrt import masks
from funcrt.attention import Attend
from funcrt.cache import CacheLayout
from funcrt.errors import CacheError
from tests.cache_calls import feed, feed_pieces, model_of, tokens_of
from tests.cache_histories import poison
from tests.helpers import TOLERANCE, Array, relative_error, to_numpy

import mlx.core as mx
import numpy as np
import pytest


def unpack(array: mx.array, bits: int, group: int) -> Array:
    """What is left of the values of an array after packing."""
    packed = mx.quantize(array, group_size=group, bits=bits)
    return to_numpy(mx.dequantize(*packed, group_size=group, bits=bits))


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_attention_is_attention_over_unpacked_values(bits, width):
    """Batched, grouped heads, padded, two calls; against numpy."""
    layout = CacheLayout(kv_bits=bits)
    entries = caches.attention_entries(0, 2, width, "float32", layout)
    state = caches.init_cache((*caches.row_entries(layout), *entries), 2, 12)
    group = 64 if width % 64 == 0 else 32
    assert state["layers.0.keys"].shape == (2, 2, 12, width * bits // 32)
    assert state["layers.0.keys.scales"].shape == (2, 2, 12, width // group)
    rng = np.random.default_rng(0)
    valid = [[1, 1, 1, 1], [1, 1, 0, 0]]  # packed as the model would
    past: list[list[Array]] = [[], []]
    for _ in range(2):
        q = mx.array(rng.normal(size=(2, 6, 4, width)).astype(np.float32))
        k, v = (mx.array(rng.normal(size=(2, 2, 4, width)).astype(np.float32)) for _ in "kv")
        state = poison(state)
        call = caches.place(masks.causal(mx.array(valid), state["lengths"], 12), state["lengths"])
        attend = Attend(call, state)
        out = to_numpy(attend(0, q, k, v, scale=0.3))
        state = attend.state
        pair = np.stack([unpack(k, bits, group), unpack(v, bits, group)])  # [2,B,K,T,D]
        for row, count in enumerate(map(sum, valid)):
            past[row].append(pair[:, row, :, :count])
            keys, values = (a.repeat(3, axis=0) for a in np.concatenate(past[row], axis=2))
            total = keys.shape[1]
            see = np.arange(total) <= np.arange(total - count, total)[:, None]
            scores = to_numpy(q)[row, :, :count] @ keys.swapaxes(-1, -2) * 0.3
            scores = np.exp(np.where(see, scores, -np.inf))
            expected = scores / scores.sum(-1, keepdims=True) @ values
            assert relative_error(out[row, :, :count], expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_caches_keep_the_compute_dtype(dtype, bits):
    model = model_of("llama", dtype)
    state = model.init_cache(2, 16, kv_bits=bits)
    logits, after = feed(model, poison(state), [tokens_of(5), tokens_of(3, 1)])
    assert str(logits.dtype).endswith(dtype)
    assert [array.dtype for array in after.values()] == [array.dtype for array in state.values()]
    assert str(after["layers.1.values.scales"].dtype).endswith(dtype)
    assert np.isfinite(to_numpy(logits)).all()
    exact, _ = feed(model_of("llama"), model_of("llama").init_cache(2, 16), [tokens_of(5), [1]])
    assert relative_error(logits[0], exact[0]) <= {8: 0.05, 4: 0.5}[bits]


def test_quantized_caches_err_little_and_less_with_more_bits():
    model, tokens = model_of("llama"), tokens_of(300)
    exact, _ = feed(model, model.init_cache(1, 301), [tokens])
    errors = {}
    for bits in (8, 4):
        state = model.init_cache(1, 301, kv_bits=bits)
        logits, _ = feed_pieces(model, state, tokens, [200, 99, 1])
        errors[bits] = relative_error(logits, exact[0])
    assert 0 < errors[8] <= 0.02
    assert errors[8] * 5 <= errors[4] <= 0.2


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_caches_trim_and_fork(bits):
    model, tokens = model_of("llama"), tokens_of(20)
    _, state = feed(model, model.init_cache(3, 24, kv_bits=bits), [tokens[:9], [], tokens[:2]])
    state = caches.trim(caches.fork(state, 0, 1), [3, 0, 2])
    logits, _ = feed(model, poison(state), [tokens[10:14], tokens[9:13], tokens[:3]])
    for row, text in enumerate([[*tokens[:6], *tokens[10:14]], tokens[:13], tokens[:3]]):
        alone, _ = feed(model, model.init_cache(1, 24, kv_bits=bits), [text])
        count = 3 if row == 2 else 4
        tipped = {8: 1e-2, 4: 1e-1}[bits]  # a value that rounds to its neighbour
        assert relative_error(logits[row, :count], alone[0, -count:]) <= tipped


def test_quantized_caches_say_which_heads_and_bits_they_take():
    model = model_of("llama", head_dim=16)
    with pytest.raises(CacheError, match="head size divisible by 32, this model has 16"):
        model.init_cache(1, 16, kv_bits=8)
    for bits in (2, 16, 0, True):
        with pytest.raises(CacheError, match="kv_bits: expected 8, 4 or None"):
            model_of("llama").init_cache(1, 16, kv_bits=bits)
