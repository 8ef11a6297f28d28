"""What models compute under each form of mask, against runs alone and a float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from funcrt import cache as caches
from funcrt import masks
from funcrt.buckets import BucketPlan
from funcrt.cache import CacheState, state_size
from funcrt.errors import InputError
from funcrt.model import Model
from tests.helpers import (
    TINY,
    TOLERANCE,
    Array,
    assert_same,
    expand,
    ids,
    make_model,
    oracle,
    random_tokens,
    relative_error,
    run_plain,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

WINDOW = 3
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
}
# Prefixes longer than the window, shorter, and none at all.
PREFIXES = [random_tokens(9, 1), random_tokens(2, 2), []]


@cache
def model_of(family: str = "llama", kind: str = "float32") -> Model:
    return make_model(kind, **FAMILIES[family])


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Model:
    return model_of(request.param)


def int32(*values: Any) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def plain(model: Model, tokens: Sequence[int]) -> Array:
    return run_plain(model, tokens)[0]


def forward(
    model: Model, tokens: mx.array, mask: mx.array, state: CacheState, positions: Any = None
) -> tuple[mx.array, CacheState]:
    return model.forward(model.params, tokens, mask, state, positions)


def prefill(model: Model, rows: Sequence[Sequence[int]], capacity: int, **layout: Any) -> Any:
    """A ragged batch, padded on the left."""
    width = max(1, *map(len, rows))
    lines = [[95] * (width - len(row)) + list(row) for row in rows]
    valid = mx.array([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    state = model.init_cache(len(rows), capacity, **layout)
    mask = masks.causal(valid, state["lengths"], capacity)
    return forward(model, ids(*lines), mask, state)


# --- padding ------------------------------------------------------------------------------------

PATTERNS = {
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
    "right": [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]],
    "holes": [[1, 0, 0, 1, 0], [0, 1, 1, 0, 1]],
}


@pytest.mark.parametrize("side", PATTERNS)
@pytest.mark.parametrize("dtype", [mx.bool_, mx.int16, mx.uint8, mx.int64, mx.float16, mx.bfloat16])
def test_padding_of_any_dtype_and_place(model, side, dtype):
    valid = PATTERNS[side]
    state = prefill(model, PREFIXES[:2], 24)[1]
    mask = masks.causal(mx.array(valid).astype(dtype), state["lengths"], 24)
    tokens = [random_tokens(5, 3), random_tokens(5, 4)]
    logits, state = forward(model, ids(*tokens), mask, state)
    assert state["lengths"].tolist() == [9 + sum(valid[0]), 2 + sum(valid[1])]
    for row in range(2):
        real = np.array(valid[row], bool)
        text = [*PREFIXES[row], *np.array(tokens[row])[real].tolist()]
        expected = plain(model, text)[len(PREFIXES[row]) :]
        assert relative_error(to_numpy(logits[row])[real], expected) <= TOLERANCE


def test_right_padding_lengths(model):
    counts = [3, 5, 0]
    state = prefill(model, PREFIXES, 24)[1]
    mask = masks.from_lengths(int32(*counts), 5, state["lengths"], 24)
    tokens = [random_tokens(5, row) for row in range(3)]
    logits, state = forward(model, ids(*tokens), mask, state)
    assert state["lengths"].tolist() == [12, 7, 0]
    for row, count in enumerate(counts[:2]):
        expected = plain(model, PREFIXES[row] + tokens[row][:count])[-count:]
        assert relative_error(logits[row, :count], expected) <= TOLERANCE


# --- blocks -------------------------------------------------------------------------------------


def test_one_block_over_all_chunks_of_a_long_prompt(model):
    """61 tokens in chunks of 8: the last is padded, on either side, by the same kind of block."""
    rows = [random_tokens(61, 5), random_tokens(61, 6)]
    state = model.init_cache(2, 64)
    block, parts = mx.tril(mx.ones((8, 8), mx.int16)), []
    for start in range(0, 56, 8):
        chunk = ids(*[row[start : start + 8] for row in rows])
        logits, state = forward(model, chunk, masks.from_block(block, state["lengths"], 64), state)
        parts.append(logits)
    last = ids(rows[0][56:] + [95] * 3, [95] * 3 + rows[1][56:])
    valid = mx.array([[1] * 5 + [0] * 3, [0] * 3 + [1] * 5])
    block = block * valid[:, None] * valid[..., None]
    logits, state = forward(model, last, masks.from_block(block, state["lengths"], 64), state)
    assert state["lengths"].tolist() == [61, 61]
    for row, real in enumerate((slice(0, 5), slice(3, 8))):
        whole = np.concatenate([*(to_numpy(part[row]) for part in parts), logits[row, real]])
        assert relative_error(whole, plain(model, rows[row])) <= TOLERANCE


def test_a_block_chunked_equals_causal_chunks_bitwise(model):
    tokens, block = random_tokens(24), mx.tril(mx.ones((8, 8)))
    by_block, by_causal = model.init_cache(1, 32), model.init_cache(1, 32)
    for start in (0, 8, 16):
        chunk = ids(tokens[start : start + 8])
        mask = masks.from_block(block, by_block["lengths"], 32)
        ours, by_block = forward(model, chunk, mask, by_block)
        mask = masks.causal(mx.ones((1, 8)), by_causal["lengths"], 32)
        theirs, by_causal = forward(model, chunk, mask, by_causal)
        assert_same({"logits": ours, **by_block}, {"logits": theirs, **by_causal})


def test_blocks_of_any_pattern_against_the_oracle():
    """A row each: both ways, a token that nobody sees, padding in the middle."""
    model = model_of()
    blocks = np.array(
        [
            [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
            [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]],
            [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]],
        ]
    )
    state = prefill(model, PREFIXES, 16)[1]
    tokens = [random_tokens(4, row) for row in range(3)]
    mask = masks.from_block(mx.array(blocks), state["lengths"], 16)
    logits, state = forward(model, ids(*tokens), mask, state)
    assert state["lengths"].tolist() == [13, 6, 3]
    for row, block in enumerate(blocks):
        real = block.any(axis=1)
        text = [*PREFIXES[row], *np.array(tokens[row])[real].tolist()]
        visible = np.tril(np.ones((len(text), len(text)), bool))
        count = int(real.sum())
        visible[-count:, -count:] = block[real][:, real]
        expected = oracle(TINY, expand(model), text, visible=visible)[-count:]
        assert relative_error(to_numpy(logits[row])[real], expected) <= TOLERANCE


def test_guess_and_verify_with_a_two_by_two_block(model):
    """One row's guess is right and stays; the other's is taken back with `trim`."""
    rows = [random_tokens(7, 1), random_tokens(5, 2)]
    logits, state = prefill(model, rows, 16)
    first = mx.argmax(logits[:, -1], axis=-1).tolist()
    texts = [[*row, token] for row, token in zip(rows, first, strict=True)]
    right = [int(plain(model, text)[-1].argmax()) for text in texts]
    guesses = [right[0], (right[1] + 1) % TINY.vocab_size]
    mask = masks.from_block(int32([1, 0], [1, 1]), state["lengths"], 16)
    calls = ids(*[[token, guess] for token, guess in zip(first, guesses, strict=True)])
    logits, state = forward(model, calls, mask, state)
    assert mx.argmax(logits[:, 0], axis=-1).tolist() == right
    rejected = (mx.array(guesses) != mx.array(right)).astype(mx.int32)
    assert rejected.tolist() == [0, 1]
    state = caches.trim(state, rejected)
    assert state["lengths"].tolist() == [9, 6]
    # The right row goes on from its guess, the other from what should have come instead.
    following = [int(logits[0, 1].argmax().item()), right[1]]
    texts = [[*texts[0], guesses[0], following[0]], [*texts[1], following[1]]]
    mask = masks.causal(mx.ones((2, 1)), state["lengths"], 16)
    logits, state = forward(model, ids(*[[token] for token in following]), mask, state)
    for row, text in enumerate(texts):
        expected, fresh = run_plain(model, text, 16)
        assert relative_error(logits[row, 0], expected[-1]) <= TOLERANCE
        assert state["lengths"][row].item() == len(text) == fresh["lengths"].item()
        keys, theirs = (
            s["layers.1.keys"][i, :, : len(text)] for s, i in ((state, row), (fresh, 0))
        )
        assert relative_error(keys, theirs) <= TOLERANCE


def test_compiled_prefill_block_equals_forward_with_its_mask():
    model = model_of()
    compiled = model.compiled(BucketPlan(batch=2, tokens=4, capacity=16))
    both = np.stack([np.ones((4, 4), bool), np.tril(np.ones((4, 4), bool))])
    both[1, 1] = False  # padding
    blocks = mx.array(both)
    tokens = ids(random_tokens(4, 7), random_tokens(4, 8))
    ours, theirs = compiled.init_cache(2, 16), model.init_cache(2, 16)
    for _ in range(2):
        logits, ours = compiled.prefill_block(tokens, blocks, ours)
        mask = masks.from_block(blocks, theirs["lengths"], 16)
        expected, theirs = model.forward(model.prepared, tokens, mask, theirs)
        assert relative_error(logits, expected[:, -1]) <= TOLERANCE
        assert ours["lengths"].tolist() == theirs["lengths"].tolist()
        assert relative_error(ours["layers.1.keys"], theirs["layers.1.keys"]) <= TOLERANCE
    assert compiled.traces == {"prefill_block_b2_t4_s16": 1}


# --- trees --------------------------------------------------------------------------------------

# Row 0: two roots, 0 -> (2 -> 4, 5) and 1 -> 3. Row 1: 0 -> (2, 3 -> 5), padding between. Row 2:
# two leaves, then a chain whose end is too far from its root for the window, but not by slot.
TREES = [
    [-1, -1, 0, 1, 2, 0],
    [-1, -7, 0, 0, -2, 3],
    [-1, -1, -1, 2, 3, 4],
]


def branch(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize(("family", "ring"), [("llama", None), ("mistral", None), ("mistral", 9)])
def test_each_branch_of_a_tree_equals_the_branch_alone(family, ring):
    """Ragged prefixes and trees in one batch; a window counts positions, not slots."""
    model = model_of(family)
    state = prefill(model, PREFIXES, 24, max_tokens=ring)[1]
    mask, positions = masks.from_tree(int32(*TREES), state["lengths"], 24)
    tokens = [random_tokens(6, 10 + row) for row in range(3)]
    logits, state = forward(model, ids(*tokens), mask, state, positions)
    assert state["lengths"].tolist() == [15, 6, 6]
    for row, parents in enumerate(TREES):
        for node in range(6):
            if parents[node] < -1:
                continue
            path = branch(parents, node)
            text = PREFIXES[row] + [tokens[row][i] for i in path]
            assert positions[row, node].item() == len(text) - 1
            expected = plain(model, text)[-1]
            assert relative_error(logits[row, node], expected) <= TOLERANCE, (row, node)


def test_a_tree_by_slots_would_be_wrong_under_a_window():
    """So that the test above can fail: the same tree without positions differs."""
    model = model_of("mistral")
    state = prefill(model, PREFIXES[:1], 24)[1]
    parents = int32(TREES[0])
    mask, positions = masks.from_tree(parents, state["lengths"], 24)
    tokens = ids(random_tokens(6, 10))
    right, _ = forward(model, tokens, mask, state, positions)
    wrong, _ = forward(model, tokens, mask, prefill(model, PREFIXES[:1], 24)[1])
    assert relative_error(wrong[0, 0], right[0, 0]) <= TOLERANCE
    assert relative_error(wrong[0, 4], right[0, 4]) > 100 * TOLERANCE


def test_an_accepted_branch_goes_on_like_a_fresh_run(model):
    """Verify a tree, keep one branch per row, decode a token."""
    state = prefill(model, PREFIXES[:2], 24)[1]
    before = state["lengths"] + 0
    mask, positions = masks.from_tree(int32(*TREES[:2]), before, 24)
    tokens = [random_tokens(6, 10), random_tokens(6, 11)]
    _, state = forward(model, ids(*tokens), mask, state, positions)
    paths = [[0, 2, 4], [0, 3, 5]]
    # Slots follow rank among real nodes: row 1 has padding at 1 and 4.
    state = caches.keep(state, int32([9, 11, 13], [2, 4, 5]), before)
    assert state["lengths"].tolist() == [12, 5]
    mask = masks.causal(mx.ones((2, 1)), state["lengths"], 24)
    logits, state = forward(model, ids([33], [44]), mask, state)
    for row, (path, token) in enumerate(zip(paths, (33, 44), strict=True)):
        text = [*PREFIXES[row], *(tokens[row][i] for i in path), token]
        assert relative_error(logits[row, 0], plain(model, text)[-1]) <= TOLERANCE


# --- prefix-LM ----------------------------------------------------------------------------------


def prefix_visible(prefix: int, count: int) -> Array:
    """Query q sees key k if k is not later or in the prefix."""
    return np.array([[k <= q or k < prefix for k in range(count)] for q in range(count)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_prefix_lm_against_the_oracle(side):
    """Ragged texts and prefixes, then a decoded token that sees all of it."""
    model = model_of()
    texts, prefixes, width = [random_tokens(n, n) for n in (8, 5, 1)], [3, 5, 0], 8
    pads = [width - len(text) for text in texts]
    before, after = (pads, [0] * 3) if side == "left" else ([0] * 3, pads)
    lines, valid = [], []
    for text, left, right in zip(texts, before, after, strict=True):
        lines.append([95] * left + text + [95] * right)
        valid.append([0] * left + [1] * len(text) + [0] * right)
    state = model.init_cache(3, 16)
    mask = masks.prefix_lm(int32(*prefixes), mx.array(valid), state["lengths"], 16)
    logits, state = forward(model, ids(*lines), mask, state)
    more = masks.prefix_lm(int32(*prefixes), mx.ones((3, 1)), state["lengths"], 16)
    following, state = forward(model, ids([7], [8], [9]), more, state)
    for row, (text, prefix) in enumerate(zip(texts, prefixes, strict=True)):
        whole = [*text, 7 + row]
        see = prefix_visible(prefix, len(whole))
        expected = oracle(TINY, expand(model), whole, visible=see)
        start = before[row]
        real = to_numpy(mask)[row, 0, start : start + len(text), : len(text)]
        np.testing.assert_array_equal(real, see[:-1, :-1])
        ours = np.concatenate([logits[row, start : start + len(text)], following[row]])
        assert relative_error(ours, expected) <= TOLERANCE


def test_a_prefix_cannot_be_fed_in_two_calls():
    lengths = int32(2)
    with pytest.raises(InputError, match="a prefix of 4 tokens must fit one call"):
        masks.prefix_lm(int32(4), mx.ones((1, 2)), lengths, 16)


# --- arrays -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("low", [-1e4, -1e9, float("-inf")])
def test_an_additive_mask_never_changes_the_compute_dtype(kind, low):
    """float32 [B, 1, T, S] on a 16-bit model: bitwise what the bool mask gives."""
    model = model_of("llama", kind)
    lengths = prefill(model, PREFIXES[:2], 16)[1]["lengths"]
    valid = mx.array([[0, 1, 1, 1], [1, 1, 0, 0]])
    see = masks.causal(valid, lengths, 16)
    additive = mx.where(see, 0.0, low)
    assert additive.dtype == mx.float32
    tokens = ids(random_tokens(4, 1), random_tokens(4, 2))
    results = []
    for mask in (see, additive, additive[:, 0]):
        state = prefill(model, PREFIXES[:2], 16)[1]
        logits, state = model(tokens, mask, state)
        assert logits.dtype == getattr(mx, kind)
        results.append({"logits": logits, **state})
    assert {a.dtype for n, a in results[1].items() if n != "lengths"} == {getattr(mx, kind)}
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("form", ["bool", "int16", "float32", "bfloat16"])
def test_any_array_against_the_oracle(form):
    """A visibility that no helper draws, through `as_mask` and `forward`."""
    model, tokens = model_of(), random_tokens(6)
    rng = np.random.default_rng(3)
    visible = rng.random((6, 6)) < 0.5
    visible |= np.eye(6, dtype=bool)
    expected = oracle(TINY, expand(model), tokens, visible=visible)
    wide = np.concatenate([visible, np.zeros((6, 3), bool)], axis=1)
    array = mx.array(wide)
    if form in ("float32", "bfloat16"):
        array = mx.where(array, 0.0, float("-inf")).astype(getattr(mx, form))
    else:
        array = array.astype(getattr(mx, form.replace("bool", "bool_")))
    for lifted in (array, array[None], array[None, None]):
        mask = masks.as_mask(lifted)
        logits, state = forward(model, ids(tokens), mask, model.init_cache(1, 9))
        assert relative_error(logits[0], expected) <= TOLERANCE
        assert state_size(state) == (1, 9)


def test_forward_takes_no_additive_mask():
    """The contract itself is bool; the message says what to do."""
    model = model_of()
    for mask in (mx.zeros((1, 1, 2, 8)), mx.ones((1, 1, 2, 7)) != 0, mx.ones((2, 8)) != 0):
        with pytest.raises(InputError, match=r"mask: expected bool \[1, 1, 2, 8\]"):
            forward(model, ids([1, 2]), mask, model.init_cache(1, 8))
