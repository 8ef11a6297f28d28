"""Attention in the forms that CUDA gets, against the plain one; the kernel itself only there."""

from __future__ import annotations

from funcrt.cache import place_causal
from funcrt.ops import attention, few_rows, kernels, one_token, products
from funcrt.ops.attention import Scoring
from funcrt.packing import Quantization
from tests.cache_kinds import CAPACITY, empty, feed, model_of
from tests.helpers import relative_error

import mlx.core as mx
import pytest

cuda_only = pytest.mark.skipif(not kernels.are_there(), reason="a CUDA kernel")


def make(batch, heads, groups, slots, width, dtype=mx.float32):
    """Queries, keys, values and a mask with a third of the slots; scratch always shows."""
    keys = [mx.random.key(seed) for seed in range(4)]
    q = mx.random.normal((batch, heads, 1, width), key=keys[0]).astype(dtype)
    k, v = (
        mx.random.normal((batch, groups, slots, width), key=key).astype(dtype) for key in keys[1:3]
    )
    mask = mx.random.uniform(shape=(batch, 1, 1, slots), key=keys[3]) < 0.3
    return q, k, v, mask | (mx.arange(slots) == slots - 1)


def plain(q, k, v, mask, scale):
    q, k, v = (a.astype(mx.float32) for a in (q, k, v))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (4, 4), (6, 1)])
def test_hidden_slots_and_folded_heads_change_nothing(monkeypatch, heads, groups):
    q, k, v, mask = make(3, heads, groups, 17, 16)
    expected = plain(q, k, v, mask, 0.25)
    monkeypatch.setattr(attention, "is_on_cuda", lambda: True)
    hidden = attention.hide(mask, q.dtype)
    assert hidden.dtype == q.dtype
    assert relative_error(attention.attend(q, k, v, hidden, Scoring(0.25)), expected) < 1e-6


def test_one_token_is_split_and_joined_like_several():
    x = mx.arange(2 * 3 * 8).reshape(2, 3, 8).astype(mx.float32)
    whole = attention.split_heads(x, 4)
    for t in range(3):
        one = attention.split_heads(x[:, t : t + 1], 4)
        assert mx.array_equal(one, whole[:, :, t : t + 1])
        assert mx.array_equal(attention.split_heads(x[:, t], 4), one)
        assert mx.array_equal(attention.join_heads(one), x[:, t : t + 1])
        assert mx.array_equal(attention.join_heads(one, flat=True), x[:, t])
    assert mx.array_equal(attention.join_heads(whole), x)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 127, 128, 200])
def test_packed_products_of_all_numbers_of_rows(monkeypatch, rows):
    weight = mx.random.normal((96, 128), key=mx.random.key(1))
    packed = dict(
        zip(("a.weight", "a.scales", "a.biases"), mx.quantize(weight, 64, 4), strict=True)
    )
    x = mx.random.normal((rows, 1, 128), key=mx.random.key(2))
    expected = products.packed_product(packed, "a", x, Quantization(4, 64))
    monkeypatch.setattr(products, "is_on_cuda", lambda: True)
    found = products.packed_product(packed, "a", x, Quantization(4, 64))
    assert found.shape == (rows, 1, 96)
    assert relative_error(found, expected) < 1e-5


def test_what_the_kernel_is_for():
    def fits(heads, groups, width, dtype=mx.bfloat16, tokens=1):
        q = mx.zeros((2, heads, tokens, width), dtype)
        k = mx.zeros((2, groups, 32, width), dtype)
        return one_token.supports(q, k, k)

    assert fits(32, 8, 64)
    assert fits(18, 2, 128)  # nine that share a key, three at a time
    assert not fits(32, 8, 96)
    assert not fits(32, 8, 64, mx.float32)
    assert not fits(32, 8, 64, tokens=2)


@pytest.fixture
def looks(monkeypatch) -> list[str]:
    """As on CUDA, but for the kernel's contract instead of the kernel; how each layer looked."""
    found: list[str] = []

    def attend(q, keys, values, shown, scale):
        found.append("held" if isinstance(shown, one_token.Held) else "mask")
        if isinstance(shown, one_token.Held):
            column, (writes, sees) = mx.arange(keys.shape[2]), (n[:, None] for n in shown)
            assert mx.all(mx.maximum(writes + 1, sees) <= keys.shape[2])  # nothing beyond is read
            shown = mx.where(sees > 0, column < sees, column == writes)[:, None, None]
        assert mx.all(mx.any(shown, axis=-1))
        return plain(q, keys, values, shown, scale).astype(q.dtype)

    monkeypatch.setattr(kernels, "are_there", lambda: True)
    monkeypatch.setattr(few_rows, "supports", lambda x, weight: False)
    monkeypatch.setattr("funcrt.layers.part.make_waves", lambda rotary: None)
    monkeypatch.setattr(one_token, "supports", lambda q, keys, values: q.shape[2] == 1)
    monkeypatch.setattr(one_token, "attend", attend)
    return found


@pytest.mark.parametrize(("kind", "ways"), [
    ("full", {"held"}), ("window", {"mask"}), ("ring", {"mask"}), ("kv8", set()), ("kv4", set()),
])  # fmt: skip
def test_what_a_token_sees_is_what_its_mask_shows(looks, monkeypatch, kind, ways):
    """Rows that hold something or nothing, are full, sit out, or claim impossible lengths."""
    model, tokens = model_of(kind), mx.arange(6, dtype=mx.int32)[:, None]
    _, state = feed(model, empty(kind, 6), *[[1, 2, 3, 4, 5]] * 6)
    state["lengths"] = mx.array([5, 0, CAPACITY - 1, 4, -3, 2**31 - 1], mx.int32)
    valid = mx.array([True, True, True, False, True, True])[:, None]

    def decode() -> mx.array:
        call = place_causal(valid, state["lengths"], CAPACITY)
        return model.forward(model.params, tokens, call, dict(state))[0]

    found = decode()
    assert set(looks) == ways
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    sound = mx.array([0, 1, 2])
    assert relative_error(found[sound], decode()[sound]) < 1e-5
    assert mx.all(mx.isfinite(found))


def test_the_kernel_is_not_for_first_calls(looks):
    """They look at what is new, of which there is one; padding would be looked for in scratch."""
    model, tokens = model_of("full"), mx.array([[7], [8]])
    state, valid = empty("full", 2), mx.array([[True], [False]])
    logits = []
    for first in (True, False):
        call = place_causal(valid, state["lengths"], CAPACITY, first=first)
        logits.append(model.forward(model.params, tokens, call, dict(state))[0])
        assert bool(looks) is not first
    assert relative_error(logits[0][:1], logits[1][:1]) < 1e-5


@cuda_only
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    "sizes",
    [(1, 32, 8, 1024, 64), (16, 32, 8, 300, 128), (3, 8, 1, 100, 256), (2, 28, 4, 257, 128),
     (1, 8, 8, 512, 64), (1, 32, 8, 33000, 128), (5, 32, 8, 2304, 128),
     (2, 32, 8, 4096, 64), (2, 12, 4, 300, 64),
     (1, 5, 1, 40, 128), (2, 14, 2, 3, 256), (2, 8, 1, 9000, 128)],
)  # fmt: skip
def test_the_kernel(sizes, dtype):
    """Near float32, and bit for bit what a row is alone, whatever its hidden slots hold."""
    q, k, v, mask = make(*sizes, dtype)
    scale = sizes[-1] ** -0.5
    found = one_token.attend(q, k, v, mask, scale)
    tolerance = 5e-3 if dtype == mx.bfloat16 else 1e-3
    assert relative_error(found, plain(q, k, v, mask, scale)) < tolerance
    shown = mask.swapaxes(-1, -2)
    spoiled = [mx.where(shown, array, mx.array(mx.nan, dtype)) for array in (k, v)]
    for _ in range(2):  # the second time CUDA graphs are updated
        assert mx.array_equal(one_token.attend(q, *spoiled, mask, scale), found)
    alone = one_token.attend(q[-1:], k[-1:], v[-1:], mask[-1:], scale)
    assert mx.array_equal(alone, found[-1:])


@cuda_only
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    "sizes",
    [(5, 32, 8, 300, 128), (6, 8, 1, 100, 256), (5, 32, 8, 2304, 128), (5, 28, 4, 4096, 64)],
)  # fmt: skip
def test_what_is_held(sizes, dtype):
    """Without a mask: rows that hold much, little, one token, all there is room for, or nothing."""
    q, k, v, _ = make(*sizes, dtype)
    slots, scale = sizes[3], sizes[-1] ** -0.5
    sees = mx.array([slots // 2, 3, 1, slots - 1, 0, 7][: sizes[0]], mx.int32)
    writes = mx.where(sees > 0, sees - 1, slots - 1)
    column = mx.arange(slots)
    mask = (column < sees[:, None]) | ((sees[:, None] == 0) & (column == slots - 1))
    mask = mask[:, None, None]
    spoiled = [mx.where(mask.swapaxes(-1, -2), a, mx.array(mx.nan, dtype)) for a in (k, v)]
    held = one_token.Held(writes, sees)
    found = one_token.attend(q, *spoiled, held, scale)
    tolerance = 5e-3 if dtype == mx.bfloat16 else 1e-3
    assert relative_error(found, plain(q, k, v, mask, scale)) < tolerance
    for row in range(sizes[0]):
        one = slice(row, row + 1)
        held = one_token.Held(writes[one], sees[one])
        alone = one_token.attend(q[one], k[one], v[one], held, scale)
        assert mx.array_equal(alone, found[one])


@cuda_only
def test_a_long_cache_that_holds_little():
    """Most of the blocks that share it find nothing."""
    q, k, v, mask = make(2, 32, 8, 33000, 128, mx.bfloat16)
    mask = mx.broadcast_to(mx.arange(33000) < 10, mask.shape)
    found = one_token.attend(q, k, v, mask, 0.1)
    assert relative_error(found, plain(q, k, v, mask, 0.1)) < 5e-3
    few = [array[:, :, :16] for array in (k, v)]
    assert relative_error(found, plain(q, *few, mask[..., :16], 0.1)) < 5e-3
