from __future__ import annotations

from funcrt import cache, masks
from funcrt.errors import CacheError
from tests.helpers import (
    POISON,
    TOLERANCE,
    assert_same,
    ids,
    make_model,
    poison,
    random_tokens,
    relative_error,
    run_plain,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

SPEC = (
    cache.CacheEntry("lengths", ("B",), "int32"),
    cache.CacheEntry("layers.0.keys", ("B", 2, "S", 4), "float16"),
    cache.CacheEntry("layers.0.values", ("B", 1, "S", 6), "float32"),
)


def random_state(lengths: list[int], capacity: int) -> cache.CacheState:
    """Every slot of every row holds noise."""
    rng = np.random.default_rng(0)
    state = cache.init_cache(SPEC, len(lengths), capacity)
    noisy = {k: mx.array(rng.normal(size=a.shape)).astype(a.dtype) for k, a in state.items()}
    return {**noisy, "lengths": mx.array(lengths, dtype=mx.int32)}


def copy(state: cache.CacheState) -> cache.CacheState:
    return {name: mx.array(np.array(array)) for name, array in state.items()}


def test_init_is_empty_and_counted():
    state = cache.init_cache(SPEC, 3, 5)
    assert list(state) == ["lengths", "layers.0.keys", "layers.0.values"]
    assert [a.shape for a in state.values()] == [(3,), (3, 2, 5, 4), (3, 1, 5, 6)]
    assert [a.dtype for a in state.values()] == [mx.int32, mx.float16, mx.float32]
    assert not any(to_numpy(array).any() for array in state.values())
    assert cache.state_size(state) == (3, 5)
    assert cache.state_bytes(SPEC, 3, 5) == sum(array.nbytes for array in state.values())


@pytest.mark.parametrize(("batch", "capacity"), [(0, 8), (-1, 8), (1, 1), (1, 0)])
def test_init_refuses(batch, capacity):
    with pytest.raises(CacheError, match=f"got batch {batch}, capacity {capacity}"):
        cache.init_cache(SPEC, batch, capacity)


def test_check_state_restores_the_order():
    state = random_state([1, 2], 4)
    shuffled = {name: state[name] for name in reversed(state)}
    assert_same(cache.check_state(SPEC, shuffled), state)


def test_check_state_names_what_is_wrong():
    state = random_state([1, 2], 4)
    keys, values = state["layers.0.keys"], state["layers.0.values"]
    for changes, message in [
        ({"layers.0.keys": None}, "no layers.0.keys"),
        ({"lengths": None}, "no lengths"),
        ({"layers.1.keys": keys}, "unknown arrays layers.1.keys"),
        ({"lengths": mx.array([1])}, r"lengths: expected int32 \[2\]"),
        ({"lengths": mx.array([1.0, 2.0])}, r"lengths: expected int32 \[2\]"),
        ({"layers.0.keys": keys.astype(mx.float32)}, "layers.0.keys: expected float16"),
        ({"layers.0.values": values[:1]}, "layers.0.values: expected float32"),
        ({"layers.0.values": values[:, :, :3]}, "layers.0.values: expected float32"),
        ({"layers.0.values": values[0]}, "layers.0.values: expected"),
        ({"layers.0.keys": keys[0]}, "layers.0.keys: expected"),
        ({"layers.0.keys": mx.array(1.0)}, r"layers.0.keys: has shape \[\], too few axes"),
    ]:
        wrong = {k: a for k, a in {**state, **changes}.items() if a is not None}
        with pytest.raises(CacheError, match=message):
            cache.check_state(SPEC, wrong)
    with pytest.raises(CacheError, match="another model"):
        cache.check_state(SPEC, {})


def test_grow_keeps_tokens_and_forgets_scratch():
    state = poison(random_state([3, 0], 4), POISON)
    before = copy(state)
    grown = cache.grow(state, 9)
    assert_same(state, before)
    assert list(grown) == list(state)
    assert cache.state_size(grown) == (2, 9)
    assert grown["lengths"].tolist() == [3, 0]
    for name in ("layers.0.keys", "layers.0.values"):
        assert grown[name].dtype == state[name].dtype
        ours, theirs = to_numpy(grown[name]), to_numpy(state[name])
        np.testing.assert_array_equal(ours[:, :, :3], theirs[:, :, :3])
        assert not ours[:, :, 3:].any()
    assert cache.grow(state, 4) is state
    with pytest.raises(CacheError, match="capacity 3 is below the present 4"):
        cache.grow(state, 3)


def test_a_grown_cache_continues_as_a_large_one():
    model, tokens = make_model(), random_tokens(30)
    state, start = model.init_cache(1, 8), 0
    for width, capacity in [(7, 8), (1, 9), (12, 24), (10, 40)]:
        state = poison(cache.grow(state, capacity))
        mask = masks.causal(mx.ones((1, width)), state["lengths"], capacity)
        logits, state = model.forward(model.params, ids(tokens[start : start + width]), mask, state)
        start += width
    expected, _ = run_plain(model, tokens)
    assert relative_error(logits[0], expected[-10:]) <= TOLERANCE


def test_clear_empties_rows_even_of_nan():
    state = random_state([3, 2, 1], 4)
    state["layers.0.keys"][1] = mx.nan
    state["layers.0.values"][1] = mx.inf
    before = copy(state)
    cleared = cache.clear(state, mx.array([1], dtype=mx.int32))
    assert_same(state, before)
    assert cleared["lengths"].tolist() == [3, 0, 1]
    for name, array in cleared.items():
        assert array.dtype == state[name].dtype
        assert not to_numpy(array)[1].any()
        np.testing.assert_array_equal(to_numpy(array)[[0, 2]], to_numpy(state[name])[[0, 2]])
    everything = cache.clear(state, mx.array([2, 0, 1], dtype=mx.int32))
    assert not any(to_numpy(array).any() for array in everything.values())
    assert_same(cache.clear(state, mx.zeros((0,), dtype=mx.int32)), state)


def shown(mask: mx.array) -> list[list[int]]:
    """Columns that each row of a mask [1, T, N] shows."""
    return [[i for i, x in enumerate(line) if x] for line in mask[0].tolist()]


def test_place_packs_real_tokens_in_order():
    valid = mx.array([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    lengths = mx.array([2, 4, 5], dtype=mx.int32)
    placement = cache.place(masks.causal(valid, lengths, 8), lengths)
    assert placement.order[0].tolist() == [1, 3, 4, 0, 2]
    assert placement.real.tolist() == [[True] * 3 + [False] * 2, [False] * 5, [True] * 5]
    # Capacity 8: slots 0 to 6 hold tokens, 7 is scratch.
    assert placement.slots.tolist() == [[2, 3, 4, 7, 7], [7] * 5, [5, 6, 7, 7, 7]]
    assert placement.offset.tolist() == [2, 4, 5]
    assert placement.lengths.tolist() == [5, 4, 10]
    assert shown(placement.visible[0]) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [], []]
    assert shown(placement.visible[1]) == [[]] * 5
    assert shown(placement.visible[2]) == [[*range(6)], *[[*range(7)]] * 4]
    # Padding sees the scratch slot that it writes.
    mask = cache.give_sight(placement.visible, placement.slots)
    assert shown(mask[0]) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [7], [7]]
    assert shown(mask[1]) == [[7]] * 5
    assert shown(mask[2]) == shown(placement.visible[2])
    array = mx.arange(15).reshape(3, 5)
    packed = cache.pack(array, placement)
    assert packed[0].tolist() == [1, 3, 4, 0, 2]
    np.testing.assert_array_equal(cache.unpack(packed, placement), array)
    wide = mx.random.normal((3, 5, 2, 2))
    np.testing.assert_array_equal(cache.unpack(cache.pack(wide, placement), placement), wide)


def test_place_decides_padding_from_the_mask_alone():
    """One True anywhere makes a token real, even at a slot that is not written."""
    mask = np.zeros((1, 1, 3, 8), bool)
    mask[0, 0, 2, 6] = True
    placement = cache.place(mx.array(mask), mx.array([2]))
    assert placement.real.tolist() == [[True, False, False]]
    assert placement.lengths.tolist() == [3]
    assert placement.slots.tolist() == [[2, 7, 7]]
    assert shown(placement.visible[0]) == [[], [], []]
    mask = cache.give_sight(placement.visible, placement.slots)
    assert shown(mask[0]) == [[2], [7], [7]]


def test_write_touches_only_its_slots():
    state = random_state([2, 3], 6)
    buffer = state["layers.0.keys"]
    valid = mx.array([[1, 0, 1], [1, 1, 1]])
    placement = cache.place(masks.causal(valid, state["lengths"], 6), state["lengths"])
    values = mx.arange(48, dtype=mx.float32).reshape(2, 2, 3, 4)
    written = cache.write(buffer, values, placement.slots)
    assert written.dtype == buffer.dtype
    expected = to_numpy(buffer)
    for row, slots in enumerate(placement.slots.tolist()):
        for i, slot in enumerate(slots):
            expected[row, :, slot] = to_numpy(values)[row, :, i]
    np.testing.assert_array_equal(to_numpy(written)[:, :, :5], expected[:, :, :5])


@pytest.mark.parametrize("is_held", [False, True])
def test_an_update_copies_only_if_something_holds_the_old_state(is_held):
    model = make_model()
    state = model.init_cache(4, 16384)
    size = sum(array.nbytes for array in state.values())
    mx.eval(state, model.params)
    mask = masks.causal(mx.ones((4, 1)), state["lengths"], 16384)
    _, new = model.forward(model.params, mx.zeros((4, 1), mx.int32), mask, state)
    holder = dict(state) if is_held else {}
    state.clear()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(new)
    extra = mx.get_peak_memory() - before
    assert extra > 0.9 * size if holder else extra < 0.5 * size
