"""`logits, cache = model(tokens, mask, cache)`."""

from __future__ import annotations

from functools import cache

from funcrt import calling, masks
from funcrt.cache import state_size
from funcrt.errors import CacheError, FuncrtError, InputError
from tests.helpers import (
    TINY,
    TOLERANCE,
    Array,
    expand,
    ids,
    make_model,
    oracle,
    poison,
    random_tokens,
    relative_error,
    run_plain,
    to_numpy,
)
from tests.toy_families import make_toy, registered
from tests.toy_families import oracle as toy_oracle

import mlx.core as mx
import numpy as np
import pytest

model_of = cache(make_model)
ROWS = [random_tokens(7, 1), random_tokens(4, 2), random_tokens(1, 3)]


def plain(tokens: list[int]) -> Array:
    return run_plain(model_of("float32"), tokens)[0]


@pytest.fixture(scope="module")
def model():
    return model_of("float32")


@pytest.mark.parametrize("spelling", ["flat", "rows", "tuples", "array", "one axis"])
def test_tokens_may_be_lists_or_arrays(model, spelling):
    row = ROWS[0]
    tokens = {
        "flat": row,
        "rows": [row],
        "tuples": (tuple(row),),
        "array": ids(row),
        "one axis": ids(row)[0],
    }[spelling]
    logits, state = model(tokens)
    assert logits.shape == (1, 7, TINY.vocab_size)
    assert state["lengths"].tolist() == [7]
    assert relative_error(logits[0], plain(row)) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"])
def test_any_integer_dtype(model, dtype):
    logits, _ = model(ids(ROWS[0]).astype(getattr(mx, dtype)))
    assert relative_error(logits[0], plain(ROWS[0])) <= TOLERANCE


@pytest.mark.parametrize("dtype", [mx.int16, mx.bool_, mx.float32, mx.uint8])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_masks(model, dtype, side):
    lines, valid = [], []
    for row in ROWS:
        padding = 7 - len(row)
        before, after = (padding, 0) if side == "left" else (0, padding)
        lines.append([95] * before + row + [95] * after)
        valid.append([0] * before + [1] * len(row) + [0] * after)
    logits, state = model(lines, mx.array(valid).astype(dtype))
    assert state["lengths"].tolist() == [7, 4, 1]
    for row, real, out in zip(ROWS, valid, to_numpy(logits), strict=True):
        assert relative_error(out[np.array(real, bool)], plain(row)) <= TOLERANCE


def test_a_cache_goes_on_with_other_widths_and_masks(model):
    first, state = model([ROWS[0], ROWS[1] + [0] * 3], mx.array([[1] * 7, [1] * 4 + [0] * 3]))
    more = [random_tokens(3, 8), random_tokens(3, 9)]
    second, state = model(more, None, state)
    third, state = model([[5], [6]], mx.array([[0], [1]]), state)
    assert state["lengths"].tolist() == [10, 8]
    assert relative_error(second[0], plain(ROWS[0] + more[0])[7:]) <= TOLERANCE
    assert relative_error(second[1], plain(ROWS[1] + more[1])[4:]) <= TOLERANCE
    assert relative_error(third[1, 0], plain([*ROWS[1], *more[1], 6])[-1]) <= TOLERANCE
    assert first.shape == (2, 7, 96)


def test_a_growing_cache_equals_one_that_was_large_from_the_start(model):
    tokens = random_tokens(530)
    state, parts = None, []
    large = model.init_cache(1, 1024)
    for width in (200, 55, 1, 1, 254, 1, 18):
        chunk = tokens[: len(parts) + width][len(parts) :]
        logits, state = model(chunk, None, state if state is None else poison(state))
        expected, large = model(chunk, None, large)
        assert relative_error(logits, expected) <= TOLERANCE
        parts += chunk
    capacities = state["layers.0.keys"].shape[2], large["layers.0.keys"].shape[2]
    assert capacities == (1024, 1024)
    assert state["lengths"].tolist() == large["lengths"].tolist() == [530]
    assert relative_error(logits[0], plain(tokens)[-18:]) <= TOLERANCE


def test_the_capacity_of_a_cache_that_is_not_given(model):
    """256, or the next power of two that leaves a scratch slot; only real tokens count."""
    for count, capacity in [(1, 256), (255, 256), (256, 512), (511, 512), (512, 1024)]:
        assert state_size(model([0] * count)[1]) == (1, capacity)
    padded = mx.concatenate([mx.zeros((1, 200)), mx.ones((1, 100))], axis=1)
    assert state_size(model([0] * 300, padded)[1]) == (1, 256)
    causal = masks.causal(mx.ones((1, 3)), mx.array([0], dtype=mx.int32), 300)
    assert state_size(model([0] * 3, causal)[1]) == (1, 512)


@pytest.mark.parametrize("count", [255, 256, 511])
def test_a_cache_has_room_beside_its_scratch_slot(model, count):
    _, state = model([0] * count)
    assert state_size(state)[1] == (256 if count == 255 else 512)
    _, grown = model([1], None, state)
    assert grown["lengths"].tolist() == [count + 1]
    assert grown["layers.0.keys"].shape[2] >= count + 2


def test_padding_does_not_make_a_cache_grow(model):
    _, state = model([0] * 255)
    _, same = model([1, 2, 3], mx.zeros((1, 3)), state)
    assert same["layers.0.keys"].shape[2] == 256
    assert same["lengths"].tolist() == [255]


def test_attention_masks_of_every_rank(model):
    tokens = random_tokens(6)
    visible = np.tril(np.ones((6, 6), int))
    visible[:3, :3] = 1  # a prefix that sees itself both ways
    visible[5, 2] = 0
    expected = oracle(TINY, expand(model), tokens, visible=visible)
    for shape in [(1, 1, 6, 6), (1, 6, 6)]:
        mask = mx.array(visible).reshape(shape)
        for converted in (mask, mask != 0, mask.astype(mx.int8)):
            logits, state = model(tokens, converted)
            assert relative_error(logits[0], expected) <= TOLERANCE
    assert state["lengths"].tolist() == [6]
    wide = mx.concatenate([mx.array(visible), mx.ones((6, 300), mx.int32)], axis=1)[None]
    logits, state = model(tokens, wide)  # columns of slots that are never written
    assert relative_error(logits[0], expected) <= TOLERANCE
    assert state["layers.0.keys"].shape[2] >= 306


def test_one_attention_mask_for_all_rows(model):
    rows = [random_tokens(5, 1), random_tokens(5, 2)]
    logits, _ = model(rows, mx.tril(mx.ones((1, 1, 5, 5))) != 0)
    for row, out in zip(rows, logits, strict=True):
        assert relative_error(out, plain(row)) <= TOLERANCE


def test_an_attention_mask_pads_rows_and_grows_with_its_cache(model):
    """The last column is scratch before the cache grows, and an ordinary slot after it."""
    tokens = random_tokens(256)
    _, state = model([tokens[:254]])
    mask = masks.causal(mx.array([[1, 0, 1, 0, 0]]), state["lengths"], 256)
    line = [tokens[254], 0, tokens[255], 0, 0]
    logits, state = model([line], mask, state)
    assert state_size(state) == (1, 512)
    assert state["lengths"].tolist() == [256]
    assert relative_error(logits[0, [0, 2]], plain(tokens)[254:256]) <= TOLERANCE


def test_an_attention_mask_must_have_columns_for_its_tokens(model):
    _, state = model([0] * 254)
    mask = masks.causal(mx.ones((1, 3)), state["lengths"], 256)
    with pytest.raises(
        InputError, match=r"256 columns, and rows hold 257 tokens .* grow the cache"
    ):
        model([1, 2, 3], mask, state)
    with pytest.raises(InputError, match="2 columns, and rows hold 3 tokens"):
        model([1, 2, 3], mx.ones((1, 1, 3, 2), mx.int32))


def test_a_flat_mask_is_padding_if_it_can_be(model):
    """[B, T] first, square ones too; then [T, S] for all rows; a padding mask on its side neither.

    What is [B, T] but looks additive is refused.
    """
    square = mx.array([[0, 1], [1, 1]])
    assert model([[95, 7], [8, 9]], square)[1]["lengths"].tolist() == [1, 2]
    assert model([[5]], mx.array([[0]]))[1]["lengths"].tolist() == [0]
    see = mx.tril(mx.ones((3, 16), mx.int32))
    for mask in (see, see != 0, mx.where(see != 0, 0.0, -1e9)):
        logits, state = model(ids([1, 2, 3], [4, 5, 6]), mask, model.init_cache(2, 16))
        assert state["lengths"].tolist() == [3, 3]
        assert relative_error(logits[1], plain([4, 5, 6])) <= TOLERANCE
    for shape, slots in [((3, 2), None), ((3, 2), 16), ((3, 16), 8)]:
        state = None if slots is None else model.init_cache(2, slots)
        with pytest.raises(InputError, match=r"padding mask: .* attention mask is \[3, "):
            model(ids([1, 2, 3], [4, 5, 6]), mx.ones(shape, mx.int32), state)
    sixteen = [[1, 2, 3]] * 16  # [T, B] and [T, S] at once
    with pytest.raises(InputError, match=r"padding mask: expected \[16, 3\], got \[3, 16\]"):
        model(sixteen, mx.ones((3, 16), mx.int32), model.init_cache(16, 16))
    for low in (float("-inf"), -1e4, -1e9):
        for dtype in (mx.float32, mx.bfloat16, *([mx.int32] if low > -1e10 else [])):
            additive = mx.where(square != 0, 0.0, low).astype(dtype)
            with pytest.raises(InputError, match="holds -1e4 or less like an additive mask"):
                model([[1, 2], [3, 4]], additive)


def test_a_model_without_slots():
    """Recurrent layers only: its masks have one column, and its cache never grows."""
    with registered():
        toy = make_toy("toy_recurrent")
        tokens = [token % toy.vocab_size for token in random_tokens(300)]
        expected = toy_oracle(toy, tokens)
        first, state = toy([[*tokens[:298], 0]], mx.array([[1] * 298 + [0]]))
        assert state_size(state) == (1, 1)
        for mask in (None, mx.ones((1, 1, 2, 1)) != 0):
            logits, after = toy([tokens[298:]], mask, state)
            assert after["lengths"].tolist() == [300]
            assert relative_error(logits[0], expected[298:]) <= TOLERANCE
        logits, _ = toy(tokens, mx.ones((1, 1, 300, 1), mx.int16))
        assert relative_error(logits[0], expected) <= TOLERANCE
    assert relative_error(first[0, :298], expected[:298]) <= TOLERANCE


def test_masks_that_are_lists_or_numpy_arrays(model):
    tokens, valid = [[95, 7, 8], [9, 10, 11]], [[0, 1, 1], [1, 1, 1]]
    expected, _ = model(tokens, mx.array(valid))
    for mask in (valid, np.array(valid), np.array(valid, bool), np.array(valid, np.int8)):
        logits, state = model(tokens, mask)
        assert state["lengths"].tolist() == [2, 3]
        assert logits.tolist() == expected.tolist()


def test_masks_that_contradict_the_lengths(model):
    """Made for an empty row or for a longer one than the cache has."""
    _, state = model([[1, 2, 3, 4], [5, 0, 0, 0]], mx.array([[1] * 4, [1, 0, 0, 0]]))
    wrong = masks.causal(mx.ones((2, 2)), mx.array([4, 30], dtype=mx.int32), 256)
    wrong = wrong & (mx.arange(256) >= 4)  # the second row sees only what it will never fill
    with pytest.raises(InputError, match="made for other lengths than those of the cache"):
        model([[1, 2], [3, 4]], wrong & (mx.arange(256) >= 20), state)
    with pytest.raises(InputError, match=r"lengths: expected int32 .3., got"):
        masks.causal(mx.ones((3, 2)), state["lengths"], 256)
    right = masks.causal(mx.ones((2, 2)), state["lengths"], 256)
    assert model([[1, 2], [3, 4]], right, state)[1]["lengths"].tolist() == [6, 3]


def test_fewer_rows_than_the_cache_has(model):
    state = model.init_cache(3, 64)
    logits, state = model([ROWS[0]], None, state)
    assert logits.shape == (1, 7, 96)
    assert state["lengths"].tolist() == [7, 0, 0]
    assert relative_error(logits[0], plain(ROWS[0])) <= TOLERANCE
    mask = masks.causal(mx.ones((2, 1)), state["lengths"][:2], 64)
    logits, state = model([[1], [2]], mask, state)
    assert state["lengths"].tolist() == [8, 1, 0]
    assert relative_error(logits[0, 0], plain([*ROWS[0], 1])[-1]) <= TOLERANCE


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([], "expected integers"),
        ([[]], "expected integers"),
        ([[1, 2], [3]], "pad shorter rows"),
        ([1.5, 2.0], "expected integers"),
        ([True, False], "expected integers"),
        ([None], "tokens"),
        (["a"], "tokens"),
        ("abc", "tokens"),
        (5, "tokens"),
        ([1, [2]], "tokens"),
        ([[[1]]], "expected integers"),
        ([-1], "token id -1 is outside the vocabulary .0 to 95."),
        ([0, 96], "token id 96"),
        ([2**31], "token id 2147483648"),
        ([2**40], "token id 1099511627776"),
        ([2**70], "tokens"),
        (mx.array(3), "expected integers"),
        (mx.zeros((1, 0), mx.int32), "expected integers"),
        (mx.zeros((1, 3)), "expected integers"),
        (mx.array([2**32 - 1], dtype=mx.uint32), "token id 4294967295"),
        (mx.array([-(2**63)], dtype=mx.int64), "token id -9223372036854775808"),
        (mx.array([200], dtype=mx.uint8), "token id 200"),
    ],
)
def test_tokens_that_cannot_be_used(model, tokens, match):
    with pytest.raises(InputError, match=match):
        model(tokens)


def test_masks_that_do_not_fit(model):
    tokens, state = ids([1, 2, 3], [4, 5, 6]), model.init_cache(2, 16)
    for mask, match in [
        (mx.ones((2, 2)), r"padding mask: expected \[2, 3\], got \[2, 2\]"),
        (mx.ones((3, 2)), "padding mask"),
        (mx.ones((1, 3)), "padding mask"),
        (mx.ones((3,), mx.int32), "mask: expected"),
        (mx.ones((3, 1, 3, 16), mx.int32), r"expected \[2, 1, 3, S\]"),
        (mx.ones((2, 1, 2, 16), mx.int32), r"expected \[2, 1, 3, S\]"),
        (mx.ones((2, 4, 3, 16), mx.int32), "mask: expected"),
        (mx.ones((2, 1, 3, 15), mx.int32), "last axis is 15, the cache has 16"),
        (mx.ones((2, 1, 3, 16)), "with a 1: floats are additive .* other masks hold 0 and 1"),
        (mx.full((2, 1, 3, 16), -0.5), "biases .ALiBi. belong to the model"),
        (mx.ones((1, 1, 2, 3, 16), mx.int32), "padding mask: expected"),
        (mx.array(1), "padding mask: expected"),
        ([[1, 1, 1], [1]], "mask: expected an array"),
        ("right", "mask: expected an array"),
    ]:
        with pytest.raises(InputError, match=match):
            model(tokens, mask, state)


def test_caches_that_do_not_fit(model):
    with pytest.raises(InputError, match="2 rows, the cache has 1"):
        model([[1], [2]], None, model.init_cache(1, 16))
    with pytest.raises(CacheError, match="another model"):
        model([1], None, {})
    with pytest.raises(CacheError, match=r"layers\.0\.keys: expected float32"):
        model([1], None, model_of("float16").init_cache(1, 16))
    deep = make_model(num_layers=3)
    with pytest.raises(CacheError, match="another model"):
        model([1], None, deep.init_cache(1, 16))
    for batch, capacity in [(0, 16), (1, 1)]:
        with pytest.raises(FuncrtError):
            model.init_cache(batch, capacity)


def test_a_call_waits_for_the_device_once_and_leaves_its_results_lazy(model, monkeypatch):
    """What it reads are ids, lengths and the mask: small, and never what the layers compute."""
    reads = []
    read_all = calling.read_all
    monkeypatch.setattr(calling, "read_all", lambda *a: reads.append(a) or read_all(*a))
    state = model.init_cache(4, 4096)
    tokens, valid = mx.zeros((4, 64), mx.int32), mx.ones((4, 64), mx.int16)
    causal = masks.causal(valid, mx.zeros(4, mx.int32), 4096)
    mx.eval(model.prepared, state, tokens, valid, causal)
    for mask in (None, valid, causal):
        reads.clear()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        logits, new = model(tokens, mask, state)
        logits, new = model(tokens[:, :1], None, new)
        assert len(reads) == 2
        assert all(array.size == 1 for array in sum(reads, ()))
        # Lengths follow from the mask of the call before, [4, 1, 64, 4096]: 1 MiB of booleans, and
        # an attention mask is compared with them once. One layer has 4 MiB of keys and values.
        assert mx.get_peak_memory() - before < 2**21
        assert mx.all(mx.isfinite(logits)).item()


def test_a_traced_call_leaves_out_its_checks(model, tmp_path):
    """The cache that is given stays as large as it is: growing it is a host's decision."""
    tokens, valid = ids([95, 2, 3, 4], [5, 6, 7, 8]), mx.array([[0, 1, 1, 1], [1, 1, 1, 1]])
    state = model.init_cache(2, 16)
    expected, after = model(tokens, valid, state)

    def run(tokens, valid, *arrays):
        given = dict(zip(state, arrays, strict=True))
        assert state_size(model(tokens)[1]) == (2, 256)
        causal = masks.causal(valid, given["lengths"], 16)
        logits, new = model(tokens, valid, given)
        assert list(new) == list(state)
        return logits, model(tokens, causal, given)[0], *new.values()

    file = str(tmp_path / "call.mlxfn")
    mx.export_function(file, run, tokens, valid, *state.values())
    imported = mx.import_function(file)
    logits, again, *arrays = imported(tokens, valid, *state.values())
    assert relative_error(logits[1], expected[1]) <= TOLERANCE
    assert relative_error(again[1], expected[1]) <= TOLERANCE
    assert arrays[0].tolist() == after["lengths"].tolist() == [3, 4]
    *_, last = imported(tokens + 90, valid, *state.values())  # ids are not looked at any more
    assert last.shape == arrays[-1].shape


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "affine"])
def test_other_kinds_of_weights(kind):
    logits, state = model_of(kind)(ROWS[0])
    expected, _ = run_plain(model_of(kind), ROWS[0])
    assert logits.dtype == getattr(mx, "float32" if kind == "affine" else kind)
    assert state["layers.0.keys"].dtype == logits.dtype
    limits = {"float16": 1e-3, "bfloat16": 1e-2, "affine": TOLERANCE}
    assert relative_error(logits[0], expected) <= limits[kind]


@pytest.mark.parametrize("pad", [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1]])
def test_a_square_mask_without_a_cache_is_about_the_tokens(pad):
    """As Hugging Face builds it: `[B, 1, T, T]`, causal, rows and columns of padding left out."""
    model = make_model()
    real = mx.array(pad) != 0
    step = mx.arange(6)
    square = (step <= step[:, None]) & real[None] & real[:, None]
    tokens = random_tokens(6)
    expected, cache = model([tokens], mask=mx.array([pad]))
    logits, state = model([tokens], mask=square[None, None])
    assert state["lengths"].tolist() == cache["lengths"].tolist() == [4]
    for place, is_real in enumerate(pad):
        if is_real:
            assert mx.array_equal(logits[0, place], expected[0, place])


@pytest.mark.parametrize("made_for", [5, 9])
def test_a_mask_made_for_other_lengths_is_refused(made_for):
    model = make_model()
    state = model([1, 2, 3])[1] if made_for != 5 else None
    state = model.init_cache(1, 16) if state is None else state
    capacity = state["layers.0.keys"].shape[2]
    mask = masks.causal(mx.ones((1, 2)), mx.array([made_for], dtype=mx.int32), capacity)
    with pytest.raises(InputError, match="made for other lengths"):
        model([[4, 5]], mask=mask, cache=state)


def test_a_mask_that_shows_everything_is_meant():
    model = make_model()
    logits, _ = model(
        [[1, 2, 3]], mask=mx.ones((1, 1, 3, 16), dtype=mx.bool_), cache=model.init_cache(1, 16)
    )
    both_ways, _ = model([[1, 2, 3]], mask=mx.ones((1, 1, 3, 3), dtype=mx.bool_))
    assert relative_error(logits, both_ways) <= TOLERANCE


def test_trees_take_their_positions():
    model = make_model()
    prefix, tree = random_tokens(5), random_tokens(4, seed=1)
    cache = model([prefix])[1]
    capacity = cache["layers.0.keys"].shape[2]
    parents = mx.array([[-1, 0, 0, 1]], dtype=mx.int32)
    mask, positions = masks.from_tree(parents, cache["lengths"], capacity)
    logits, _ = model([tree], mask=mask, cache=cache, positions=positions)
    branch, _ = model([[*prefix, tree[0], tree[2]]])
    assert relative_error(logits[0, 2], branch[0, -1]) <= TOLERANCE
    with pytest.raises(InputError, match="positions: expected int32"):
        model([tree], mask=mask, cache=cache, positions=positions[:, :2])


def test_tokens_may_be_numpy():
    model = make_model()
    expected, _ = model([[1, 2, 3]])
    for tokens in (np.array([1, 2, 3]), np.array([[1, 2, 3]], dtype=np.uint8)):
        assert mx.array_equal(model(tokens)[0], expected)
