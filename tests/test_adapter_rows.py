"""Low-rank changes of which every row of a batch has its own."""

from __future__ import annotations

import funcrt
from funcrt import adapters
from funcrt import cache as caches
from funcrt.adapters import Adapter, Change
from funcrt.buckets import BucketPlan
from funcrt.errors import InputError, ParamsError
from tests.adapting import PLAN, PROMPT, alone, begin, logits_of, model_of, stacked
from tests.engine.harness import DirectEngine
from tests.helpers import TOLERANCE, ids, random_tokens, relative_error

import mlx.core as mx
import pytest


@pytest.mark.parametrize("kind", ["float32", "affine"])
def test_every_row_is_what_it_is_alone_with_its_adapter(kind):
    rows = [random_tokens(8, seed) for seed in range(4)]
    choice = [2, 0, 1, 2]
    state = begin(choice)
    logits, state = stacked(kind)([row[:6] for row in rows], cache=state)
    more, state = stacked(kind)([row[6:] for row in rows], cache=state)
    assert state["adapter"].tolist() == choice
    for row, (tokens, number) in enumerate(zip(rows, choice, strict=True)):
        expected = logits_of(alone(kind)[number], tokens)
        found = mx.concatenate([logits[row], more[row]])
        assert relative_error(found, expected) < TOLERANCE
        assert relative_error(found, logits_of(alone(kind)[(number + 1) % 3], tokens)) > 0.1


def test_neighbours_change_no_bit():
    model = stacked()
    rows = [random_tokens(8, seed) for seed in range(3)]
    first, _ = model(rows, cache=begin([1, 2, 0]))
    for choice in ([1, 0, 2], [1, 1, 1]):
        other, _ = model([rows[0], rows[2], rows[1]], cache=begin(choice))
        assert mx.array_equal(first[0], other[0])


def test_the_choice_moves_with_its_row():
    state = begin([1, 2, 0])
    assert caches.select(state, [2, 1])["adapter"].tolist() == [0, 2]
    assert caches.fork(state, 1, 2)["adapter"].tolist() == [1, 2, 2]
    assert caches.insert(state, 0, begin([2]), 0)["adapter"].tolist() == [2, 2, 0]
    assert caches.clear(state, 1)["adapter"].tolist() == [1, 0, 0]
    assert caches.reset(state, 0)["adapter"].tolist() == [0, 2, 0]
    assert caches.join([begin([2]), begin([1])])["adapter"].tolist() == [2, 1]
    assert caches.grow(state, 32)["adapter"].tolist() == [1, 2, 0]
    state = stacked()([PROMPT] * 3, cache=state)[1]
    assert caches.trim(state, [1, 2, 3])["adapter"].tolist() == [1, 2, 0]


def test_numbers_out_of_range_stay_within():
    logits, _ = stacked()([PROMPT] * 2, cache=begin([7, -1]))
    expected, _ = stacked()([PROMPT] * 2, cache=begin([2, 0]))
    assert mx.array_equal(logits, expected)


def test_other_choices_trace_nothing_and_compiled_is_eager():
    compiled, eager = stacked().compiled(PLAN), stacked().compiled(PLAN, eager=True)
    tokens, valid = ids(PROMPT, PROMPT[::-1]), mx.ones((2, 8))
    for choice in ([1, 2], [0, 1]):
        state = begin(choice)
        logits, after = compiled.prefill(tokens, valid, state)
        expected, _ = eager.prefill(tokens, valid, begin(choice))
        assert relative_error(logits, expected) < TOLERANCE
        active = mx.array([True, True])
        sampled, _ = compiled.decode_greedy(
            mx.argmax(logits, axis=1).astype(mx.int32), active, after
        )
        assert sampled.finite.tolist() == [True, True]
    assert set(compiled.traces.values()) == {1}


def test_engine_rows_take_the_adapters_of_their_requests():
    prompt = random_tokens(12, 5)
    with funcrt.Engine(stacked(), BucketPlan(batch=(2, 4), tokens=(8,), capacity=(64,))) as engine:
        together = engine.generate([prompt] * 4, max_tokens=8, adapter=[0, 1, 2, 1])
        # Kept rows of one adapter are of no use to another, whose keys and values are different.
        assert together[0].reused_tokens == together[2].reused_tokens == 0
        for number in (2, 0):
            again = engine.generate([prompt], max_tokens=8, adapter=number)[0]
            assert again.tokens == together[number].tokens
            assert again.reused_tokens > 0
        with pytest.raises(InputError, match="adapter: expected an integer from 0 to 2, got 3"):
            engine.generate([prompt], adapter=3)
    assert together[3].tokens == together[1].tokens
    assert len({tuple(completion.tokens) for completion in together}) == 3
    for number, model in enumerate(alone()):
        tokens = list(prompt)
        for token in together[number].tokens:
            assert token == logits_of(model, tokens)[-1].argmax()
            tokens.append(token)
    plain = funcrt.Engine(model_of("float32"))
    with plain, pytest.raises(InputError, match="adapter: expected an integer from 0 to 0"):
        plain.generate([prompt], adapter=1)


def test_rows_that_begin_beside_others_take_their_own_adapters():
    """In a call with the rest of a longer prompt, and as the first rows of a call."""
    engine = DirectEngine(stacked(), BucketPlan(batch=(1, 4), tokens=(8,), capacity=(16, 64)))
    wishes = [(random_tokens(12, 1), 1), (random_tokens(6, 2), 2), (random_tokens(7, 3), 0)]
    handles = []

    def ask(prompt: list[int], adapter: int) -> None:
        handles.append(engine.submit(prompt, max_tokens=4, adapter=adapter))

    ask(*wishes[0])
    engine.round()
    for wish in wishes[1:]:
        ask(*wish)
    engine.run()
    assert [r.rows for r in engine.reports if r.function == "prefill"] == [1, 3]
    models = alone()
    for (prompt, adapter), handle in zip(wishes, handles, strict=True):
        tokens = list(prompt)
        for token in handle.result(0).tokens:
            assert token == logits_of(models[adapter], tokens)[-1].argmax()
            tokens.append(token)


def test_a_prompt_does_not_wait_for_that_of_another_adapter():
    plan = BucketPlan(batch=(4,), tokens=(16,), capacity=(64,))
    engine = DirectEngine(stacked(), plan)
    for adapter in (0, 1, 2):
        engine.submit(random_tokens(16, 5), max_tokens=1, adapter=adapter)
    engine.run()
    # They would go one by one, each to fork the row before it, if its adapter were the same.
    assert [r.rows for r in engine.reports if r.function == "prefill"] == [3]


def test_stacks_need_adapters_that_rows_can_choose():
    model, change = model_of("float32"), Change(mx.zeros((2, 64)), mx.zeros((96, 2)))
    with pytest.raises(ParamsError, match="at least one"):
        adapters.stack(model, [])
    head = Adapter("head", {"lm_head": change})
    with pytest.raises(ParamsError, match="lm_head: cannot have a change for each row"):
        adapters.stack(model, [head])
    assert adapters.keep(model, head).adapter_count == 0
    with pytest.raises(ParamsError, match="whole"):
        adapters.stack(model, [Adapter("w", {}, {"lm_head.weight": mx.zeros((96, 64))})])
