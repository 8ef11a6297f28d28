"""Invariances hold for every kind of cache, and each leak is caught by the check that is for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from funcrt.buckets import Bucket, BucketPlan
from funcrt.bundle import Bundle
from funcrt.bundle.proof.certificate import Check
from funcrt.bundle.proof.invariances import check_invariances, count_invariances
from funcrt.bundle.proof.scripts import (
    Call,
    cut,
    elsewhere,
    held_slots,
    insert_idle,
    make_script,
    poison,
    replace_rows,
    run,
)
from funcrt.cache import CacheState, kind_of, trim
from funcrt.compiled import Compiled
from funcrt.config import RopeConfig
from funcrt.flat import FlatFunction
from funcrt.model import Model
from tests import cache_histories, toy_families
from tests.adapting import stacked
from tests.cache_kinds import CACHES
from tests.helpers import POISON, TOLERANCE, make_model, to_numpy

import mlx.core as mx
import numpy as np
import pytest

PLAN = BucketPlan(batch=(2,), tokens=(4, 8), capacity=(16, 32))
SMALL = 3e-8  # of a sum of ids: far below the tolerance, and above the last bit of a logit
BITWISE = ("neighbours", "padding", "poison")


def check(compiled: Compiled, longest: int = 2**31 - 1, allowed: float = TOLERANCE) -> list[Check]:
    rows = list(check_invariances(compiled, lambda key: allowed, longest))
    assert len(rows) == count_invariances(compiled.plan, compiled.cache_spec)
    return rows


def failures(rows: Sequence[Check]) -> set[tuple[str, str]]:
    return {(row.check, row.function) for row in rows if not row.passed}


# --- what holds -----------------------------------------------------------------------------------

WIDE = BucketPlan(batch=(1, 3), tokens=(1, 4, 8), capacity=(16, 24))


@pytest.fixture(scope="module", autouse=True)
def toys() -> Iterator[None]:
    with toy_families.registered():
        yield


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", [*CACHES, *toy_families.LAYERS])
def test_every_kind_of_cache_passes(kind: str, dtype: str) -> None:
    # Sizes that the BLAS shim leaves to the library: its own products round alike in any shape.
    bits, odd = None, {"hidden_size": 36, "intermediate_size": 90}
    if kind in toy_families.LAYERS:
        model = toy_families.make_toy(kind, dtype=dtype, **odd)
    else:
        bits = CACHES[kind].layout.get("kv_bits")
        model = make_model(dtype, **CACHES[kind].changes, **odd)
    compiled = model.compiled(WIDE, bits, eager=True)
    rows = check(compiled, allowed=TOLERANCE if dtype == "float32" else 2e-3)
    assert not failures(rows)
    capacities = WIDE.capacity[:1] if kind == "toy_recurrent" else WIDE.capacity
    groups = {(b, s) for b in WIDE.batch for s in capacities}
    keys = {
        (b, s): {f"prefill_{Bucket(b, t, s)}" for t in WIDE.tokens}
        | {f"decode_greedy_{Bucket(b, 1, s)}"}
        for b, s in groups
    }
    for name, where in {
        "neighbours": {group for group in groups if group[0] > 1},
        "padding": groups,
        "poison": groups,
        "chunking": groups,
        "bucket": groups - {(1, 16)},
    }.items():
        expected = sorted(key for group in where for key in keys[group])
        assert sorted(row.function for row in rows if row.check == name) == expected
    assert {row.allowed for row in rows if row.check in BITWISE} == {0}
    if dtype == "float32":  # pieces and other shapes really were other calls
        assert max(row.measured for row in rows if row.check == "chunking") > 0
        assert max(row.measured for row in rows if row.check == "bucket") > 0


def test_nothing_compiles_but_what_was_exported(bundle: Bundle) -> None:
    compiled = bundle.compiled()
    assert not failures(check(compiled))
    assert compiled.traces == Counter(
        f"{name}_{bucket}"
        for batch in bundle.plan.batch
        for capacity in bundle.plan.capacity
        for name, bucket in [
            *(("prefill", Bucket(batch, tokens, capacity)) for tokens in bundle.plan.tokens),
            ("decode_greedy", Bucket(batch, 1, capacity)),
        ]
    )


def test_rows_take_the_last_adapter() -> None:
    chosen = []

    def look(call: Leaking) -> None:
        chosen.append(call.before["adapter"].tolist())

    assert not failures(check(leaky(look, model=stacked())))
    assert chosen
    assert all(rows == [2**31 - 1] * 2 for rows in chosen)


def test_texts_stay_where_positions_do_not_depend_on_their_length() -> None:
    rope = RopeConfig(kind="dynamic", factor=4.0, original_max_positions=8)
    compiled = make_model(rope=rope).compiled(
        BucketPlan(batch=2, tokens=(4, 8), capacity=32), eager=True
    )
    assert not failures(check(compiled, longest=8))
    assert {name for name, _ in failures(check(compiled))} == {"chunking"}


# --- what leaks -----------------------------------------------------------------------------------


class Leaking:
    """One call of a function, whose logits and new state may be changed."""

    def __init__(
        self, name: str, tokens: mx.array, valid: mx.array, before: CacheState, logits: mx.array,
        state: CacheState,
    ) -> None:  # fmt: skip
        self.name, self.before, self.logits, self.state = name, before, logits, state
        self.tokens, self.valid = (a.reshape(a.shape[0], -1) for a in (tokens, valid))
        self.capacity = before["layers.0.keys"].shape[2] if "layers.0.keys" in before else 1

    def sum_ids(self, chosen: mx.array) -> mx.array:
        """`[B, 1]`, small."""
        return mx.sum(mx.where(chosen, self.tokens, 0), axis=1, keepdims=True) * SMALL


def leaky(
    leak: Callable[[Leaking], None], model: Model | None = None, plan: BucketPlan = PLAN
) -> Compiled:
    """The functions of a model, `leak` called at the end of each."""
    model = model or make_model()
    layout = model.choose_layout(plan)
    spec = model.cache_spec(layout)

    def source(name: str, bucket: Bucket) -> FlatFunction:
        function = model.flat_step(name, bucket, layout, plan)

        def run_and_leak(*arrays: mx.array) -> tuple[mx.array, ...]:
            names = [entry.name for entry in spec]
            tokens, valid = arrays[-len(names) - 2 : -len(names)]
            before = dict(zip(names, arrays[-len(names) :], strict=True))
            *outputs, logits = function(*arrays)[: -len(names)]
            after = dict(zip(names, function(*arrays)[-len(names) :], strict=True))
            call = Leaking(name, tokens, valid, before, logits, after)
            leak(call)
            return (*outputs, call.logits, *call.state.values())

        return run_and_leak

    return Compiled(
        source, params=list(model.prepared.values()), cache_spec=spec, plan=plan,
        vocab_size=model.vocab_size, dtype=model.config.dtype, eager=True,
    )  # fmt: skip


def see_neighbours(call: Leaking) -> None:
    call.logits = call.logits + mx.roll(call.sum_ids(call.valid), 1, axis=0)


def see_ids_at_padding(call: Leaking) -> None:
    call.logits = call.logits + call.sum_ids(mx.logical_not(call.valid))


def see_the_side(call: Leaking) -> None:
    first = mx.argmax(call.valid, axis=1)[:, None]
    call.logits = call.logits + mx.where(mx.any(call.valid), first, 0) * 1e-5


def count_idle_calls(call: Leaking) -> None:
    call.state["lengths"] = mx.where(
        mx.any(call.valid, axis=1), call.state["lengths"], call.state["lengths"] + 1
    )


def see_slot(slot: int) -> Callable[[Leaking], None]:
    def leak(call: Leaking) -> None:
        seen = mx.sum(call.before["layers.1.values"][:, :, slot], axis=(1, 2))
        call.logits = call.logits + seen[:, None] * 1e-10

    return leak


def round_by_capacity(call: Leaking) -> None:
    call.logits = call.logits * (1 + 1e-4 * (call.capacity > 16))


def round_by_tokens(call: Leaking) -> None:
    call.logits = call.logits * (1 + 1e-4 * (call.tokens.shape[1] == 4))


def forget_across_calls(call: Leaking) -> None:
    if call.name == "prefill":
        call.state["layers.1.keys"] = mx.where(
            call.before["lengths"].reshape(-1, 1, 1, 1) > 0, 0, call.state["layers.1.keys"]
        )


PREFILLS = {f"prefill_{Bucket(2, t, s)}" for t in PLAN.tokens for s in PLAN.capacity}
DECODES = {f"decode_greedy_{Bucket(2, 1, s)}" for s in PLAN.capacity}
LARGER = {key for key in PREFILLS | DECODES if key.endswith("s32")}


@pytest.mark.parametrize(
    ("leak", "name", "functions"),
    [
        (see_neighbours, "neighbours", PREFILLS | DECODES),
        (see_ids_at_padding, "padding", PREFILLS),
        (see_the_side, "padding", PREFILLS),
        (see_slot(-1), "poison", PREFILLS | DECODES),
        (see_slot(-2), "poison", PREFILLS | DECODES),
        (round_by_capacity, "bucket", LARGER),
        (round_by_tokens, "chunking", {key for key in PREFILLS if "_t8_" in key}),
    ],
)
def test_a_leak_is_caught_by_its_check_alone(
    leak: Callable[[Leaking], None], name: str, functions: set[str]
) -> None:
    rows = check(leaky(leak))
    assert failures(rows) == {(name, function) for function in functions}
    if name in BITWISE:
        noted = next(row for row in rows if not row.passed)
        assert noted.note.startswith(f"different: {int(noted.measured)} logits")


def test_what_leaks_only_at_once_is_not_overlooked() -> None:
    def leak(call: Leaking) -> None:
        ids = call.sum_ids(mx.logical_not(call.valid))
        unused = mx.sum(call.before["layers.1.values"][:, :, -2], axis=(1, 2))[:, None]
        call.logits = call.logits + ids * unused

    rows = check(leaky(leak))
    assert failures(rows) == {(name, key) for name in BITWISE for key in PREFILLS}
    assert all("at once" in row.note for row in rows if not row.passed)


def test_only_the_function_that_leaks_is_named() -> None:
    def leak(call: Leaking) -> None:
        if call.name == "decode_greedy":
            see_neighbours(call)

    assert failures(check(leaky(leak))) == {("neighbours", key) for key in DECODES}


def test_a_leak_into_the_state_is_caught() -> None:
    def leak(call: Leaking) -> None:
        if call.name == "decode_greedy":  # nothing reads the state any more
            seen = mx.roll(call.sum_ids(call.valid), 1, axis=0)[..., None, None]
            call.state["layers.0.keys"] = call.state["layers.0.keys"] + seen

    rows = check(leaky(leak))
    assert failures(rows) == {("neighbours", key) for key in DECODES}
    assert {r.note for r in rows if not r.passed} == {"different: layers.0.keys"}
    assert {r.measured for r in rows if not r.passed} == {2}  # in both rows


def test_an_idle_row_must_not_advance() -> None:
    failed = failures(check(leaky(count_idle_calls)))
    assert {("padding", key) for key in DECODES} <= failed


def test_wrong_lengths_are_infinitely_far_away() -> None:
    def leak(call: Leaking) -> None:
        call.state["lengths"] = call.state["lengths"] + (call.name == "prefill")

    rows = [row for row in check(leaky(leak)) if row.check == "chunking"]
    assert {row.measured for row in rows} == {float("inf")}
    assert rows[0].note == "lengths [4, 3], not [5, 4]"


def test_what_is_forgotten_between_calls_is_caught() -> None:
    failed = failures(check(leaky(forget_across_calls)))
    assert failed == {("chunking", key) for key in PREFILLS if "_t8_" in key}


def test_not_a_number_fails() -> None:
    def leak(call: Leaking) -> None:
        call.logits = call.logits + mx.nan

    rows = check(leaky(leak))
    assert all(not row.passed for row in rows)


# --- scripts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        WIDE,
        BucketPlan(batch=(1, 2), tokens=(1,), capacity=(2,)),
        BucketPlan(batch=(4,), tokens=(1, 16, 64), capacity=(2, 9)),
        BucketPlan(batch=(5,), tokens=(4, 64, 256), capacity=(512,)),
    ],
)
@pytest.mark.parametrize("longest", [1, 7, 1000])
def test_no_text_overflows(plan: BucketPlan, longest: int) -> None:
    compiled = make_model().compiled(plan, eager=True)
    most = min(longest, plan.capacity[0] - 1)
    scripts = {batch: make_script(compiled, batch, longest) for batch in (*plan.batch, 1)}
    for batch, script in scripts.items():
        assert [(call.function, call.tokens) for call in script] == [
            *(("prefill", tokens) for tokens in plan.tokens),
            ("decode_greedy", 1),
            *(("prefill_first", tokens) for tokens in plan.tokens if tokens >= 32),
        ]
        assert all(call.fresh for call in script if call.function == "prefill_first")
        assert script[0].fresh
        for changed in (script, *(replace_rows(script, turn, 96) for turn in (0, 1))):
            lengths = [0] * batch
            for call in changed:
                lengths = [0] * batch if call.fresh else lengths
                lengths = [n + len(row) for n, row in zip(lengths, call.rows, strict=True)]
                assert max(lengths) <= most
                assert max(map(len, call.rows)) <= call.tokens
        assert all(row for call in script for row in call.rows)  # nobody is idle
        # Texts are those of the other batches.
        same = zip(script, scripts[1], strict=True)
        assert all(ours.rows[0] == theirs.rows[0] for ours, theirs in same)


def test_neighbours_get_other_texts_or_none_and_every_row_has_a_turn() -> None:
    script = make_script(make_model().compiled(WIDE, eager=True), 5, 100)
    kinds = set()
    for turn in (0, 1):
        for ours, theirs in zip(script, replace_rows(script, turn, 96), strict=True):
            assert theirs.rows[turn::2] == ours.rows[turn::2]
            pairs = zip(ours.rows[1 - turn :: 2], theirs.rows[1 - turn :: 2], strict=True)
            assert all(mine != other for mine, other in pairs)
            kinds |= {bool(row) for row in theirs.rows[1 - turn :: 2]}
    assert kinds == {True, False}


@pytest.mark.parametrize("name", ["prefill", "prefill_first"])
@pytest.mark.parametrize(
    ("count", "least"), [(1, 1), (2, 1), (8, 1), (1, 4), (2, 4), (3, 4), (5, 4), (32, 4)]
)
def test_pieces_are_the_text(count: int, least: int, name: str) -> None:
    rows = (tuple(range(count)), tuple(range(max(1, count - 2))))
    pieces = cut(Call(name, 64, True, rows), least)
    assert {piece.function for piece in pieces} == {"prefill" if count > 1 else name}
    for row, text in enumerate(rows):
        assert sum((piece.rows[row] for piece in pieces), ()) == text
    assert [piece.fresh for piece in pieces] == [True, *[False] * (len(pieces) - 1)]
    assert all(max(map(len, piece.rows)) <= piece.tokens for piece in pieces)
    assert {piece.tokens for piece in pieces} == {least if count > 1 else 64}
    assert (len(pieces) > 1) == (count > 1)
    assert len(pieces) <= 8


def test_padding_stands_elsewhere() -> None:
    assert elsewhere(2, 5, 0) == [3, 4]
    assert elsewhere(3, 5, 1) == [0, 3, 4]
    assert elsewhere(1, 4, 1) == [3]
    assert elsewhere(0, 4, 1) == []
    assert elsewhere(4, 4, 0) == [0, 1, 2, 3]
    calls = list(
        insert_idle([Call("prefill", 4, True, ((1,),)), Call("prefill", 1, True, ((2,),))])
    )
    assert [(call.tokens, call.fresh, call.rows) for call in calls] == [
        (4, True, ((1,),)), (1, True, ((),)), (1, False, ((2,),))
    ]  # fmt: skip


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*CACHES, *toy_families.LAYERS])
def test_poison_fills_what_nothing_sees(kind: str) -> None:
    bits = None
    if kind in toy_families.LAYERS:
        model = toy_families.make_toy(kind)
    else:
        bits = CACHES[kind].layout.get("kv_bits")
        model = make_model(**CACHES[kind].changes)
    plan = BucketPlan(batch=(3,), tokens=(1, 5), capacity=(48,))
    compiled = model.compiled(plan, bits, eager=True)
    state: Any = compiled.init_cache(3, 48)
    for turn in range(4):  # a ring of ten slots wraps
        valid = mx.array([[i <= turn + row for i in range(5)] for row in range(3)])
        _, state = compiled.prefill(mx.full((3, 5), turn + 1, dtype=mx.int32), valid, state)
    if not any(kind_of(name) == "recurrent" for name in state):
        state = trim(state, [1, 2, 3])  # what a ring has lost does not come back
    before = {name: to_numpy(array) for name, array in state.items()}
    held = {name: cache_histories.held_slots(name, state) for name in state}
    for name in state:
        ours, theirs = held_slots(name, state), held[name]
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))
    poison(state)
    for name, array in state.items():
        inside = True if held[name] is None else np.broadcast_to(to_numpy(held[name]), array.shape)
        inside = np.broadcast_to(np.asarray(inside, bool), array.shape)
        np.testing.assert_array_equal(to_numpy(array)[inside], before[name][inside])
        if name.endswith((".scales", ".biases")) or array.dtype == mx.uint32:
            continue
        assert (to_numpy(array)[~inside] == POISON).all()
        assert kind_of(name) in ("row", "recurrent") or (~inside).any()
    if bits is not None:
        parts = [state[f"layers.0.keys{part}"] for part in ("", ".scales", ".biases")]
        values = to_numpy(mx.dequantize(*parts, group_size=32, bits=bits))
        assert (values[:, :, -1] == POISON).all()
        assert np.abs(to_numpy(parts[1])[:, :, -1]).max() < 1


def test_hashes_tell_what_rows_hold() -> None:
    compiled = make_model().compiled(PLAN, eager=True)
    script = make_script(compiled, 2, 100)
    seen = [one for _, one in run(compiled, 16, script)]
    again = [one for _, one in run(compiled, 16, script, poisoned=True)]
    assert [one.state for one in seen] == [one.state for one in again]
    assert [one.lengths for one in seen] == [[3, 2], [9, 7], [10, 8]]
    rows = [hashes for one in seen for hashes in one.state.values()]
    assert len({first for first, _ in rows} | {second for _, second in rows}) == 2 * len(rows)
