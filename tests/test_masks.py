from __future__ import annotations

import textwrap

from funcrt import masks
from funcrt.errors import InputError

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


def causal_by_hand(
    valid: list[list[bool]], lengths: list[int], capacity: int
) -> list[list[list[bool]]]:
    """Token by token, as a cache would fill."""
    rows = []
    for real, filled in zip(valid, lengths, strict=True):
        lines = []
        for is_real in real:
            filled += is_real
            lines.append([is_real and slot < filled for slot in range(capacity)])
        rows.append(lines)
    return rows


def test_causal_is_what_its_docstring_draws():
    doc = textwrap.dedent(masks.causal.__doc__)
    drawing = doc.split("capacity 7::")[1].split("Args:")[0].strip().splitlines()[1:]
    valid, lines = [], []
    for line in drawing:
        head, *cells = line.replace("(padding)", "").split()
        valid.append(int(head))
        lines.append([{"x": True, ".": False}[cell] for cell in cells])
    assert len(lines) == 4
    mask = masks.causal(mx.array([valid]), mx.array([2]), 7)
    assert mask.shape == (1, 1, 4, 7)
    assert mask.dtype == mx.bool_
    assert mask[0, 0].tolist() == lines


@given(st.data())
def test_causal_by_hand(data):
    batch, tokens, capacity = (data.draw(st.integers(1, most)) for most in (3, 6, 9))
    row = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    valid = data.draw(st.lists(row, min_size=batch, max_size=batch))
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))
    mask = masks.causal(mx.array(valid), mx.array(lengths), capacity)
    assert mask.shape == (batch, 1, tokens, capacity)
    assert mask[:, 0].tolist() == causal_by_hand(valid, lengths, capacity)


@pytest.mark.parametrize(
    ("dtype", "real"),
    [
        (mx.bool_, 1),
        (mx.int16, -1),
        (mx.int16, 256),
        (mx.uint8, 255),
        (mx.int64, 2**40),
        (mx.float32, 1e-30),
        (mx.float16, 0.5),
        (mx.bfloat16, -2.0),
        (mx.float32, float("-inf")),
    ],
)
def test_any_nonzero_value_is_a_real_token(dtype, real):
    """A cast to bool or int8 first would lose some of these."""
    valid = mx.array([[0, real, 0, real]], dtype=dtype)
    assert masks.causal(valid, mx.array([1]), 5)[0, 0].tolist() == [
        [False] * 5,
        [True, True, False, False, False],
        [False] * 5,
        [True, True, True, False, False],
    ]


def test_causal_refuses():
    lengths = mx.array([0, 0])
    masks.causal(mx.ones((2, 3)), lengths, 4)
    for valid in (mx.ones((2,)), mx.ones((2, 1, 3)), mx.array(1)):
        with pytest.raises(InputError, match=r"expected shape \[B, T\], got"):
            masks.causal(valid, lengths, 4)
    for bad in (mx.array([0]), mx.array(0), lengths[None], lengths.astype(mx.int64), mx.ones(2)):
        with pytest.raises(InputError, match=r"lengths: expected int32 \[2\], got"):
            masks.causal(mx.ones((2, 3)), bad, 4)


def test_as_mask_brings_any_rank_to_four():
    array = np.arange(24).reshape(2, 3, 4) % 3
    for dtype in (mx.int16, mx.uint8, mx.int32):
        mask = masks.as_mask(mx.array(array).astype(dtype))
        assert mask.shape == (2, 1, 3, 4)
        assert mask.dtype == mx.bool_
        np.testing.assert_array_equal(np.array(mask)[:, 0], array != 0)
    assert masks.as_mask(mx.array(array[0])).shape == (1, 1, 3, 4)
    assert masks.as_mask(mx.array(array[:, None] > 0)).shape == (2, 1, 3, 4)
    assert masks.as_mask(mx.array([[256, 0]], dtype=mx.int16)).tolist() == [[[[True, False]]]]


def test_as_mask_refuses():
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        with pytest.raises(InputError, match="expected bool or integers"):
            masks.as_mask(mx.zeros((2, 2), dtype))
    for shape in [(), (4,), (1, 4, 2, 2), (1, 1, 1, 2, 2)]:
        with pytest.raises(InputError, match=r"expected \[T, S\], \[B, T, S\] or \[B, 1, T, S\]"):
            masks.as_mask(mx.zeros(shape, mx.int32))
