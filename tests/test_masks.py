"""The mask helpers alone: what they draw, by hand, traced, lazy, and what they refuse."""

from __future__ import annotations

import re
import textwrap
import tracemalloc
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any

from funcrt import masks
from funcrt.errors import InputError

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

Rows = list[list[list[bool]]]


def int32(*values: Any) -> mx.array:
    return mx.array(values, dtype=mx.int32)


# --- drawings -----------------------------------------------------------------------------------


def read_drawing(helper: Callable[..., Any]) -> tuple[str, list[list[str]], list[list[bool]]]:
    """Prose before a docstring's drawing, the words that head its lines, and its matrix."""
    doc = textwrap.dedent(helper.__doc__ or "")
    prose, drawing = doc.split("::\n", maxsplit=1)
    title, *lines = drawing.strip("\n").split("\n\n")[0].splitlines()
    slots = len(re.findall(r"\d+", title.split("slot")[1]))
    words, matrix = [], []
    for line in lines:
        cells = line.split()
        words.append(cells[:-slots])
        matrix.append([{"x": True, ".": False}[cell] for cell in cells[-slots:]])
    named = re.search(r"capacity\s+(\d+)", prose)
    assert named is not None
    assert int(named[1]) == slots
    return prose, words, matrix


def test_causal_is_what_its_docstring_draws():
    _, words, matrix = read_drawing(masks.causal)
    valid = int32([int(word[0]) for word in words])
    assert len(matrix) == 4
    assert masks.causal(valid, int32(2), 7).tolist() == [[matrix]]


def test_from_lengths_is_what_its_docstring_draws():
    prose, words, matrix = read_drawing(masks.from_lengths)
    assert "one cached slot, two real tokens of three" in " ".join(prose.split())
    assert masks.from_lengths(int32(2), len(words), int32(1), 5).tolist() == [[matrix]]


def test_from_block_is_what_its_docstring_draws():
    prose, words, matrix = read_drawing(masks.from_block)
    found = re.search(r"`(\[\[.*\]\])`", prose)
    assert found is not None
    block = int32(*literal_eval(found[1]))
    assert len(words) == block.shape[0] == 2
    assert masks.from_block(block, int32(2), 6).tolist() == [[matrix]]


def test_from_tree_is_what_its_docstring_draws():
    prose, words, matrix = read_drawing(masks.from_tree)
    found = re.search(r"parents `(\[.*\])`", prose)
    assert found is not None
    mask, positions = masks.from_tree(int32(literal_eval(found[1])), int32(2), 7)
    assert mask.tolist() == [[matrix]]
    assert positions.tolist() == [[int(word[1]) for word in words]]
    assert [word[0] for word in words] == ["a", "b", "c", "d"]


def test_prefix_lm_is_what_its_docstring_draws():
    prose, words, matrix = read_drawing(masks.prefix_lm)
    assert "four tokens of which three are the prefix" in " ".join(prose.split())
    valid = mx.ones((1, len(words)))
    assert masks.prefix_lm(int32(3), valid, int32(0), 6).tolist() == [[matrix]]


def test_as_mask_is_what_its_docstring_draws():
    _, words, matrix = read_drawing(masks.as_mask)
    additive = mx.array([[float(word) for word in line] for line in words])
    assert additive.shape == (3, 4)
    assert masks.as_mask(additive).tolist() == [[matrix]]


# --- by hand ------------------------------------------------------------------------------------


def causal_by_hand(valid: list[list[bool]], lengths: list[int], capacity: int) -> Rows:
    """Token by token, as a cache would fill."""
    rows = []
    for real, filled in zip(valid, lengths, strict=True):
        lines = []
        for is_real in real:
            filled += is_real
            lines.append([is_real and slot < filled for slot in range(capacity)])
        rows.append(lines)
    return rows


def block_by_hand(blocks: Rows, lengths: list[int], capacity: int) -> Rows:
    """Every pair of tokens, the key looked up where the cache put it."""
    rows = []
    for block, filled in zip(blocks, lengths, strict=True):
        real = [any(line) for line in block]
        slot_of, slot = {}, filled
        for token, is_real in enumerate(real):
            if is_real:
                slot_of[token], slot = slot, slot + 1
        lines = []
        for query, line in enumerate(block):
            seen = {slot_of[key] for key, sees in enumerate(line) if sees and key in slot_of}
            seen |= set(range(filled)) if real[query] else set()
            lines.append([slot in seen for slot in range(capacity)])
        rows.append(lines)
    return rows


@st.composite
def ragged(draw, most_tokens: int = 6):
    """Batch, tokens, lengths and capacity; texts may be longer than what fits."""
    batch, tokens, capacity = (draw(st.integers(1, most)) for most in (3, most_tokens, 9))
    lengths = draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))
    return batch, tokens, lengths, capacity


def booleans(*shape: int) -> st.SearchStrategy[Any]:
    strategy: st.SearchStrategy[Any] = st.booleans()
    for size in reversed(shape):
        strategy = st.lists(strategy, min_size=size, max_size=size)
    return strategy


@given(st.data())
def test_causal_by_hand(data):
    batch, tokens, lengths, capacity = data.draw(ragged())
    valid = data.draw(booleans(batch, tokens))
    mask = masks.causal(mx.array(valid), mx.array(lengths), capacity)
    assert mask.shape == (batch, 1, tokens, capacity)
    assert mask.dtype == mx.bool_
    assert mask[:, 0].tolist() == causal_by_hand(valid, lengths, capacity)


@given(st.data())
def test_from_lengths_is_causal_padded_on_the_right(data):
    batch, tokens, lengths, capacity = data.draw(ragged())
    counts = data.draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
    mask = masks.from_lengths(mx.array(counts), tokens, mx.array(lengths), capacity)
    valid = [[token < count for token in range(tokens)] for count in counts]
    assert mask.shape == (batch, 1, tokens, capacity)
    assert mask[:, 0].tolist() == causal_by_hand(valid, lengths, capacity)


@given(st.data())
def test_from_block_by_hand(data):
    batch, tokens, lengths, capacity = data.draw(ragged())
    blocks = data.draw(booleans(batch, tokens, tokens))
    mask = masks.from_block(mx.array(blocks), mx.array(lengths), capacity)
    assert mask.shape == (batch, 1, tokens, capacity)
    assert mask.dtype == mx.bool_
    assert mask[:, 0].tolist() == block_by_hand(blocks, lengths, capacity)
    shared = masks.from_block(mx.array(blocks[0]), mx.array(lengths), capacity)
    assert shared[:, 0].tolist() == block_by_hand([blocks[0]] * batch, lengths, capacity)


@given(st.data())
def test_from_tree_by_hand(data):
    batch, tokens, lengths, capacity = data.draw(ragged(most_tokens=9))
    parents = data.draw(
        st.tuples(
            *[st.tuples(*[st.integers(-3, node - 1) for node in range(tokens)])] * batch
        ).filter(lambda rows: all(p < 0 or row[p] >= -1 for row in rows for p in row))
    )
    blocks, positions = [], []
    for row, filled in zip(parents, lengths, strict=True):
        families: list[set[int]] = []
        for node, parent in enumerate(row):
            above = families[parent] if parent >= 0 else set()
            families.append({node} | above if parent >= -1 else set())
        blocks.append([[key in family for key in range(tokens)] for family in families])
        positions.append([filled + len(f) - 1 if f else 0 for f in families])
    mask, where = masks.from_tree(mx.array(parents), mx.array(lengths), capacity)
    assert mask[:, 0].tolist() == block_by_hand(blocks, lengths, capacity)
    assert where.dtype == mx.int32
    assert where.tolist() == positions


def test_from_tree_takes_long_chains_and_parents_that_come_later():
    chain = mx.arange(-1, 40, dtype=mx.int32)[None]
    mask, positions = masks.from_tree(chain, int32(3), 64)
    assert mask.tolist() == masks.causal(mx.ones((1, 41)), int32(3), 64).tolist()
    assert positions.tolist() == [list(range(3, 44))]
    mask, positions = masks.from_tree(int32([2, 0, -1]), int32(0), 4)  # 2 -> 0 -> 1
    assert mask[0, 0].astype(mx.int32).tolist() == [[1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 0]]
    assert positions.tolist() == [[1, 2, 0]]


@given(st.data())
def test_prefix_lm_by_hand(data):
    batch, tokens, _, capacity = data.draw(ragged())
    valid = data.draw(booleans(batch, tokens))
    prefixes = [data.draw(st.integers(0, sum(real))) for real in valid]
    zeros = mx.zeros((batch,), mx.int32)
    mask = masks.prefix_lm(mx.array(prefixes), mx.array(valid), zeros, capacity)
    expected = np.array(causal_by_hand(valid, [0] * batch, capacity))
    for row, prefix in enumerate(prefixes):
        expected[row, :, :prefix] |= np.array(valid[row])[:, None]
    np.testing.assert_array_equal(np.array(mask)[:, 0], expected)


def test_prefix_lm_of_a_text_that_goes_on_is_causal():
    """Calls after the prefix's own, idle rows, and rows whose prefix is still to come."""
    lengths, prefixes = int32(5, 3, 0), int32(5, 2, 4)
    valid = mx.array([[1, 1], [0, 1], [0, 0]])
    mask = masks.prefix_lm(prefixes, valid, lengths, 9)
    assert mask.tolist() == masks.causal(valid, lengths, 9).tolist()


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
    expected = [
        [False] * 5,
        [True, True, False, False, False],
        [False] * 5,
        [True, True, True, False, False],
    ]
    assert masks.causal(valid, int32(1), 5)[0, 0].tolist() == expected
    assert masks.prefix_lm(int32(0), valid, int32(1), 5)[0, 0].tolist() == expected
    rows = [[0] * 4, [0, real, 0, 0], [0] * 4, [0, real, 0, real]]
    block = mx.array(rows, dtype=dtype)
    assert masks.from_block(block, int32(1), 5)[0, 0].tolist() == expected
    assert masks.from_block(block[None], int32(1), 5)[0, 0].tolist() == expected


def test_what_stands_in_a_padding_column_of_a_block_does_not_matter():
    """Token 1 is padding, whatever the others say about it."""
    expected = masks.causal(mx.array([[1, 0, 1]]), int32(2), 7).tolist()
    for column in (0, 1):
        block = mx.array([[1, column, 0], [0, 0, 0], [1, column, 1]])
        assert masks.from_block(block, int32(2), 7).tolist() == expected


def test_one_block_serves_every_chunk():
    block = mx.tril(mx.ones((4, 4), mx.int16))
    for start in (0, 4, 8, 12):
        lengths, valid = int32(start, start + 1), mx.ones((2, 4))
        expected = masks.causal(valid, lengths, 20).tolist()
        assert masks.from_block(block, lengths, 20).tolist() == expected


# --- as_mask ------------------------------------------------------------------------------------


def test_as_mask_brings_any_rank_to_four():
    array = np.arange(24).reshape(2, 3, 4) % 3
    for dtype in (mx.bool_, mx.int16, mx.uint8, mx.int32):
        mask = masks.as_mask(mx.array(array).astype(dtype))
        assert mask.shape == (2, 1, 3, 4)
        assert mask.dtype == mx.bool_
        np.testing.assert_array_equal(np.array(mask)[:, 0], array != 0)
    assert masks.as_mask(mx.array(array[0])).shape == (1, 1, 3, 4)
    assert masks.as_mask(mx.array(array[:, None] > 0)).shape == (2, 1, 3, 4)
    assert masks.as_mask(mx.array([[256, 0]], dtype=mx.int16)).tolist() == [[[[True, False]]]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("low", [-1e4, -3e4, float("-inf"), "least"])
def test_additive_masks_of_every_rank(dtype, low):
    kind = getattr(mx, dtype)
    low = mx.finfo(kind).min if low == "least" else low
    see = np.tril(np.ones((3, 5), bool), 1)
    additive = mx.where(mx.array(see), 0.0, low).astype(kind)
    for lifted in (additive, additive[None], additive[None, None]):
        np.testing.assert_array_equal(np.array(masks.as_mask(lifted))[0, 0], see)
    # Held in bfloat16 once, -1e4 is -9984.
    wide = masks.as_mask(additive.astype(mx.bfloat16).astype(mx.float32))
    np.testing.assert_array_equal(np.array(wide)[0, 0], see)
    assert masks.as_mask(-mx.zeros((2, 2), kind)).tolist() == [[[[True] * 2] * 2]]  # -0.0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_as_mask_gives_an_additive_form_of_the_wanted_dtype(dtype):
    kind = getattr(mx, dtype)
    see = mx.tril(mx.ones((3, 4), mx.int16))
    for array in (see, see != 0, mx.where(see != 0, 0.0, -1e30)):
        additive = masks.as_mask(array, dtype=kind)
        assert additive.dtype == kind
        assert additive.shape == (1, 1, 3, 4)
        assert masks.as_mask(additive).tolist() == masks.as_mask(see).tolist()
        # A score may be added without leaving the dtype.
        assert mx.all(mx.isfinite(additive - mx.array(1000, kind))).item()


@pytest.mark.parametrize("value", [1.0, -1.0, -0.5, 1e-6, -9000.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_finite_biases_are_refused(value, dtype):
    array = mx.array([[0.0, float("-inf")], [value, 0.0]]).astype(getattr(mx, dtype))
    if array[1, 0].item() == 0:
        pytest.skip("the dtype has no such value")
    shown = re.escape(f"{dtype} with a {array[1, 0].item():g}: floats are additive")
    with pytest.raises(InputError, match=rf"{shown} .*; biases \(ALiBi\) belong to the model"):
        masks.as_mask(array)


def test_additive_integers_are_refused():
    """`(1 - mask) * -10000` of an integer mask: read as nonzero = may attend, it is reversed."""
    see = mx.tril(mx.ones((3, 3), mx.int32))
    for dtype in (mx.int16, mx.int32, mx.int64):
        with pytest.raises(InputError, match=f"{dtype} with a -10000: floats are additive"):
            masks.as_mask(((1 - see) * -10000).astype(dtype))
        assert masks.as_mask(-see.astype(dtype)).tolist() == masks.as_mask(see).tolist()
    assert masks.as_mask(mx.array([[65000, 0]], dtype=mx.uint16)).tolist() == [[[[True, False]]]]


def test_alibi_is_refused():
    distance = mx.arange(6)[:, None] - mx.arange(6)
    alibi = mx.where(distance >= 0, -0.5 * distance, float("-inf"))
    with pytest.raises(InputError, match=r"with a -0\.5: .* other masks hold 0 and 1; biases"):
        masks.as_mask(alibi, dtype=mx.float32)


def test_as_mask_refuses():
    for shape in [(), (4,), (1, 4, 2, 2), (1, 1, 1, 2, 2)]:
        with pytest.raises(InputError, match=r"expected \[T, S\], \[B, T, S\] or \[B, 1, T, S\]"):
            masks.as_mask(mx.zeros(shape, mx.int32))
    for dtype in (mx.int32, mx.bool_):
        with pytest.raises(InputError, match="expected a float dtype, or None for bool, got"):
            masks.as_mask(mx.ones((2, 2)) != 0, dtype=dtype)


# --- bad input ----------------------------------------------------------------------------------


def test_ranks_of_padding_masks():
    lengths = int32(0, 0)
    masks.causal(mx.ones((2, 3)), lengths, 4)
    for shape in [(), (2,), (2, 1, 3), (2, 1, 3, 4), (2, 1, 1, 3, 4)]:
        match = re.escape(f"valid: expected shape [B, T], got {list(shape)}")
        with pytest.raises(InputError, match=match):
            masks.causal(mx.ones(shape), lengths, 4)
        with pytest.raises(InputError, match=match):
            masks.prefix_lm(lengths, mx.ones(shape), lengths, 4)


@pytest.mark.parametrize(
    "bad", [int32(0), mx.array(0, dtype=mx.int32), int32([0, 0]), mx.array([0, 0]) > 0, mx.ones(2)]
)
def test_lengths_that_do_not_fit_the_mask(bad):
    """Conflicting masks and lengths: rows of one that the other does not have."""
    calls = [
        lambda: masks.causal(mx.ones((2, 3)), bad, 4),
        lambda: masks.from_block(mx.ones((2, 3, 3)), bad, 4),
        lambda: masks.from_tree(int32([-1], [-1]), bad, 4),
        lambda: masks.prefix_lm(int32(0, 0), mx.ones((2, 3)), bad, 4),
        lambda: masks.prefix_lm(bad, mx.ones((2, 3)), int32(0, 0), 4),
        lambda: masks.from_lengths(bad, 3, int32(0, 0), 4),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"lengths: expected int32 \[2\], got"):
            call()


def test_lengths_without_rows():
    for lengths in (mx.array(0, dtype=mx.int32), int32([0])):
        with pytest.raises(InputError, match=r"lengths: expected int32 \[B\], got"):
            masks.from_block(mx.ones((3, 3)), lengths, 4)
        with pytest.raises(InputError, match=r"lengths: expected int32 \[B\], got"):
            masks.from_lengths(int32(1), 3, lengths, 4)


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_capacity_that_no_cache_has(capacity):
    lengths, valid = int32(0), mx.ones((1, 2))
    for call in [
        lambda: masks.causal(valid, lengths, capacity),
        lambda: masks.from_lengths(int32(1), 2, lengths, capacity),
        lambda: masks.from_block(mx.ones((2, 2)), lengths, capacity),
        lambda: masks.from_tree(int32([-1]), lengths, capacity),
        lambda: masks.prefix_lm(lengths, valid, lengths, capacity),
    ]:
        with pytest.raises(InputError, match=f"capacity: .* at least, got {capacity}"):
            call()


def test_counts_that_contradict_the_tokens():
    for counts in (int32(1, 4), int32(-1, 2)):
        with pytest.raises(InputError, match=r"new_lengths: expected 0 to 3 \(T\), got \["):
            masks.from_lengths(counts, 3, int32(0, 0), 9)


def test_blocks_that_are_not_square():
    for shape in [(3,), (2, 3), (1, 2, 3), (1, 1, 3, 3), (1, 1, 1, 3, 3)]:
        with pytest.raises(InputError, match=r"block: expected \[T, T\] or \[B, T, T\], got"):
            masks.from_block(mx.ones(shape), int32(0), 4)


@pytest.mark.parametrize(
    ("parents", "node"),
    [([0], 0), ([-1, 2], 1), ([1, 0], 0), ([-1, 2, 3, 1], 1), ([-2, 0], 1), ([-1, 0, -5, 2], 3)],
)
def test_parents_that_are_no_tree(parents, node):
    with pytest.raises(InputError, match=f"node {node} of .* does not lead to the cached text"):
        masks.from_tree(int32([-1] * len(parents), parents), int32(0, 0), 9)


def test_parents_of_the_wrong_kind():
    for parents in (mx.array([[-1.0]]), int32(-1), int32([[-1]]), mx.array([[True]])):
        with pytest.raises(InputError, match=r"parents: expected int32 \[B, T\], got"):
            masks.from_tree(parents, int32(0), 9)


@pytest.mark.parametrize(("prefix", "length"), [(4, 0), (2, 1), (9, 3)])
def test_a_prefix_must_fit_one_call(prefix, length):
    """It would reach past the call, or it began in an earlier one."""
    match = f"prefix of {prefix} tokens must fit one call, this one has tokens {length} to"
    with pytest.raises(InputError, match=match):
        masks.prefix_lm(int32(0, prefix), mx.ones((2, 3)), int32(0, length), 16)


# --- traced, and lazy ---------------------------------------------------------------------------

VALID, LENGTHS = mx.array([[0, 1, 1], [1, 0, 1]], dtype=mx.int16), int32(2, 0)
BLOCK = mx.array([[[1, 0, 0], [1, 1, 0], [0, 0, 0]], [[1, 1, 0], [1, 1, 0], [0, 0, 1]]])
PARENTS, ADDITIVE = int32([-1, 0, 0], [-1, -2, 0]), mx.array([[0.0, -1e9], [0.0, 0.0]])


def build_all(valid, lengths, counts, block, parents, additive):
    """Every helper in one function."""
    return (
        masks.causal(valid, lengths, 8),
        masks.from_lengths(counts, 3, lengths, 8),
        masks.from_block(block, lengths, 8),
        masks.from_block(block[0], lengths, 8),
        *masks.from_tree(parents, lengths, 8),
        masks.prefix_lm(counts, valid, lengths, 8),
        masks.as_mask(additive),
        masks.as_mask(additive, dtype=mx.float16),
    )


EXAMPLE = (VALID, LENGTHS, int32(1, 2), BLOCK, PARENTS, ADDITIVE)
# Each but the first two and the block is refused in a direct call; traced, it is a value like any.
BAD = (VALID, LENGTHS, int32(7, -1), BLOCK, int32([2, 3, 1], [0, 0, 0]), ADDITIVE + 1)


def assert_equal(ours, theirs):
    assert [a.dtype for a in ours] == [a.dtype for a in theirs]
    assert [a.tolist() for a in ours] == [a.tolist() for a in theirs]


def test_helpers_trace_and_leave_their_checks_to_direct_calls(tmp_path: Path):
    direct = build_all(
        VALID, mx.zeros_like(LENGTHS), int32(1, 2), BLOCK, PARENTS, ADDITIVE
    )  # an empty cache: the prefix of a direct call is checked
    example = (VALID, mx.zeros_like(LENGTHS), *EXAMPLE[2:])
    file = str(tmp_path / "masks.mlxfn")
    mx.export_function(file, build_all, *example)
    for function in (mx.compile(build_all), mx.import_function(file)):
        assert_equal(function(*example), direct)
        wild = function(*BAD)
        # A parent that does not exist is none: indices never leave an array.
        assert wild[4][0, 0, :, :5].astype(mx.int32).tolist() == [
            [1, 1, 1, 1, 1],
            [1, 1, 0, 1, 0],
            [1, 1, 0, 1, 1],
        ]
    for index in (2, 4, 5):
        with pytest.raises(InputError):
            build_all(*[BAD[i] if i == index else example[i] for i in range(6)])


def test_vmap():
    """One row at a time, lifted over a batch."""

    def one(valid, length, block):
        return (
            masks.causal(valid[None], length[None], 8)[0],
            masks.from_block(block[None], length[None], 8)[0],
        )

    lifted = mx.vmap(one)(VALID, LENGTHS, BLOCK)
    expected = masks.causal(VALID, LENGTHS, 8), masks.from_block(BLOCK, LENGTHS, 8)
    assert_equal(lifted, expected)


T, S = 2048, 32768


@pytest.mark.parametrize(
    "build",
    [
        lambda valid, lengths, block: masks.causal(valid, lengths, S),
        lambda valid, lengths, block: masks.from_lengths(lengths, T, lengths, S),
        lambda valid, lengths, block: masks.from_block(block, lengths, S),
        lambda valid, lengths, block: masks.from_block(block[None], lengths, S),
        lambda valid, lengths, block: masks.from_tree(
            mx.arange(-1, T - 1, dtype=mx.int32)[None], lengths, S
        )[0],
        lambda valid, lengths, block: masks.prefix_lm(lengths, valid, mx.zeros_like(lengths), S),
        lambda valid, lengths, block: masks.as_mask(mx.broadcast_to(block[:, :1], (T, S))),
    ],
    ids=["causal", "from_lengths", "block", "blocks", "from_tree", "prefix_lm", "as_mask"],
)
def test_nothing_wide_is_built_before_it_is_needed(build):
    """[T, S] is 64 MiB of booleans; neither MLX nor the host may hold a hundredth of it."""
    arrays = mx.ones((1, T), mx.int16), int32(7), mx.tril(mx.ones((T, T), mx.uint8))
    mx.eval(arrays)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    try:
        mask = build(*arrays)
        host = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mask.shape == (1, 1, T, S)
    assert mx.get_peak_memory() - before < 2**19
    assert host < 2**19
