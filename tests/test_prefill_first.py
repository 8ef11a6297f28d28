"""`prefill_first` is `prefill` of empty rows, whatever their state says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from funcrt import BucketPlan, Engine
from funcrt.buckets import Bucket
from funcrt.bundle import export, extend, load_bundle, verify
from funcrt.bundle.format.checks import check_manifest
from funcrt.cache import CacheState, kind_of
from funcrt.compiled import Compiled
from funcrt.errors import BundleError, CapacityError
from funcrt.model import Model
from funcrt.steps import FIRST, STEPS
from tests.adapting import stacked
from tests.cache_histories import held_slots
from tests.cache_histories import poison as poison_slots
from tests.cache_kinds import MISTRAL, PACKED
from tests.families.cases import Case
from tests.helpers import (
    KINDS,
    ROUNDING,
    TOLERANCE,
    assert_same,
    generate_plain,
    ids,
    make_model,
    random_tokens,
    relative_error,
)  # fmt: skip

import mlx.core as mx
import pytest

TOKENS, CAPACITY = 32, 80
PLAN = BucketPlan(batch=(1, 4), tokens=(4, 8, TOKENS), capacity=CAPACITY)
COUNTS = (TOKENS, 5, 0, 19)  # real tokens of each row; one is idle
FAMILIES = (
    "gemma2", "gemma3_text", "gpt2", "gpt_oss", "deepseek_v3", "lfm2", "mamba2", "qwen3_next",
)  # fmt: skip
LLAMAS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    **{kind: (kind, {}, None) for kind in KINDS},
    "ring": ("float32", MISTRAL, None),
    "wide ring": ("float32", {**MISTRAL, "sliding_window": TOKENS}, None),
    "16-bit ring": ("float16", MISTRAL, None),
    "kv8": ("float32", PACKED, 8),
    "kv4": ("bfloat16", PACKED, 4),
}


class Subject(NamedTuple):
    model: Model
    kv_bits: int | None = None

    def compiled(self, eager: bool = False) -> Compiled:
        return self.model.compiled(PLAN, self.kv_bits, eager)


@pytest.fixture(scope="module", params=[*LLAMAS, *FAMILIES])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Every kind of cache, and everything that attention may have beside it."""
    if request.param in LLAMAS:
        kind, changes, kv_bits = LLAMAS[request.param]
        return Subject(make_model(kind, **changes), kv_bits)
    with Case(request.param) as case:
        return Subject(case.model)


def draw(model: Model, left: bool = False, seed: int = 0) -> tuple[mx.array, mx.array]:
    """`tokens` and `valid` of ragged rows, padded on one side with arbitrary ids."""
    rows, valid = [], []
    for row, count in enumerate(COUNTS):
        text, filler = random_tokens(count, row), random_tokens(TOKENS - count, seed + 50)
        rows.append([*filler, *text] if left else [*text, *filler])
        valid.append([(TOKENS - 1 - i if left else i) < count for i in range(TOKENS)])
    return ids(*rows) % model.vocab_size, mx.array(valid)


def stale(compiled: Compiled) -> CacheState:
    """Rows that hold other texts, longer than a ring, and 1e4 in all other slots."""
    state = compiled.init_cache(len(COUNTS), CAPACITY)
    for seed in (7, 8):
        tokens = ids(*(random_tokens(TOKENS, seed + row) for row in range(len(COUNTS))))
        valid = mx.arange(TOKENS) < mx.array([[TOKENS], [TOKENS], [20], [3]])
        _, state = compiled.prefill(tokens % compiled.vocab_size, valid, state)
    state = poison_slots(state)
    mx.eval(state)
    assert min(state["lengths"].tolist()) > 0
    return state


def go_on(compiled: Compiled, state: CacheState) -> tuple[mx.array, CacheState]:
    """Logits of some tokens more in every row, which look at all that came before."""
    tokens = ids(*(random_tokens(8, 90 + row) for row in range(len(COUNTS))))
    return compiled.prefill(tokens % compiled.vocab_size, mx.ones(tokens.shape), state)


def test_it_is_prefill_of_empty_rows(subject: Subject) -> None:
    compiled, busy = subject.compiled(), [row for row, count in enumerate(COUNTS) if count]
    tokens, valid = draw(subject.model)
    expected, theirs = compiled.prefill(tokens, valid, compiled.init_cache(4, CAPACITY))
    found, ours = compiled.prefill_first(tokens, valid, stale(compiled))
    for name in [name for name in ours if kind_of(name) == "row"]:
        assert mx.array_equal(ours[name], theirs[name]).item(), name
    assert ours["lengths"].tolist() == list(COUNTS)
    later, theirs = go_on(compiled, theirs)
    ours_later, ours = go_on(compiled, ours)
    assert ours["lengths"].tolist() == theirs["lengths"].tolist()
    pairs = [(found[mx.array(busy)], expected[mx.array(busy)]), (ours_later, later)]
    if subject.model.config.dtype == "float32":
        assert all(relative_error(mine, other) <= TOLERANCE for mine, other in pairs)
        return
    # In 16 bits the one may be as far from float32 as the other.
    exact = Subject(subject.model.in_float32(), subject.kv_bits).compiled()
    logits, state = exact.prefill(tokens, valid, exact.init_cache(4, CAPACITY))
    references = [logits[mx.array(busy)], go_on(exact, state)[0]]
    limit = max(
        relative_error(other, true) for (_, other), true in zip(pairs, references, strict=True)
    )
    for (mine, _), true in zip(pairs, references, strict=True):
        assert relative_error(mine, true) <= ROUNDING * limit


def test_nothing_old_and_no_padding_changes_a_bit(subject: Subject) -> None:
    compiled = subject.compiled()
    tokens, valid = draw(subject.model)
    expected, theirs = compiled.prefill_first(tokens, valid, compiled.init_cache(4, CAPACITY))
    moved = draw(subject.model, left=True, seed=1)
    for inputs in ((tokens, valid), moved):
        found, ours = compiled.prefill_first(*inputs, stale(compiled))
        for row, count in enumerate(COUNTS):
            if count:
                assert mx.array_equal(found[row], expected[row]).item()
        assert_same(held(ours), held(theirs))
        assert all(mx.all(mx.isfinite(a)).item() for a in ours.values() if is_float(a))


@pytest.mark.parametrize("kind", ["float32", "ring", "kv8"])
def test_a_call_may_have_more_tokens_than_there_are_slots(kind: str) -> None:
    """As long as those that are real fit; they fill all slots but scratch here."""
    base, changes, kv_bits = LLAMAS[kind]
    plan = BucketPlan(batch=2, tokens=(4, TOKENS), capacity=20)
    compiled = Subject(make_model(base, **changes), kv_bits).model.compiled(plan, kv_bits)
    tokens = ids(random_tokens(TOKENS, 1), random_tokens(TOKENS, 2))
    valid = mx.arange(TOKENS) < mx.array([[19], [15]])
    logits, states = [], []
    for first in (False, True):
        found, state = compiled.prefill(tokens, valid, compiled.init_cache(2, 20), first=first)
        more = mx.array([[False] * 4, [True] * 4])
        later, state = compiled.prefill(tokens[:, :4], more, state)
        logits.append(mx.concatenate([found, later[1:]]))
        states.append(state)
    assert relative_error(logits[1], logits[0]) <= TOLERANCE
    assert all(state["lengths"].tolist() == [19, 19] for state in states)


def held(state: CacheState) -> CacheState:
    """The state with 0 in all slots that hold nothing."""
    marks = {name: held_slots(name, state) for name in state}
    return {n: a if marks[n] is None else mx.where(marks[n], a, 0) for n, a in state.items()}


def is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def test_a_row_is_what_it_is_alone(subject: Subject) -> None:
    compiled = subject.compiled()
    tokens, valid = draw(subject.model)
    together, _ = compiled.prefill_first(tokens, valid, compiled.init_cache(4, CAPACITY))
    others = mx.array([False, True, True, True])
    idle, _ = compiled.prefill_first(
        mx.where(others[:, None], 3, tokens), valid & ~others[:, None], stale(compiled)
    )
    assert mx.array_equal(idle[0], together[0]).item()  # its neighbours left
    if subject.model.config.dtype == "float32":
        for row in (0, 1, 3):
            one, _ = compiled.prefill_first(
                tokens[row][None], valid[row][None], compiled.init_cache(1, CAPACITY)
            )
            assert relative_error(one[0], together[row]) <= TOLERANCE


def test_eager_compiled_and_imported_agree(subject: Subject, tmp_path: Path) -> None:
    model = subject.model
    layout = model.choose_layout(PLAN, subject.kv_bits)
    function = model.flat_step(FIRST, Bucket(4, TOKENS, CAPACITY), layout)
    state = stale(subject.compiled())
    arrays = [*model.prepared.values(), *draw(model), *state.values()]
    mx.export_function(str(tmp_path / "f.mlxfn"), function, *arrays)
    imported = mx.import_function(str(tmp_path / "f.mlxfn"))
    plain = function(*arrays)
    for ours, theirs in zip(imported(*arrays), plain, strict=True):
        assert mx.array_equal(ours, theirs).item()
    compiled = mx.compile(function)(*arrays)
    share = TOLERANCE if model.config.dtype == "float32" else 0.05
    for row in (0, 1, 3):
        assert relative_error(compiled[0][row], plain[0][row]) <= share


def test_rows_keep_the_adapters_that_they_chose() -> None:
    compiled = stacked().compiled(PLAN)
    tokens, valid = draw(stacked())
    choice = mx.array([1, 0, 2, 2], dtype=mx.int32)
    empty = {**compiled.init_cache(4, CAPACITY), "adapter": choice}
    expected, _ = compiled.prefill(tokens, valid, dict(empty))
    found, state = compiled.prefill_first(tokens, valid, {**stale(compiled), "adapter": choice})
    assert state["adapter"].tolist() == choice.tolist()
    for row in (0, 1, 3):
        assert relative_error(found[row], expected[row]) <= TOLERANCE


# --- who calls it ---------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name and T of every call of a prompt."""
    made: list[tuple[str, int]] = []
    original = Compiled._stateful

    def run(self: Compiled, name: str, tokens: int, *rest: Any) -> Any:
        if name.startswith("prefill"):
            made.append((name, tokens))
        return original(self, name, tokens, *rest)

    monkeypatch.setattr(Compiled, "_stateful", run)
    return made


def test_engines_call_it_for_first_chunks_only(calls: list[tuple[str, int]]) -> None:
    model = make_model()
    with Engine(model, PLAN) as engine:
        prompt = random_tokens(40)
        assert engine.generate([prompt], max_tokens=3)[0].tokens == generate_plain(model, prompt, 3)
        assert calls == [(FIRST, TOKENS), ("prefill", 8)]
        calls.clear()
        longer = [*prompt, *random_tokens(30, 1)]
        completion = engine.generate([longer], max_tokens=2)[0]
        assert completion.tokens == generate_plain(model, longer, 2)
        assert completion.reused_tokens == 40
        assert {name for name, _ in calls} == {"prefill"}  # behind what was reused
        calls.clear()
        engine.generate([random_tokens(3, 2)], max_tokens=1)
        assert calls == [("prefill", 4)]  # no such size
        assert engine.stats.prompt_tokens == 40 + 30 + 3


def test_drafts_begin_with_it(calls: list[tuple[str, int]]) -> None:
    model, prompt = make_model(), random_tokens(TOKENS + 1)
    with Engine(model, PLAN, speculate=make_model(seed=1)) as engine:
        found = engine.generate([prompt], max_tokens=4)[0].tokens
    assert found == generate_plain(model, prompt, 4)
    assert calls.count((FIRST, TOKENS)) == 2


def test_bundles_that_are_older_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, int]]
) -> None:
    model, plan = make_model(), BucketPlan(batch=2, tokens=(4, TOKENS), capacity=48)
    with monkeypatch.context() as before:
        before.setitem(STEPS, FIRST, replace(STEPS[FIRST], sizes=(2**30, 2**30)))
        export(model, tmp_path / "older", plan)  # verified by a process that knows it
    bundle, prompt = load_bundle(tmp_path / "older"), random_tokens(30)
    assert FIRST not in {entry.name for entry in bundle.target.functions}
    with Engine(bundle) as engine:
        assert engine.generate([prompt], max_tokens=3)[0].tokens == generate_plain(model, prompt, 3)
    assert calls[-1] == ("prefill", TOKENS)
    state = bundle.init_cache(2, 48)
    with pytest.raises(CapacityError, match=f"{FIRST} of 32 tokens is not declared"):
        bundle.functions.prefill_first(mx.zeros((2, 32), mx.int32), mx.ones((2, 32)), state)
    newer = extend(tmp_path / "older", plan)
    assert newer.functions.present >= {FIRST}


def test_bundles_have_it_for_all_shapes_or_none(tmp_path: Path) -> None:
    plan = BucketPlan(batch=2, tokens=TOKENS, capacity=(48, 64))
    bundle = export(make_model(), tmp_path / "bundle", plan)
    assert all(check.passed for check in verify(bundle))
    target = bundle.target
    first = next(entry for entry in target.functions if entry.name == FIRST)
    functions = tuple(entry for entry in target.functions if entry != first)
    cut = replace(bundle.manifest, targets={bundle.device: replace(target, functions=functions)})
    with pytest.raises(BundleError, match=f"{first.key} is missing"):
        check_manifest(cut)


def test_it_takes_no_room_for_slots() -> None:
    """Neither for scores, as `prefill` does, nor for another state."""
    compiled = make_model().compiled(BucketPlan(batch=3, tokens=TOKENS, capacity=16384))
    tokens = ids(*(random_tokens(TOKENS, row) for row in range(3)))
    state = compiled.init_cache(3, 16384)
    size = sum(array.nbytes for array in state.values())
    for number in range(4):
        logits, state = compiled.prefill_first(tokens, mx.ones(tokens.shape), state)
        mx.eval(logits, state)
        if number == 1:  # the first call is traced
            mx.reset_peak_memory()
            level = mx.get_active_memory()
    assert mx.get_peak_memory() - level < 0.2 * size
