"""Moving rows, growing and taking tokens back, for every kind of cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from funcrt import cache, masks
from funcrt.cache import CacheState, rows
from funcrt.errors import CacheError
from tests.cache_kinds import (
    BATCH,
    CACHES,
    CAPACITY,
    MISTRAL,
    TOKENS,
    WINDOW,
    empty,
    feed,
    fresh,
    model_of,
    row_of,
    spoil,
)
from tests.helpers import TOLERANCE, assert_same, make_model, random_tokens, relative_error

import mlx.core as mx
import numpy as np
import pytest

each_kind = pytest.mark.parametrize("kind", CACHES)
# Packed levels are coarse: one value that rounds to the other side shows.
CLOSE = {"full": TOLERANCE, "window": TOLERANCE, "ring": TOLERANCE, "kv8": 1e-3, "kv4": 1e-2}
A, B, C = random_tokens(15, 1), random_tokens(20, 2), random_tokens(25, 3)
NEXT = random_tokens(10, 4)


def i32(*numbers: Any) -> mx.array:
    return mx.array(numbers, dtype=mx.int32)


def filled(kind: str) -> CacheState:
    """Rows of 15, 20 and 25 tokens: each ring has wrapped."""
    return feed(model_of(kind), empty(kind), A, B, C)[1]


def assert_rows_equal(ours: CacheState, row: int, theirs: CacheState, other_row: int) -> None:
    mine, yours = row_of(ours, row), row_of(theirs, other_row)
    assert mine.keys() == yours.keys()
    for name, array in mine.items():
        np.testing.assert_array_equal(array, yours[name], err_msg=name)


def test_numbers_of_rows_are_known_without_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read what has to be computed, be it a reshape, is to wait for everything before it."""

    def check(array: mx.array) -> Any:
        mx.export_to_dot(str(tmp_path / "graph.dot"), array)
        assert "label" not in (tmp_path / "graph.dot").read_text()  # no operation
        return array.tolist()

    monkeypatch.setattr(rows, "read", check)
    for numbers in ([2, 0], i32(2, 0)):
        assert rows.as_rows(numbers, BATCH, "row").tolist() == [2, 0]


# --- grow ----------------------------------------------------------------------------------------


@each_kind
def test_grow_continues_as_a_large_cache(kind: str) -> None:
    model, state = model_of(kind), empty(kind, capacity=26)
    _, state = feed(model, state, A, B, C)
    grown = cache.grow(state, CAPACITY)
    assert list(grown) == list(state)
    assert grown["lengths"].tolist() == [15, 20, 25]
    for name, array in grown.items():
        if cache.kind_of(name) == "ring":
            assert array is state[name]
    logits, _ = feed(model, grown, NEXT, NEXT, NEXT)
    whole = fresh(kind, A + NEXT, B + NEXT, C + NEXT)
    for row, expected in zip(logits, whole, strict=True):
        assert relative_error(row, expected[-len(NEXT) :]) <= CLOSE[kind]


def test_grow_refuses_a_row_that_lost_tokens() -> None:
    state = empty("full", capacity=8)
    _, state = feed(model_of("full"), state, NEXT[:5], NEXT[:5], NEXT[:9])
    with pytest.raises(CacheError, match="given 9 tokens and held 7 of them"):
        cache.grow(state, 16)
    cache.grow(cache.trim(state, i32(0, 0, 2)), 16)


# --- trim ----------------------------------------------------------------------------------------


@each_kind
def test_trim_by_row_then_continue(kind: str) -> None:
    model, state = model_of(kind), filled(kind)
    counts = i32(2, 0, 5)
    assert cache.can_trim(state, counts)
    trimmed = cache.trim(state, counts)
    assert trimmed["lengths"].tolist() == [13, 20, 20]
    logits, _ = feed(model, trimmed, NEXT, NEXT, NEXT)
    whole = fresh(kind, A[:13] + NEXT, B + NEXT, C[:20] + NEXT)
    for row, expected in zip(logits, whole, strict=True):
        assert relative_error(row, expected[-len(NEXT) :]) <= CLOSE[kind]


@each_kind
def test_a_prefix_serves_two_questions(kind: str) -> None:
    """Prefix, question A, back, question B: what a run without A gives, to the last bit."""
    model = model_of(kind)
    questions = [[NEXT[:3], NEXT[:5], NEXT[5:9]], [NEXT[4:8], NEXT[2:3], NEXT[3:8]]]
    prefix = feed(model, empty(kind), A, B, C)[1]
    first, state = feed(model, prefix, *questions[0])
    state = cache.trim(state, i32(*map(len, questions[0])))
    second, after = feed(model, state, *questions[1])
    expected, wanted = feed(model, feed(model, empty(kind), A, B, C)[1], *questions[1])
    for ours, theirs in zip(second, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert after["lengths"].tolist() == wanted["lengths"].tolist()
    for ours, theirs in zip(first, feed(model, prefix, *questions[0])[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)  # the prefix itself has not been touched


@each_kind
def test_can_trim_answers_for_each_kind(kind: str) -> None:
    state = filled(kind)
    limit = TOKENS if kind == "ring" else 15
    for counts, possible in [
        (0, True),
        (1, True),
        (limit, True),
        (limit + 1, False),
        (-1, False),
        (i32(-1, 0, 0), False),
        ([0, limit, 1], True),
        (i32(0, 0, 26), False),
        (i32(0, 0, 25), kind != "ring"),
    ]:
        answer = cache.can_trim(state, counts)
        assert (answer.shape, answer.dtype) == ((), mx.bool_)
        assert bool(answer) is possible, counts
        if not answer:
            with pytest.raises(CacheError, match="trim: "):
                cache.trim(state, counts)
        else:
            cache.trim(state, counts)


def test_a_ring_gives_back_its_slack_and_no_more() -> None:
    model, state = model_of("ring"), filled("ring")
    state = cache.trim(state, i32(3, 0, 5))
    assert not cache.can_trim(state, i32(3, 0, 0))
    with pytest.raises(CacheError, match=r"wrapped: at most \[2, 5, 0\] tokens .* \[3, 0, 0\]"):
        cache.trim(state, i32(3, 0, 0))
    # What was trimmed stays overwritten until the row is as long as before.
    _, state = feed(model, state, NEXT[:1], NEXT[:1], NEXT[:1])
    assert state["written"].tolist() == [15, 21, 25]
    assert bool(cache.can_trim(state, i32(3, 5, 1)))
    assert not cache.can_trim(state, i32(0, 0, 2))
    _, state = feed(model, state, NEXT[:5], NEXT[:5], NEXT[:5])
    assert bool(cache.can_trim(state, 5))


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (16, r"cannot take \[16, 16, 16\] tokens from rows of \[15, 20, 25\]"),
        (i32(0, -1, 0), "cannot take"),
        (i32(1, 2), r"expected int32 \[3\] or one number, got \[2\]"),
        (i32(1, 2, 3)[None], "expected int32"),
        (mx.array([1.0, 2.0, 3.0]), "expected integers"),
    ],
)
def test_trims_that_are_refused(counts: Any, words: str) -> None:
    with pytest.raises(CacheError, match=words):
        cache.trim(filled("full"), counts)


# --- rows ----------------------------------------------------------------------------------------


@each_kind
def test_a_fork_continues_as_the_original(kind: str) -> None:
    model, state = model_of(kind), filled(kind)
    forked = cache.fork(state, 1, [0, 2])
    for row in range(BATCH):
        assert_rows_equal(forked, row, state, 1)
    logits, after = feed(model, forked, NEXT, NEXT, NEXT)
    expected, wanted = feed(model, state, NEXT, NEXT, NEXT)
    for row in range(BATCH):
        np.testing.assert_array_equal(logits[row], expected[1])
        assert_rows_equal(after, row, wanted, 1)
    # From here on they differ, and do not touch each other.
    apart, _ = feed(model, forked, NEXT[:5], NEXT[5:], NEXT[:5])
    np.testing.assert_array_equal(apart[0], apart[2])
    alone, _ = feed(model, state, [], NEXT[5:], [])
    np.testing.assert_array_equal(apart[1], alone[1])


def test_fork_reads_before_it_writes() -> None:
    state = filled("ring")
    turned = cache.fork(state, [0, 1, 2], [1, 2, 0])
    for row in range(BATCH):
        assert_rows_equal(turned, (row + 1) % BATCH, state, row)


def test_insert_waits_for_nothing() -> None:
    """It can be scheduled while what it reads is still computed."""
    state, other = empty("full"), empty("full")
    mx.eval(state, other)
    other = {name: array + 0 for name, array in other.items()}
    before = mx.get_active_memory()
    after = cache.insert(state, [2, 1], other, [0, 1])
    moved = cache.insert(state, 2, other, 1)
    assert mx.get_active_memory() - before < 1000  # two numbers of rows, and no array
    mx.eval(after, moved)


@each_kind
def test_select_and_insert_move_rows_between_batches(kind: str) -> None:
    model, state = model_of(kind), filled(kind)
    two = cache.select(state, [2, 0])
    assert cache.state_size(two) == (2, CAPACITY)
    assert_rows_equal(two, 0, state, 2)
    assert_rows_equal(two, 1, state, 0)
    small = feed(model, empty(kind, 1, 32), B)[1]  # fewer slots than where it goes
    moved = cache.insert(spoil(state, 0), 0, small, 0)
    assert_rows_equal(moved, 0, cache.grow(small, CAPACITY), 0)
    for row in (1, 2):
        assert_rows_equal(moved, row, state, row)
    logits, _ = feed(model, moved, NEXT, NEXT, NEXT)
    assert relative_error(logits[0], fresh(kind, B + NEXT)[0][-len(NEXT) :]) <= CLOSE[kind]
    untouched, _ = feed(model, state, NEXT, NEXT, NEXT)
    for row in (1, 2):
        np.testing.assert_array_equal(logits[row], untouched[row])


@each_kind
@pytest.mark.parametrize("form", ["clear", "reset"])
def test_a_cleared_row_is_as_new(kind: str, form: str) -> None:
    model, state = model_of(kind), filled(kind)
    state = spoil(state, 1) if form == "clear" else state
    cleared = getattr(cache, form)(state, i32(1))
    if form == "clear":
        assert_rows_equal(cleared, 1, empty(kind), 1)
    for row in (0, 2):
        assert_rows_equal(cleared, row, state, row)
    logits, _ = feed(model, cleared, NEXT, B, NEXT)
    np.testing.assert_array_equal(logits[1], feed(model, empty(kind), NEXT, B, NEXT)[0][1])
    np.testing.assert_array_equal(logits[0], feed(model, filled(kind), NEXT, B, NEXT)[0][0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: cache.fork(s, 1, 1), r"row \[1\] onto itself"),
        (lambda s: cache.fork(s, 1, [0, 1]), "onto itself"),
        (lambda s: cache.fork(s, 0, [1, 1]), "named twice"),
        (lambda s: cache.fork(s, 3, 1), r"source_row: rows are 0 to 2, got \[3\]"),
        (lambda s: cache.fork(s, 0, -1), "target_row: rows are 0 to 2"),
        (lambda s: cache.fork(s, [0, 1], [2]), "2 source rows for 1 target rows"),
        (lambda s: cache.select(s, [0, 3]), "rows are 0 to 2"),
        (lambda s: cache.select(s, []), "at least one row"),
        (lambda s: cache.select(s, mx.array([True, False, True])), "expected integers"),
        (lambda s: cache.clear(s, i32(-1)), "rows are 0 to 2"),
        (lambda s: cache.insert(s, 0, s, 4), "other_row: rows are 0 to 2"),
        (lambda s: cache.insert(s, [0, 1], s, 2), "1 other rows for 2 rows"),
        (lambda s: cache.shrink(s, 64), "from 2 to 48, the present, got 64"),
        (lambda s: cache.shrink(s, 1), "from 2 to 48, the present, got 1"),
        (lambda s: cache.join([]), "at least one state"),
        (lambda s: cache.join([s, {}]), "do not have the same arrays"),
        (lambda s: cache.join([s, cache.grow(s, 64)]), "grow or shrink them to one capacity"),
        (lambda s: cache.insert(s, 0, empty("ring"), 1), "does not have the same arrays"),
        (lambda s: cache.insert(s, 0, empty("kv8"), 1), "does not have the same arrays"),
        (
            lambda s: cache.insert(s, 0, make_model(head_dim=8).init_cache(1, 48), 0),
            r"layers.0.keys is .* \[2, 48, 8\] there, .* \[2, 48, 16\] here",
        ),
        (lambda s: cache.insert(s, 0, make_model("float16").init_cache(1, 48), 0), "float16"),
        (lambda s: cache.grow(s, 47), "below the present 48"),
    ],
)
def test_moves_that_are_refused(call: Callable[[CacheState], object], words: str) -> None:
    with pytest.raises(CacheError, match=words):
        call(empty("full"))


def test_rings_of_other_sizes_do_not_mix() -> None:
    other = make_model("float32", **MISTRAL).init_cache(1, CAPACITY, max_tokens=TOKENS + 1)
    with pytest.raises(CacheError, match="ring_keys"):
        cache.insert(empty("ring"), 0, other, 0)


# --- branches of a token tree --------------------------------------------------------------------

# a -> (b -> d, c -> e), and for several roots: a -> c, b -> (d, e)
TREES = {"one root": [-1, 0, 0, 1, 2], "two roots": [-1, -1, 0, 1, 1]}
BRANCHES = {  # nodes accepted in each row; padded with -1
    "one root": [[0, 2, 4], [0, 1, -1], [0, -1, -1]],
    "two roots": [[1, 4], [0, 2], [-1, -1]],
}


def run_tree(kind: str, state: CacheState, tree: list[int], nodes: list[list[int]]) -> CacheState:
    model = model_of(kind)
    parents = mx.array([tree] * BATCH, dtype=mx.int32)
    mask, positions = masks.from_tree(parents, state["lengths"], CAPACITY)
    return model.forward(model.params, mx.array(nodes), mask, state, positions)[1]


@each_kind
@pytest.mark.parametrize("tree", TREES)
def test_keep_leaves_the_branch_and_nothing_else(kind: str, tree: str) -> None:
    model, before = model_of(kind), filled(kind)
    nodes = [random_tokens(5, 10 + row) for row in range(BATCH)]
    branches = BRANCHES[tree]
    lengths = before["lengths"]
    slots = mx.array(
        [
            [length + node if node >= 0 else -1 for node in branch]
            for length, branch in zip([15, 20, 25], branches, strict=True)
        ]
    )

    def kept_after(nodes: list[list[int]]) -> CacheState:
        return cache.keep(run_tree(kind, before, TREES[tree], nodes), slots, lengths)

    kept = kept_after(nodes)
    assert kept["lengths"].tolist() == [
        length + sum(node >= 0 for node in branch)
        for length, branch in zip([15, 20, 25], branches, strict=True)
    ]
    logits, _ = feed(model, kept, NEXT, NEXT, NEXT)
    texts = [
        text + [row[node] for node in branch if node >= 0]
        for text, row, branch in zip([A, B, C], nodes, branches, strict=True)
    ]
    whole = fresh(kind, *[text + NEXT for text in texts])
    for row, expected in zip(logits, whole, strict=True):
        assert relative_error(row, expected[-len(NEXT) :]) <= CLOSE[kind]
    # Other tokens at what was rejected change nothing.
    accepted = [set(branch) for branch in branches]
    others = [
        [token if node in accepted[row] else (token + 1) % 96 for node, token in enumerate(tokens)]
        for row, tokens in enumerate(nodes)
    ]
    again, _ = feed(model, kept_after(others), NEXT, NEXT, NEXT)
    for ours, theirs in zip(again, logits, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_keep_finds_one_root_by_itself() -> None:
    before = filled("ring")
    nodes = [random_tokens(5, 10 + row) for row in range(BATCH)]
    state = run_tree("ring", before, TREES["one root"], nodes)
    slots = i32([15, 17, 19], [20, 21, -1], [25, -1, -1])
    assert_same(cache.keep(state, slots), cache.keep(state, slots, before["lengths"]))
    idle = cache.keep(state, i32([15], [-1], [25]))
    assert idle["lengths"].tolist() == [16, 25, 26]


@pytest.mark.parametrize(
    ("slots", "lengths", "words"),
    [
        ([[17, 15], [20, 21], [25, 26]], None, "slots in order from 17"),
        ([[15, 15], [20, 21], [25, 26]], None, "in order"),
        ([[15, 20], [20, 21], [25, 26]], None, r"in order from 15 to 19.*got \[15, 20\]"),
        ([[-1, 15], [20, 21], [25, 26]], None, "-1 only at the end"),
        ([[15, -2], [20, 21], [25, 26]], None, "-1 only at the end"),
        ([[14, 15], [20, 21], [25, 26]], [15, 20, 25], "from 15"),
        ([[-1], [-1], [-1]], [21, 20, 25], "expected 0 to 20, got 21"),
        ([[15], [20]], None, "slots: expected"),
        ([15, 20, 25], None, "slots: expected"),
        ([[], [], []], None, "slots: expected"),
        ([[15], [20], [25]], [15, 20], r"lengths: expected int32 \[3\]"),
    ],
)
def test_branches_that_are_refused(slots: Any, lengths: Any, words: str) -> None:
    state = run_tree("full", filled("full"), TREES["one root"], [[1] * 5] * BATCH)
    before = None if lengths is None else mx.array(lengths)
    with pytest.raises(CacheError, match=words):
        cache.keep(state, mx.array(slots, dtype=mx.int32), before)


def test_keep_does_not_reach_past_a_ring() -> None:
    state = run_tree("ring", filled("ring"), TREES["one root"], [[1] * 5] * BATCH)
    with pytest.raises(CacheError, match="ring of a sliding window has wrapped past length 14"):
        cache.keep(state, i32([15], [20], [25]), i32(14, 20, 25))


def test_keep_does_not_take_slots_that_were_never_written() -> None:
    state = empty("full", 1, 18)
    _, state = feed(model_of("full"), state, A)
    _, state = feed(model_of("full"), state, NEXT[:5])  # 20 tokens, 17 fit
    with pytest.raises(CacheError, match="from 15 to 16"):
        cache.keep(state, i32([15, 17]))


# --- every kind of array at once -----------------------------------------------------------------

SLOTS, RING, SLACK = 12, 6, 3


def toy(lengths: list[int], capacity: int = SLOTS, recurrent: bool = True) -> CacheState:
    """A state with an array of every kind, full of noise."""
    batch = len(lengths)
    rng = np.random.default_rng(capacity)

    def noise(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    state = {
        "lengths": mx.array(lengths, dtype=mx.int32),
        "positions": mx.array(rng.integers(0, 99, (batch, capacity)), dtype=mx.int32),
        "written": mx.array(lengths, dtype=mx.int32),
        "slack": mx.full((batch,), SLACK, dtype=mx.int32),
        "layers.0.keys": noise(batch, 2, capacity, 4, dtype=mx.bfloat16),
        "layers.1.keys": mx.array(rng.integers(0, 2**32, (batch, 2, capacity, 1)), mx.uint32),
        "layers.1.keys.scales": noise(batch, 2, capacity, 1),
        "layers.2.latent": noise(batch, 1, capacity, 3),
        "layers.2.latent_rope": noise(batch, 1, capacity, 2),
        "layers.3.ring_keys": noise(batch, 2, RING + 1, 4),
    }
    if recurrent:
        state |= {"layers.4.conv": noise(batch, 3, 5), "layers.4.state": noise(batch, 2, 4, 4)}
    return state


def numpy_of(state: CacheState) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: np.array(a.astype(mx.float32) if a.dtype == mx.bfloat16 else a)
        for name, a in state.items()
    }


def assert_equals(state: CacheState, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    found = numpy_of(state)
    assert list(found) == list(expected)
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def slot_axis(name: str) -> int | None:
    if name == "positions":
        return 1
    return 2 if ("keys" in name and "ring" not in name) or "latent" in name else None


def moved_by_hand(name: str, state: CacheState) -> dict[str, np.ndarray[Any, Any]]:
    """The expected results of `MOVES`, in plain numpy."""
    arrays = {key: array.copy() for key, array in numpy_of(state).items()}
    if name == "fork":
        for array in arrays.values():
            array[[0, 2]] = array[1]
    if name == "select":
        arrays = {key: array[[2, 2, 0, 1]] for key, array in arrays.items()}
    if name == "clear":
        for key, array in arrays.items():
            array[[0, 2]] = array[[0, 2]] if key == "slack" else 0
    if name == "trim":
        arrays["lengths"] -= [0, 2, 3]
    if name == "grow":
        for key, array in arrays.items():
            if (axis := slot_axis(key)) is not None:
                kept = np.delete(array, SLOTS - 1, axis)
                pad = [(0, 5 if i == axis else 0) for i in range(array.ndim)]
                arrays[key] = np.pad(kept, pad)
    if name == "insert":
        small = numpy_of(OTHER)
        for key, array in arrays.items():
            piece = small[key][1]
            if (axis := slot_axis(key)) is not None:
                piece = np.delete(piece, 7, axis - 1)
                missing = array.shape[axis] - 7
                piece = np.pad(
                    piece, [(0, missing if i == axis - 1 else 0) for i in range(piece.ndim)]
                )
            array[2] = piece
    if name == "keep":
        for key, array in arrays.items():
            ring = "ring" in key
            if ring or slot_axis(key) is not None:
                axis, turn = (2, RING) if ring else (slot_axis(key), SLOTS)
                old = np.moveaxis(array.copy(), axis, 1)
                new = np.moveaxis(array, axis, 1)
                for row, slots in enumerate([[5, 7], [8, 9], [10]]):
                    for step, slot in enumerate(slots):
                        new[row, (slots[0] + step) % turn] = old[row, slot % turn]
        arrays["lengths"][:] = [7, 10, 11]
    return arrays


OTHER = toy([2, 5], 8)
MOVES: dict[str, tuple[Callable[..., CacheState], list[Any]]] = {
    "grow": (lambda s: cache.grow(s, SLOTS + 4), []),
    "fork": (cache.fork, [i32(1), i32(0, 2)]),
    "select": (cache.select, [i32(2, 2, 0, 1)]),
    "clear": (cache.clear, [i32(2, 0)]),
    "trim": (cache.trim, [i32(0, 2, 3)]),
    "insert": (lambda s, row, source: cache.insert(s, row, OTHER, source), [i32(2), i32(1)]),
    "keep": (cache.keep, [i32([5, 7, -1], [8, 9, -1], [10, -1, -1])]),
}


def without_scratch(state: CacheState) -> dict[str, np.ndarray[Any, Any]]:
    arrays = numpy_of(state)
    for name, array in arrays.items():
        axis = 2 if "ring" in name else slot_axis(name)
        if axis is not None:
            arrays[name] = np.delete(array, array.shape[axis] - 1, axis)
    return arrays


@pytest.mark.parametrize("form", ["eager", "compiled", "exported"])
@pytest.mark.parametrize("name", MOVES)
def test_moves_do_what_numpy_does(name: str, form: str, tmp_path: Any) -> None:
    function, arguments = MOVES[name]
    state = toy([8, 10, 11], recurrent=name not in ("trim", "keep"))
    before = numpy_of(state)
    names = list(state)
    if form == "eager":
        after = function(state, *arguments)
    else:

        def flat(*arrays: mx.array) -> tuple[mx.array, ...]:
            given = dict(zip(names, arrays[: len(names)], strict=True))
            return tuple(function(given, *arrays[len(names) :]).values())

        if form == "compiled":
            run: Any = mx.compile(flat)
        else:
            mx.export_function(str(tmp_path / "f.mlxfn"), flat, *state.values(), *arguments)
            run = mx.import_function(str(tmp_path / "f.mlxfn"))
        after = dict(zip(names, run(*state.values(), *arguments), strict=True))
    assert_equals(state, before)  # inputs are never changed
    expected = moved_by_hand(name, state)
    if name == "keep":  # what lies in scratch does not matter
        shown = {key: mx.array(array) for key, array in expected.items()}
        assert without_scratch(after).keys() == expected.keys()
        for key, array in without_scratch(after).items():
            np.testing.assert_array_equal(array, without_scratch(shown)[key], err_msg=key)
    else:
        assert_equals(after, expected)
    assert [a.dtype for a in after.values()] == [a.dtype for a in state.values()]


def test_values_are_not_looked_at_while_tracing() -> None:
    """What would be refused goes through, and stays inside the arrays."""

    def everything(
        counts: mx.array, rows: mx.array, slots: mx.array, lengths: mx.array
    ) -> list[mx.array]:
        state = {**toy([8, 10, 11], recurrent=False), "lengths": lengths}
        results = [cache.trim(state, counts), cache.fork(state, rows, rows)]
        results += [cache.select(state, rows), cache.clear(state, rows), cache.keep(state, slots)]
        results += [cache.insert(state, rows, state, rows), cache.grow(state, SLOTS + 1)]
        results += [cache.restore(state, cache.snapshot(state))]
        return [cache.can_trim(state, counts), *(a for r in results for a in r.values())]

    possible, trimmed, *rest = mx.compile(everything)(
        i32(-2, 50, 1), i32(-7), i32([90, 3], [-1, 70], [11, 10**9]), i32(8, 10, 11)
    )
    mx.eval(rest)
    assert possible.item() is False
    assert trimmed.tolist() == [8, 0, 10]


# --- snapshots -----------------------------------------------------------------------------------


def test_snapshots_bring_back_recurrent_states() -> None:
    before = toy([4, 5, 6])
    saved = cache.snapshot(before)
    assert set(saved) == {"lengths", "written", "slack", "layers.4.conv", "layers.4.state"}
    after = {name: array + 1 for name, array in before.items() if name != "slack"}
    after = {name: after.get(name, before[name]) for name in before}
    assert not cache.can_trim(after, 1)
    assert cache.can_trim(after, 0)
    with pytest.raises(CacheError, match="recurrent state cannot go back: keep `snapshot"):
        cache.trim(after, 1)
    restored = cache.restore(after, saved)
    assert list(restored) == list(before)
    for name, array in restored.items():
        source = before if name in saved and name != "written" else after
        assert mx.array_equal(array, source[name]).item(), name
    with pytest.raises(CacheError, match="recurrent state cannot hold a token tree"):
        cache.keep(after, i32([1], [1], [1]))


def test_snapshots_that_are_refused() -> None:
    before = toy([4, 5, 6])
    saved = cache.snapshot(before)
    moved = {**before, "lengths": i32(8, 9, 10), "written": i32(8, 9, 10)}
    with pytest.raises(CacheError, match="wrapped past the snapshot"):
        cache.restore(moved, saved)
    for other, words in [
        ({**saved, "layers.9.state": saved["lengths"]}, "layers.9.state"),
        ({k: a for k, a in saved.items() if k != "layers.4.conv"}, "layers.4.conv"),
        (cache.snapshot(toy([4, 5])), r"lengths is .* \[2\] there, .* \[3\] here"),
    ]:
        with pytest.raises(CacheError, match=f"a snapshot of another state: {words}"):
            cache.restore(before, other)
    shorter = {**before, "lengths": i32(4, 4, 6)}
    with pytest.raises(CacheError, match=r"rows of \[4, 4, 6\] tokens are shorter"):
        cache.restore(shorter, saved)


@each_kind
def test_restore_undoes_calls(kind: str) -> None:
    model, before = model_of(kind), filled(kind)
    saved = cache.snapshot(before)
    _, after = feed(model, before, NEXT[:5], NEXT[:2], [])
    logits, _ = feed(model, cache.restore(after, saved), NEXT[5:], NEXT[5:], NEXT[5:])
    expected, _ = feed(model, before, NEXT[5:], NEXT[5:], NEXT[5:])
    for ours, theirs in zip(logits, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("name", ["fork", "insert", "clear", "keep"])
def test_moves_write_in_place_if_nothing_holds_the_old_state(name: str, is_held: bool) -> None:
    model = model_of("full")
    state, other = model.init_cache(16, 4096), model.init_cache(1, 4096)
    mx.eval(state, other, model.params)
    size, row = (sum(a.nbytes for a in s.values()) for s in (state, other))
    slots = mx.broadcast_to(mx.arange(2, 6), (16, 4))
    state["lengths"] = state["lengths"] + 9
    holder = list(state.values()) if is_held else []
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    moved = {
        "fork": lambda: cache.fork(state, 3, 7),
        "insert": lambda: cache.insert(state, 3, other, 0),
        "clear": lambda: cache.clear(state, [3]),
        "keep": lambda: cache.keep(state, slots),
    }[name]()
    state.clear()
    mx.eval(moved)
    extra = mx.get_peak_memory() - before
    assert extra > 0.9 * size if holder else extra < 2.5 * row


def test_window_is_what_the_ring_was_made_for() -> None:
    assert model_of("ring").init_cache(1, 48, max_tokens=TOKENS)["layers.0.ring_keys"].shape[2] == (
        WINDOW + TOKENS
    )


# --- states of other sizes ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CACHES)
def test_shrink_and_join_keep_what_rows_hold(kind):
    """Rows cut to fewer slots, joined in another order and grown again go on as before."""
    model = model_of(kind)
    small = cache.shrink(filled(kind), 32)
    assert cache.state_size(small) == (BATCH, 32)
    rows = [cache.select(small, row) for row in (2, 0)]
    joined = cache.join([*rows, cache.select(empty(kind, capacity=32), 0)])
    assert cache.state_size(joined) == (3, 32)
    logits, _ = feed(model, cache.grow(joined, CAPACITY), NEXT, NEXT, NEXT)
    expected, _ = feed(model, filled(kind), NEXT, NEXT, NEXT)
    fresh_row = feed(model, empty(kind), NEXT, NEXT, NEXT)[0][2]
    for ours, theirs in zip(logits, (expected[2], expected[0], fresh_row), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert cache.join([small]) is small
    assert cache.shrink(small, 32) is small
    with pytest.raises(CacheError, match="a row holds 25 tokens, capacity 24 has room for 23"):
        cache.shrink(small, 24)
    with pytest.raises(CacheError, match="has room for 1"):
        cache.insert(empty(kind, capacity=2), 0, small, 1)
