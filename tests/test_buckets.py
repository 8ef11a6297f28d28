"""Plans, and the callables that are compiled for their buckets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from funcrt import Bucket, BucketPlan, masks, sampling
from funcrt.buckets import choose_overhead, default_plan
from funcrt.cache import CacheState, init_cache
from funcrt.compiled import Compiled
from funcrt.errors import CacheError, CapacityError, InputError
from tests.helpers import (
    TINY,
    TOLERANCE,
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

PLAN = BucketPlan(batch=[4, 1, 4], tokens=(16, 2), capacity=(8, 64))
model_of = cache(make_model)


def test_a_plan_is_every_combination_once():
    assert (PLAN.batch, PLAN.tokens, PLAN.capacity) == ((1, 4), (2, 16), (8, 64))
    assert set(PLAN) == {Bucket(b, t, s) for b in (1, 4) for t in (2, 16) for s in (8, 64)}
    assert len(list(PLAN)) == 8
    assert BucketPlan(batch=3, tokens=1, capacity=9) == BucketPlan(
        batch=[3], tokens=iter([1]), capacity={9}
    )
    assert str(Bucket(4, 16, 64)) == "b4_t16_s64"
    with pytest.raises(AttributeError):
        PLAN.batch = (1,)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": ()},
        {"batch": [0]},
        {"batch": [1, -1]},
        {"batch": [True]},
        {"tokens": [1.0]},
        {"tokens": ["1"]},
        {"tokens": 0},
        {"capacity": [1]},
        {"capacity": [None]},
    ],
    ids=str,
)
def test_a_plan_refuses(changes):
    name = next(iter(changes))
    with pytest.raises(InputError, match=f"plan {name}: expected integers >= "):
        BucketPlan(**{"batch": 1, "tokens": 1, "capacity": 8, **changes})


def test_choices_take_the_smallest_that_fits():
    assert [PLAN.choose_batch(n) for n in (1, 2, 4)] == [1, 4, 4]
    assert [PLAN.choose_tokens(n) for n in (1, 2, 3, 16, 17, 999)] == [2, 2, 16, 16, 16, 16]
    # One slot is scratch.
    assert [PLAN.choose_capacity(n) for n in (0, 7, 8, 63)] == [8, 8, 64, 64]


def test_what_fits_nowhere_says_what_to_export():
    for tokens, wanted in [(64, 128), (127, 128), (128, 256), (5012, 8192)]:
        with pytest.raises(CapacityError) as caught:
            PLAN.choose_capacity(tokens, "prompt")
        assert str(caught.value) == (
            f"prompt has {tokens} tokens, largest capacity is 63: "
            f"export a larger one (--capacity {wanted})"
        )
        assert BucketPlan(batch=1, tokens=1, capacity=wanted).choose_capacity(tokens) == wanted
    with pytest.raises(CapacityError, match=r"5 rows, largest batch is 4: .*\(--batch 5\)"):
        PLAN.choose_batch(5)


@pytest.mark.parametrize("positions", [1, 255, 256, 2048, 3000])
def test_the_default_plan_holds_every_position(positions):
    plan = default_plan(positions)
    assert plan.choose_capacity(positions) >= positions + 1
    assert plan.capacity[-1] < 4 * max(positions, 128)
    assert 1 in plan.batch


def test_the_default_plan_has_room_for_rows_tails_and_guesses():
    plan = default_plan(2048)
    assert plan.batch == (1, 2, 4, 8, 16)
    assert plan.tokens == (4, 16, 64, 256)


def cost_of(chunks: Sequence[int], overhead: int) -> int:
    return sum(chunk + overhead for chunk in chunks)


def cut(plan: BucketPlan, pending: int, overhead: int) -> list[int]:
    chunks = []
    while pending > 0:
        chunks.append(plan.choose_chunk(pending, overhead))
        pending -= chunks[-1]
    return chunks


def cheapest(tokens: Sequence[int], pending: int, overhead: int) -> int:
    """Brute force: every multiset of chunks that covers `pending`, none of them needlessly."""
    largest, *rest = sorted(tokens, reverse=True)
    if not rest:
        return -(-pending // largest) * (largest + overhead)
    counts = range(-(-pending // largest) + 1)
    return min(
        n * (largest + overhead)
        + (cheapest(rest, pending - n * largest, overhead) if pending > n * largest else 0)
        for n in counts
    )


@pytest.mark.parametrize("tokens", [(1,), (4, 16, 64), (2, 8, 16), (3, 5), (6, 10, 15), (4, 6, 9)])
@pytest.mark.parametrize("overhead", [0, 1, 10, 128])
def test_chunks_are_the_cheapest_cut_with_the_largest_first(tokens, overhead):
    plan = BucketPlan(batch=1, tokens=tokens, capacity=8)
    for pending in [*range(1, 40), 63, 64, 65, 77, 100, 131, 150]:
        chunks = cut(plan, pending, overhead)
        assert cost_of(chunks, overhead) == cheapest(tokens, pending, overhead)
        assert chunks == sorted(chunks, reverse=True)
        assert sum(chunks[:-1]) < pending


def test_chunks_weigh_padding_against_calls():
    plan = default_plan(2048)
    assert cut(plan, 39, 10) == [64]  # three of 16 would be two more calls
    assert cut(plan, 21, 10) == [16, 16]
    assert cut(plan, 21, 0) == [16, 4, 4]
    assert cut(plan, 20, 1) == [16, 4]
    assert cut(plan, 65, 128) == [64, 4]
    assert cut(plan, 190, 128) == [256]
    assert cut(plan, 300, 10) == [256, 64]


@pytest.mark.parametrize("tokens", [(4, 16, 64, 256), (3, 7, 512), (2047, 4096)])
def test_long_prompts_are_cut_at_once(tokens):
    plan = BucketPlan(batch=1, tokens=tokens, capacity=8)
    chunks = cut(plan, 100_000, 10)
    assert sum(chunks) >= 100_000 > sum(chunks[:-1])
    assert chunks.count(tokens[-1]) >= 100_000 // tokens[-1] - 1


@pytest.mark.parametrize("pending", [0, -1, 1.0, True])
def test_chunks_of_nothing_are_refused(pending):
    with pytest.raises(InputError, match="pending: expected an integer >= 1"):
        PLAN.choose_chunk(pending, 10)
    with pytest.raises(InputError, match="overhead: expected an integer >= 0, got -1"):
        PLAN.choose_chunk(1, -1)


def test_a_call_costs_more_beside_its_tokens_on_a_gpu(monkeypatch):
    monkeypatch.setattr("funcrt.machine.is_on_gpu", lambda: False)
    assert choose_overhead() == 10
    monkeypatch.setattr("funcrt.machine.is_on_gpu", lambda: True)
    assert choose_overhead() == 512


# --- compiled -------------------------------------------------------------------------------------


def make_compiled() -> Compiled:
    return model_of("float32").compiled(BucketPlan(batch=3, tokens=(1, 8), capacity=(24, 16384)))


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return make_compiled()


def settings_of(batch: int = 3, **values: Any) -> dict[str, mx.array]:
    return sampling.make_settings(batch, TINY.vocab_size, **values)


def test_steps_agree_with_forward_and_trace_once():
    """Three rows live through prefill, sampling and decoding; every value changes on the way."""
    model, compiled = model_of("float32"), make_compiled()
    state = compiled.init_cache(3, 24)
    sequences: list[list[int]] = [[], [], []]
    for valid in ([[1, 0, 1, 1, 0, 1, 1, 0], [0] * 8, [1] * 8], [[0] * 7 + [1], [1] * 8, [0] * 8]):
        chunk = [random_tokens(8, 10 * len(sequences[0]) + row) for row in range(3)]
        logits, state = compiled.prefill(ids(*chunk), mx.array(valid) != 0, poison(state))
        for row, real in enumerate(valid):
            sequences[row] += [t for t, is_real in zip(chunk[row], real, strict=True) if is_real]
            if any(real):
                expected, _ = run_plain(model, sequences[row])
                assert relative_error(logits[row], expected[-1]) <= TOLERANCE
    assert state["lengths"].tolist() == [6, 8, 8]
    token = [3, 4, 5]
    for n in range(6):
        active = [True, n % 2 == 0, n != 3]
        # Rows mix greedy and sampled, and the settings move.
        wanted = {"temperature": [0.0, 0.8, 0.1 * n], "top_k": [0, 5, n], "seed": [n, 7, 2**32 - 1]}
        (tokens, logprobs, finite, *_), new = compiled.decode(
            ids(token)[0], mx.array(active), settings_of(**wanted), dict(state)
        )
        (greedy, *_), _ = compiled.decode_greedy(ids(token)[0], mx.array(active), state)
        for row in range(3):
            if active[row]:
                sequences[row].append(token[row])
        rows = [run_plain(model, sequence)[0][-1] for sequence in sequences]
        exact = mx.array(np.array(rows, np.float32))
        positions = mx.array([len(sequence) for sequence in sequences])
        chosen = sampling.sample(exact, settings_of(**wanted), positions)
        for row in range(3):
            if active[row]:
                assert greedy[row].item() == int(np.argmax(rows[row]))
                assert tokens[row].item() == chosen[0][row].item()
                assert logprobs[row].item() == pytest.approx(chosen[1][row].item(), abs=1e-4)
                assert finite[row].item() is True
        alone = compiled.sample(exact, positions, settings_of(**wanted))
        assert [a.tolist() for a in alone[:3:2]] == [a.tolist() for a in chosen[:3:2]]
        token, state = tokens.tolist(), new
        assert state["lengths"].tolist() == positions.tolist()
    assert dict(compiled.traces) == {
        "prefill_b3_t8_s24": 1,
        "decode_b3_t1_s24": 1,
        "decode_greedy_b3_t1_s24": 1,
        "sample_b3_t1_s0": 1,
    }


def test_a_state_in_another_order_does_not_retrace():
    compiled = make_compiled()
    state = compiled.init_cache(3, 24)
    tokens, active = ids([1, 2, 3])[0], mx.array([True] * 3)
    (first, *_), after = compiled.decode_greedy(tokens, active, state)
    shuffled = {name: state[name] for name in sorted(state, reverse=True)}
    (again, *_), moved = compiled.decode_greedy(tokens, active, shuffled)
    settings = settings_of(temperature=1.0)
    compiled.decode(tokens, active, settings, state)
    compiled.decode(tokens, active, dict(reversed(settings.items())), state)
    assert again.tolist() == first.tolist()
    assert list(moved) == list(after) == list(state)
    assert dict(compiled.traces) == {"decode_greedy_b3_t1_s24": 1, "decode_b3_t1_s24": 1}


def test_another_shape_is_refused_and_not_traced(compiled):
    state = compiled.init_cache(3, 24)
    tokens, mask = mx.zeros((3, 8), mx.int32), mx.zeros((3, 1, 8, 24), mx.bool_)
    token, active = tokens[:, 0], mask[:, 0, 0, 0]
    compiled.forward(tokens, mask, state)
    compiled.traces.clear()
    wide, other = init_cache(compiled.cache_spec, 3, 25), init_cache(compiled.cache_spec, 2, 24)

    def refuse(error: type[Exception], call: Any, *arguments: Any) -> None:
        with pytest.raises(error):
            call(*arguments)

    refuse(CapacityError, compiled.init_cache, 2, 24)
    refuse(CapacityError, compiled.init_cache, 3, 25)
    refuse(CapacityError, compiled.forward, tokens[:, :7], mask[:, :, :7], state)
    refuse(CapacityError, compiled.forward, tokens, mx.zeros((3, 1, 8, 25), mx.bool_), wide)
    refuse(CapacityError, compiled.forward, tokens[:2], mask[:2], other)
    refuse(CapacityError, compiled.decode_greedy, token[:2], active[:2], other)
    refuse(CapacityError, compiled.prefill, tokens, tokens != 0, wide)
    refuse(InputError, compiled.forward, tokens[:2], mask, state)
    refuse(InputError, compiled.forward, tokens[0], mask, state)
    refuse(InputError, compiled.forward, tokens.astype(mx.int64), mask, state)
    refuse(InputError, compiled.forward, tokens, mask[:, :, :, :23], state)
    refuse(InputError, compiled.forward, tokens, mask.astype(mx.uint8), state)
    refuse(InputError, compiled.prefill, tokens, tokens[:, 0], state)
    refuse(InputError, compiled.prefill, tokens, (tokens != 0)[:, :7], state)
    refuse(InputError, compiled.decode_greedy, token[:, None], active, state)
    refuse(InputError, compiled.decode_greedy, token, active[:2], state)
    refuse(InputError, compiled.decode, token, active, settings_of(2), state)
    logits = mx.zeros((3, TINY.vocab_size))
    refuse(InputError, compiled.sample, logits[:, :5], token, settings_of())
    refuse(InputError, compiled.sample, logits.astype(mx.float16), token, settings_of())
    refuse(InputError, compiled.sample, logits, token[:2], settings_of())
    refuse(CapacityError, compiled.sample, logits[:2], token[:2], settings_of(2))
    refuse(CacheError, compiled.forward, tokens, mask, {})
    half = {n: a if n == "lengths" else a.astype(mx.float16) for n, a in state.items()}
    refuse(CacheError, compiled.forward, tokens, mask, half)
    assert not compiled.traces


def test_decoding_is_in_place_and_memory_stays_flat(compiled):
    capacity = 16384
    state: CacheState = compiled.init_cache(3, capacity)
    size = sum(array.nbytes for array in state.values())
    token, active = ids([1, 2, 3])[0], mx.array([True, False, True])
    settings = settings_of(temperature=[0.0, 0.5, 1.0])
    levels = []
    for _ in range(40):
        (token, logprobs, finite, *_), state = compiled.decode(token, active, settings, state)
        mx.eval(token, logprobs, finite, state)
        levels.append(mx.get_active_memory())
        if len(levels) == 10:
            mx.reset_peak_memory()
    assert state["lengths"].tolist() == [40, 0, 40]
    assert max(levels[10:]) - levels[9] < 0.01 * size
    assert mx.get_peak_memory() - levels[9] < 0.5 * size
    # Holding the old state costs a copy: the measure can tell.
    mx.reset_peak_memory()
    held = dict(state)
    *_, new = compiled.decode(token, active, settings, state)
    mx.eval(new)
    assert mx.get_peak_memory() - levels[9] > 0.9 * size
    assert held["lengths"].tolist() == [40, 0, 40]


def test_a_prefill_updates_in_place_too(compiled):
    state: CacheState = compiled.init_cache(3, 16384)
    size = sum(array.nbytes for array in state.values())
    tokens, valid = ids(*(random_tokens(8, row) for row in range(3))), mx.ones((3, 8)) != 0
    for n in range(4):
        logits, state = compiled.prefill(tokens, valid, state)
        mx.eval(logits, state)
        if n == 1:
            mx.reset_peak_memory()
            level = mx.get_active_memory()
    assert np.isfinite(to_numpy(logits)).all()
    assert mx.get_peak_memory() - level < 0.8 * size  # of which scores take most


def test_masks_and_logits_in_the_order_of_the_caller(compiled):
    """Compiled forward: holes in one row, two calls, logits where the tokens stood."""
    tokens = random_tokens(10)
    state, parts = compiled.init_cache(3, 24), []
    for real in ([0, 1, 1, 0, 1, 0, 1, 0], [1, 1, 0, 1, 1, 0, 1, 1]):
        done = sum(map(len, parts))
        line = [tokens[done + sum(real[:i])] if real[i] else 0 for i in range(8)]
        valid = mx.array([[0] * 8, real, [0] * 8])
        mask = masks.causal(valid, state["lengths"], 24)
        logits, state = compiled.forward(ids([0] * 8, line, [0] * 8), mask, state)
        parts.append(to_numpy(logits[1])[np.array(real, bool)])
    expected, _ = run_plain(model_of("float32"), tokens)
    assert relative_error(np.concatenate(parts), expected) <= TOLERANCE
