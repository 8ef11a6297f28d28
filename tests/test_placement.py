"""What a call does to the cache, decided without a mask, against the same read off a mask."""

from __future__ import annotations

from funcrt import cache, masks
from tests.helpers import to_numpy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

CAPACITY = 9

calls = st.integers(1, 5).flatmap(
    lambda tokens: st.lists(
        st.tuples(
            st.integers(0, CAPACITY), st.lists(st.booleans(), min_size=tokens, max_size=tokens)
        ),
        min_size=1,
        max_size=3,
    )
)


@given(calls)
def test_a_causal_call_is_placed_as_its_mask_would_be(rows):
    """Padding anywhere, rows near and beyond their capacity."""
    lengths = mx.array([length for length, _ in rows], dtype=mx.int32)
    valid = mx.array([real for _, real in rows])
    drawn = cache.place(masks.causal(valid, lengths, CAPACITY), lengths)
    known = cache.place_causal(valid, lengths, CAPACITY)
    for name, expected in drawn._asdict().items():
        found = getattr(known, name)
        if name == "seen":
            assert expected is None
            assert found.dtype == mx.int32
            np.testing.assert_array_equal(
                to_numpy(mx.arange(CAPACITY) < found[..., None]), to_numpy(drawn.visible)[:, 0]
            )
        elif name == "first":
            assert (found, expected) == (False, False)
        elif expected is None:
            assert found is None
        else:
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(to_numpy(found), to_numpy(expected), err_msg=name)
    sight = cache.give_sight(drawn.visible, drawn.slots)
    np.testing.assert_array_equal(to_numpy(cache.find_sight(known)), to_numpy(sight))
    np.testing.assert_array_equal(to_numpy(cache.find_sight(drawn)), to_numpy(sight))


@pytest.mark.parametrize("kind", [mx.int32, mx.float32, mx.uint8])
def test_any_nonzero_token_is_real(kind):
    lengths = mx.array([0, 3], dtype=mx.int32)
    valid = mx.array([[1, 1, 0], [0, 0, 0]])
    call = cache.place_causal(valid.astype(kind), lengths, CAPACITY)
    assert call.lengths.tolist() == [2, 3]
    assert call.slots.tolist() == [[0, 1, CAPACITY - 1], [CAPACITY - 1] * 3]


def test_what_is_placed_stays_as_it_is():
    lengths = mx.array([1], dtype=mx.int32)
    call = cache.place_causal(mx.ones((1, 1)), lengths, CAPACITY)
    assert cache.place(call, lengths) is call
