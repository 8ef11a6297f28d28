"""What replaces single functions of MLX and of mlx-lm, one by one, each without a whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import converters
import tests.mlx_lm_extra  # noqa: F401 (skips without mlx-lm)
from converters.functional.adapters import (
    ArrayRanges,
    make_dynamic_rope,
    mix_all_experts,
    multiply_ternary,
    replacements,
)
from converters.functional.caches import Call
from converters.functional.offsets import Offset
from converters.functional.pure import pure
from funcrt.cache import place
from tests.helpers import relative_error
from tests.reference.mlx_lm_checks import (
    distance,
    make_module,
    run_model,
    run_module,
    tokens_of,
    without_metal,
)

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import afm7, gpt_bigcode, minimax_m3_vl, muse_spark
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

LENGTHS, TOKENS, CAPACITY = [5, 2], 3, 12
TOLERANCE = 2e-5


@pytest.fixture
def call() -> Call:
    """Two rows of other lengths, three tokens each; the second row's first slot is hidden."""
    lengths = mx.array(LENGTHS, dtype=mx.int32)
    slot = lengths[:, None, None, None] + mx.arange(TOKENS)[:, None]
    mask = mx.arange(CAPACITY) <= slot
    hidden = mx.array([[-1], [0]])[:, None, :, None]
    return Call(place(mask & (mx.arange(CAPACITY) != hidden), lengths), {})


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def exports(function: Callable[..., Any], *arrays: mx.array) -> bool:
    """Whether MLX can write the graph of a function."""
    try:
        mx.export_function(lambda _: None, function, *arrays)
    except ValueError:
        return False
    return True


# --- what does not export otherwise --------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: mx.contiguous(x.T), mx.float32),
        (lambda x: ~x, mx.int32),
        (lambda x: mx.bitwise_invert(x), mx.uint32),
        (lambda x: mx.bitwise_invert(x), mx.uint8),
    ],
)
def test_blockers_are_replaced(call: Call, function: Any, dtype: mx.Dtype) -> None:
    x = mx.array([[0, 1, 5], [7, 100, 2]], dtype=dtype)
    expected = function(x)
    assert not exports(function, x)
    with pure(call):
        assert exports(function, x)
        assert mx.array_equal(function(x), expected).item()
        assert function(x).dtype == expected.dtype
    assert not exports(function, x)


def test_booleans_are_inverted_as_before(call: Call) -> None:
    with pure(call):
        assert (~mx.array([True, False])).tolist() == [False, True]


def test_nothing_is_computed_within_a_trace(call: Call) -> None:
    def run(x: mx.array) -> mx.array:
        y = x + 1
        mx.eval(y)
        mx.async_eval(y)
        mx.synchronize()
        return mx.depends(y, [x])

    with pytest.raises(ValueError, match="transformation"):
        mx.compile(lambda x: run(x) * 2)(mx.ones(2))
    with pure(call):
        assert mx.compile(run)(mx.ones(2)).tolist() == [2, 2]


def test_other_threads_keep_what_they_had(call: Call) -> None:
    seen: list[Any] = []

    def look() -> None:
        x = mx.array([3, 4])
        seen.extend([exports(lambda a: ~a, x), type(gpt_bigcode.np.arange(3))])

    with pure(call):
        assert isinstance(
            gpt_bigcode.np.arange(Offset(mx.array([1, 2])), Offset([1, 2], 3)), mx.array
        )
        assert gpt_bigcode.np.sqrt(4.0) == 2  # all else is numpy's
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [False, np.ndarray]
    assert gpt_bigcode.np is np


@pytest.mark.parametrize("device", [mx.cpu, mx.gpu])
def test_kernels_stay_on_metal(
    call: Call, monkeypatch: pytest.MonkeyPatch, device: mx.Device
) -> None:
    make_module("bitnet")  # loads what it is made of
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: device)
    replaced = [attribute for _, attribute, _ in replacements(call)]
    assert ("execute_matmul_kernel" in replaced) == (device == mx.cpu)
    with pure(call):
        assert mx.metal.is_available() == (device == mx.gpu)
    assert mx.metal.is_available()


# --- positions, windows and masks ----------------------------------------------------------------


def test_ranges_between_offsets(call: Call) -> None:
    rows = [[n, n + 1, n + 2] for n in LENGTHS]
    start = Offset(call.placement.offset)
    with pure(call):
        assert mx.arange(start, start + TOKENS)[..., 0].tolist() == rows
        assert mx.arange(CAPACITY - TOKENS, CAPACITY).tolist() == [9, 10, 11]
        newest = minimax_m3_vl.mx.arange(CAPACITY - TOKENS, CAPACITY)  # counted from the end
        assert newest[..., 0].tolist() == rows
        assert mx.arange(start + TOKENS).tolist() == list(range(CAPACITY))
        assert mx.arange(2, 5).tolist() == [2, 3, 4]
    assert minimax_m3_vl.mx is mx
    assert ArrayRanges.arange(start, start + 2).tolist() == [[n, n + 1] for n in LENGTHS]


def test_afm7s_reused_keys_are_asked_at_each_rows_offset(call: Call) -> None:
    module = make_module("afm7")
    layer = next(m for _, m in module.named_modules() if isinstance(m, afm7.KVReuseAttention))
    x = normal(2, TOKENS, 64)
    keys, values = (normal(2, 2, CAPACITY, 16, seed=seed) for seed in (1, 2))
    each = [
        # The module takes the end of the keys for the last token.
        layer(x[i : i + 1], keys[i : i + 1, :, :end], values[i : i + 1, :, :end], mask)
        for i, end in enumerate(n + TOKENS for n in LENGTHS)
        for mask in [call.placement.visible[i : i + 1, ..., :end]]
    ]
    with pure(call):
        ours = layer(x, keys, values, call.mask())
    assert relative_error(ours, mx.concatenate(each)) <= TOLERANCE


def test_scores_by_group_take_the_mask_of_every_group(call: Call) -> None:
    scores = normal(2, 2, 3, TOKENS, CAPACITY)  # [B,K,G,T,S]
    with pure(call):
        mask = call.mask()
        ours = mx.where(mask, scores, 0.0)
        flat = mx.where(mask, scores[:, 0], 0.0)
    assert mx.array_equal(ours, scores * mask[:, :, None]).item()
    assert mx.array_equal(flat, scores[:, 0] * mask).item()


@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "ours"])
def test_attention_never_sees_more_than_the_callers_mask(call: Call, kind: str) -> None:
    q, k, v = (normal(2, 2, n, 8, seed=n) for n in (TOKENS, CAPACITY, CAPACITY))
    window = mx.arange(CAPACITY) >= 4
    visible = call.placement.visible & (window if kind == "boolean" else True)
    right = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=call.mask(None))
    with pure(call):
        mask: Any = {"none": None, "causal": "causal", "boolean": window[None, None, None]}.get(
            kind, call.mask()
        )
        if kind == "boolean":
            mask = mx.broadcast_to(mask, (2, 1, TOKENS, CAPACITY))
        ours = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
    if kind == "boolean":
        sees = mx.any(visible, axis=-1)[..., None]  # the others see their own slot only
        right = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=visible)
        ours, right = mx.where(sees, ours, 0), mx.where(sees, right, 0)
    assert relative_error(ours, right) <= TOLERANCE
    open_ = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0)
    assert relative_error(open_, right) > 0.01


# --- single functions of mlx-lm ------------------------------------------------------------------


def test_dbrx_mixes_the_experts_that_its_module_picks() -> None:
    block = make_module("dbrx").layers[0].ffn
    x = normal(2, 5, 64)
    assert relative_error(mix_all_experts(block, x), block(x)) <= TOLERANCE


@pytest.mark.parametrize("inverted", [False, True])
def test_bitnet_multiplies_ternary_weights(inverted: bool) -> None:
    layer = make_module("bitnet").layers[0].self_attn.o_proj
    layer.invert_weight_scales = inverted
    x = normal(2, 5, 64)
    with without_metal():
        theirs = layer.execute_matmul_kernel(x, layer.weight)
    assert relative_error(multiply_ternary(layer, x, layer.weight), theirs) <= TOLERANCE


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("limit", [4, 64])  # longer and shorter than the rows
def test_dynamic_rope_stretches_each_row_by_its_own_length(
    call: Call, traditional: bool, limit: int
) -> None:
    rope = DynamicNTKScalingRoPE(8, limit, traditional, 100.0, 2.0)
    x = normal(2, 2, TOKENS, 10)
    each = [rope(x[i : i + 1], offset=n) for i, n in enumerate(LENGTHS)]
    ours = make_dynamic_rope(call)(rope, x, Offset(call.placement.offset))
    assert relative_error(ours, mx.concatenate(each)) <= TOLERANCE


class InFloat32:
    """`mlx.core` for a module that would round to bfloat16."""

    bfloat16 = mx.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


def test_muse_sparks_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same in numpy; without its own rounding, padded rows are what they are alone."""
    module = make_module("muse_spark")
    monkeypatch.setattr(muse_spark, "mx", InFloat32())
    prompts = [23, 9, 1]
    rows = [tokens_of(i, count + 3) for i, count in enumerate(prompts)]
    theirs = [run_module(module, row, n) for row, n in zip(rows, prompts, strict=True)]
    model = converters.functionalize(module)
    for left in (True, False):
        ours = run_model(model, model.forward, rows, prompts, left)
        assert max(map(distance, ours, theirs)) <= TOLERANCE
