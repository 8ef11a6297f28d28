"""Steps that are begun before the last one is read: what is dropped, and when nothing is begun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from funcrt import BucketPlan
from funcrt.engine import flight
from funcrt.engine.decoding import Decoding
from funcrt.engine.speculative import NgramDrafter
from tests.engine.harness import DirectEngine, Subject, check_completion, draft, subject, toys
from tests.helpers import make_model, random_tokens

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

ENDLESS = {17: -1e9, 95: -1e9}  # the ids that end a text


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with toys():
        yield


def flying(engine: DirectEngine) -> list[Any]:
    """The requests of the step that is not read yet."""
    flight = engine.scheduler._decoding._flight
    return [] if flight is None else list(flight.rows.values())


def test_a_step_is_under_way_between_rounds():
    engine = DirectEngine(subject("full"))
    handle = engine.submit([1, 2, 3], max_tokens=6, logit_bias=ENDLESS)
    seen = []
    while engine.busy:
        engine.round()
        engine.check()
        seen.append(len(flying(engine)))
    # The first token comes from the prompt; for the last one nothing is begun behind it.
    assert seen == [1, 1, 1, 1, 0]
    assert len(handle.result(0).tokens) == 6
    assert engine.stats.steps == 6  # the prompt and five


def test_no_array_is_scheduled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX holds what it is given until all of that is done, and copies what is held.

    A step whose first half were given out with its second one, too, would have the next step copy
    the caches of half of all layers.
    """
    engine = DirectEngine(subject("full"))
    seen: list[mx.array] = []
    sizes: list[int] = []
    schedule = flight._schedule

    def record(*given: Any) -> None:
        arrays = [array for _, array in tree_flatten(given) if isinstance(array, mx.array)]
        assert not {id(array) for array in arrays} & {id(array) for array in seen}
        seen.extend(arrays)  # held, so that no other array has the same id
        sizes.append(len(arrays))
        schedule(*given)

    monkeypatch.setattr(flight, "_schedule", record)
    handle = engine.submit([1, 2, 3], max_tokens=6, logit_bias=ENDLESS)
    engine.run()
    assert len(handle.result(0).tokens) == 6
    # A prompt in pieces and what is chosen then, five steps in halves; a mark goes with all but the
    # last part of each.
    state = len(subject("full").model.whole_cache_spec)
    pieces = -(-state // -(-state // flight._PIECES))
    assert sum(sizes[:pieces]) == state + pieces
    chosen, steps = sizes[pieces], sizes[pieces + 1 :]
    assert len(steps) == 2 * 5
    assert {a + b for a, b in zip(steps[::2], steps[1::2], strict=True)} == {state + 1 + chosen}


def test_the_first_token_is_there_before_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = DirectEngine(subject("full")), []
    handle = engine.submit([1, 2, 3], max_tokens=2, on_chunk=lambda chunk: told.append(chunk.token))
    step = engine.scheduler.step

    def look() -> None:
        assert len(told) == 1
        monkeypatch.undo()
        step()

    monkeypatch.setattr(engine.scheduler, "step", look)
    engine.run()
    assert len(handle.result(0).tokens) == 2


def test_nothing_is_begun_early_on_a_cpu() -> None:
    engine = DirectEngine(subject("full"), ahead=False)
    handle = engine.submit([1, 2, 3], max_tokens=4, logit_bias=ENDLESS)
    while engine.busy:
        engine.round()
        engine.check()
        assert not flying(engine)
    check_completion("full", [1, 2, 3], {"max_tokens": 4, "logit_bias": ENDLESS}, handle.result(0))


def counted_builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The step before each one that is built, None where nothing is under way."""
    built: list[Any] = []
    build = Decoding._build

    def watch(self: Decoding, rows: Any, before: Any, state: Any) -> Any:
        built.append(before)
        return build(self, rows, before, state)

    monkeypatch.setattr(Decoding, "_build", watch)
    return built


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.5}], ids=str
)
def test_steps_are_built_while_others_run_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Once each, and with what comes out of the step before."""
    built = counted_builds(monkeypatch)
    engine = DirectEngine(subject("full"), ahead=False)
    options = {"max_tokens": 6, "logit_bias": ENDLESS, **options}
    handle = engine.submit([1, 2, 3], **options)
    while engine.busy:
        engine.round()
        engine.check()
    assert [before is None for before in built] == [True, False, False, False, False]
    check_completion("full", [1, 2, 3], options, handle.result(0))
    assert engine.scheduler._decoding._built is None


def test_a_built_step_is_dropped_where_rows_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody joins, somebody leaves, somebody ends with a token that nobody knew."""
    built = counted_builds(monkeypatch)
    engine = DirectEngine(subject("full"), ahead=False)
    endless = {"max_tokens": 12, "logit_bias": ENDLESS}
    first = engine.submit([1, 2, 3], **endless)
    engine.round()
    engine.round()
    assert engine.scheduler._decoding._built is not None
    second = engine.submit([9, 8], **endless)
    engine.round()  # it joins before the step that would have been without it
    assert [before is None for before in built[-2:]] == [True, False]
    third = engine.submit([4, 4, 2], max_tokens=12, logit_bias={**ENDLESS, 17: 1e9})
    engine.round()
    second.cancel()
    while engine.busy:
        engine.round()
        engine.check()
    assert third.result(0).tokens == [17]
    check_completion("full", [1, 2, 3], endless, first.result(0))
    assert engine.scheduler._decoding._built is None


@pytest.mark.parametrize("kind", ["full", "ring", "kv8", "toy_recurrent"])
def test_the_step_begun_behind_the_end_of_a_text_is_dropped(kind):
    """Nobody is given its token, nobody counts it, and whoever sits there next never sees it."""
    engine = DirectEngine(subject(kind))
    options = {"max_tokens": 12, "logit_bias": {**ENDLESS, 17: 1e9}}  # ends with its first token
    short = engine.submit([9, 8], **options)
    long = engine.submit([4, 4, 2], max_tokens=9, logit_bias=ENDLESS)
    while engine.busy:
        engine.round()
        engine.check()
    assert short.result(0).tokens == [17]
    check_completion(kind, [4, 4, 2], {"max_tokens": 9, "logit_bias": ENDLESS}, long.result(0))
    assert engine.stats.generated_tokens == 10


def test_a_text_that_ends_late_leaves_a_sound_row_behind():
    """Its row was written once more; what is kept of it serves the next prompt all the same."""
    engine = DirectEngine(Subject(subject("full").model, ends=range(0, 96, 3)))
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 18, 19]]
    handles = [engine.submit(prompt, max_tokens=20) for prompt in prompts]
    while engine.busy:
        engine.round()
        engine.check()
    for prompt, handle in zip(prompts, handles, strict=True):
        done = handle.result(0)
        assert done.finish_reason == "stop"
        again = engine.submit([*prompt, *done.tokens, 1], max_tokens=1)
        fresh = DirectEngine(Subject(subject("full").model, ends=range(0, 96, 3)))
        alone = fresh.submit([*prompt, *done.tokens, 1], max_tokens=1)
        for one in (engine, fresh):
            while one.busy:
                one.round()
        assert again.result(0).reused_tokens >= len(prompt)
        assert again.result(0).tokens == alone.result(0).tokens


def test_penalties_wait_for_tokens_only_when_rows_change(monkeypatch):
    """Histories are made of tokens that are known; as long as rows stay, the device has them."""
    begun: list[bool] = []
    launch = Decoding._launch

    def watch(self: Decoding, before: Any) -> Any:
        flight = launch(self, before)
        if before is not None:
            begun.append(flight is not None)
        return flight

    monkeypatch.setattr(Decoding, "_launch", watch)
    engine = DirectEngine(subject("full"))
    options = {"logit_bias": ENDLESS, "repetition_penalty": 1.3}
    engine.submit([1, 2, 3], max_tokens=10, **options)
    engine.submit([4, 5, 6], max_tokens=5, **options)
    while engine.busy:
        engine.round()
        engine.check()
    assert begun.count(False) <= 3  # where the short one leaves, and behind the last of all
    assert begun.count(True) >= 6


def test_steps_ahead_write_in_place():
    plan = BucketPlan(batch=[1], tokens=[4], capacity=[16384])
    engine = DirectEngine(Subject(make_model("float32")), plan)
    engine.submit([1, 2, 3], max_tokens=40, logit_bias=ENDLESS)
    for _ in range(4):
        engine.round()
    state = engine.scheduler._running.state
    assert state is not None
    size = sum(array.nbytes for array in state.values())
    del state
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(20):
        engine.round()
    assert mx.get_peak_memory() - before < size / 2
    while engine.busy:
        engine.round()


def test_steps_go_ahead_of_a_text_that_nothing_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked about less and less often; from the first guess on, after every step again."""
    plan = BucketPlan(batch=[1], tokens=[4, 8], capacity=[96])
    prompt, options = [1, 2, 3], {"max_tokens": 60, "logit_bias": ENDLESS}
    alone = DirectEngine(subject("full"), plan)
    wanted = alone.submit(prompt, **options)
    alone.run()
    plain, asked = wanted.result(0).tokens, []

    def guess(self: NgramDrafter, wanted: Any) -> dict[Any, list[int]]:
        ((request, most),) = wanted.items()
        done = len(request.sequence) - len(prompt)
        asked.append(done)
        return {request: plain[done : done + most]} if done > 40 else {}

    monkeypatch.setattr(NgramDrafter, "guess", guess)
    engine = DirectEngine(subject("full"), plan, speculate="ngram")
    handle, ahead = engine.submit(prompt, **options), []
    while engine.busy:
        engine.round()
        engine.check()
        ahead.append(bool(flying(engine)))
    assert handle.result(0).tokens == plain
    assert asked[:7] == [1, 3, 7, 15, 24, 33, 42]
    assert sum(ahead) == 41 - 6  # of the steps until then those that no question came before
    assert engine.stats.accepted_tokens == 60 - 42 - len(asked[6:])


def test_drafts_that_read_are_asked_at_every_step() -> None:
    """A long prompt is read piece by piece, at each step one: pauses would delay all guesses."""
    engine = DirectEngine(subject("full"), speculate=draft("full", 0.0))
    handle = engine.submit(random_tokens(30, 1), max_tokens=12, logit_bias=ENDLESS)
    while engine.busy:
        engine.round()
        engine.check()
        assert not flying(engine)
    assert len(handle.result(0).tokens) == 12


@pytest.mark.parametrize("kind", ["full", "kv8"])
def test_rows_that_move_while_a_step_is_under_way(kind):
    """A long prompt joins: more slots, and the row of a text that has ended is closed up."""
    engine = DirectEngine(subject(kind))
    wishes = {
        "ends": ([1], 2),
        "stays": ([2, 3], 20),
        "joins": (random_tokens(26, 1), 4),
    }
    handles = {}

    def ask(name: str) -> None:
        prompt, count = wishes[name]
        handles[name] = engine.submit(prompt, max_tokens=count, logit_bias=ENDLESS)

    ask("ends")
    ask("stays")
    while not handles["ends"].done():
        engine.round()
    assert list(engine.running) == [1]
    assert flying(engine)
    ask("joins")
    while engine.busy:
        engine.round()
        engine.check()
    for name, (prompt, count) in wishes.items():
        options = {"max_tokens": count, "logit_bias": ENDLESS}
        check_completion(kind, prompt, options, handles[name].result(0))


@pytest.mark.parametrize("count", range(4, 9))  # ends before rows move, while they do, and after
def test_a_text_that_ends_in_a_step_begun_before_rows_moved(count):
    """It leaves the row where it sits by then, not the one where it sat when the step began."""
    engine = DirectEngine(subject("full"))
    wishes = [([1], 2), ([2, 3], count), ([4, 5], 14), (random_tokens(26, 1), 4)]
    options = [{"max_tokens": count, "logit_bias": ENDLESS} for _, count in wishes]
    handles = [
        engine.submit(prompt, **given) for (prompt, _), given in zip(wishes, options, strict=True)
    ]
    while engine.busy:
        engine.round()
        engine.check()
        assert not any(request.finished for request in engine.running.values())
    for (prompt, _), given, handle in zip(wishes, options, handles, strict=True):
        check_completion("full", prompt, given, handle.result(0))
