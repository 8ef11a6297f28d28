"""Engines among threads: many callers, several engines, calls beside them, all kinds of ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache as memo
from pathlib import Path
from typing import Any

from funcrt import Engine
from funcrt.bundle import load_bundle
from funcrt.engine import Chunk, Handle
from funcrt.errors import EngineError
from funcrt.model import Model
from tests.engine.gates import Gate, wait_for_mail, wait_until
from tests.engine.harness import PLAN, check_traces, make_tokenizer, write
from tests.helpers import generate_plain, make_model, random_tokens, relative_error, run_plain

import pytest

MODEL = make_model()
PROMPTS = [random_tokens(count, count) for count in (5, 1, 12, 8, 14, 2, 9, 11)]


@memo
def alone(index: int, count: int, seed: int | None = None) -> list[int]:
    settings = {} if seed is None else {"temperature": 1.0, "seed": seed}
    return generate_plain(MODEL, PROMPTS[index], count, **settings)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(Model(MODEL.config, MODEL.params, make_tokenizer()), PLAN) as made:
        yield made


def hold(engine: Engine, gate: Gate, count: int = 20) -> Handle:
    """A running request, behind whose first chunk the engine stands still."""
    handle = engine.submit(PROMPTS[0], max_tokens=count, on_chunk=gate)
    assert gate.reached.wait(60)
    return handle


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "funcrt-engine"]


# --- many callers ---------------------------------------------------------------------------------


def test_many_threads_submit_at_once(engine):
    start = threading.Barrier(8)

    def work(number: int) -> list[tuple[int, int, int | None, list[int]]]:
        start.wait()
        done = []
        for turn in range(4):
            index, count = (number + turn) % 8, 1 + (number * 3 + turn) % 7
            seed = None if turn % 2 else number
            options: dict[str, Any] = {} if seed is None else {"temperature": 1.0, "seed": seed}
            if turn == 3:
                tokens = [c.token for c in engine.stream(PROMPTS[index], max_tokens=count)]
            elif turn == 2:
                tokens = engine.generate(PROMPTS[index], max_tokens=count, **options)[0].tokens
            else:
                handle = engine.submit(PROMPTS[index], max_tokens=count, **options)
                tokens = handle.result(60).tokens
            done.append((index, count, None if turn == 3 else seed, tokens))
        return done

    before = engine.stats.requests
    with ThreadPoolExecutor(8) as pool:
        results = [item for found in pool.map(work, range(8)) for item in found]
    assert len(results) == 32
    for index, count, seed, tokens in results:
        assert tokens == alone(index, count, seed)
    assert engine.stats.requests - before == 32
    check_traces(engine.compiled)


def test_cancelling_from_other_threads(engine):
    """Half of the requests are cancelled by others, before and after the engine has begun them."""
    with Gate() as gate, ThreadPoolExecutor(4) as pool:
        held = hold(engine, gate)
        early = [engine.submit(PROMPTS[i % 8], max_tokens=9) for i in range(20)]
        list(pool.map(Handle.cancel, early[::2]))
    for i, handle in enumerate(early):
        completion = handle.result(60)
        assert completion.finish_reason == ("length" if i % 2 else "cancelled")
        assert completion.tokens == (alone(i % 8, 9) if i % 2 else [])
    assert held.result(60).tokens == alone(0, 20)
    with Gate() as before, Gate() as gate, ThreadPoolExecutor(4) as pool:
        late = [hold(engine, before)]
        late.append(engine.submit(PROMPTS[3], max_tokens=20, on_chunk=gate))
        before.__exit__()
        assert gate.reached.wait(60)  # both are running
        list(pool.map(Handle.cancel, late))
    for index, handle in zip((0, 3), late, strict=True):
        completion = handle.result(60)
        assert completion.finish_reason == "cancelled"
        assert 1 <= len(completion.tokens) < 20
        assert completion.tokens == alone(index, 20)[: len(completion.tokens)]
    late[0].cancel()  # it has ended: nothing happens
    assert engine.generate(PROMPTS[1], max_tokens=2)[0].tokens == alone(1, 2)


# --- handles --------------------------------------------------------------------------------------


def test_a_handle_is_read_at_once_late_and_twice(engine):
    handle = engine.submit(PROMPTS[2], max_tokens=6)
    first = [chunk.token for chunk in handle]
    assert handle.result(0).tokens == first == alone(2, 6)
    assert [chunk.token for chunk in handle] == first
    pair = list(zip(handle, handle, strict=True))  # two readers
    assert [a.token for a, _ in pair] == [b.token for _, b in pair] == first
    assert handle.done()
    assert "length, 6 tokens" in repr(handle)


def test_waiting_ends_after_a_timeout_and_the_request_goes_on(engine):
    with Gate() as gate:
        handle = hold(engine, gate, 5)
        for timeout in (0, 0.05, -1):
            with pytest.raises(TimeoutError, match="it goes on"):
                handle.result(timeout)
        assert not handle.done()
        assert "running" in repr(handle)
    assert handle.result(60).tokens == alone(0, 5)


def test_a_waiting_request_is_cancelled_before_it_begins(engine):
    with Gate() as gate:
        handle = hold(engine, gate, 5)
        waiting = engine.submit(PROMPTS[3], max_tokens=5)
        engine.cancel(waiting)
        assert not waiting.done()
    completion = waiting.result(60)
    assert (completion.tokens, completion.text) == ([], "")
    assert completion.finish_reason == "cancelled"
    assert completion.prompt_tokens == len(PROMPTS[3])
    (chunk,) = waiting
    assert (chunk.token, chunk.finish_reason) == (-1, "cancelled")
    assert handle.result(60).tokens == alone(0, 5)


# --- ends -----------------------------------------------------------------------------------------


def test_closing_cancels_what_is_under_way():
    model = Model(MODEL.config, MODEL.params, make_tokenizer())
    with Engine(model, PLAN) as engine, Gate() as gate:
        running = hold(engine, gate, 30)
        waiting = [engine.submit(PROMPTS[i], max_tokens=30) for i in range(1, 8)]
        closer = threading.Thread(target=engine.close)
        closer.start()
        gate.__exit__()
        closer.join(60)
        assert not closer.is_alive()
    for handle in [running, *waiting]:
        assert handle.done()
        assert handle.result(0).finish_reason == "cancelled"
    completion = running.result(0)
    assert 1 <= len(completion.tokens) < 30
    assert completion.tokens == alone(0, 30)[: len(completion.tokens)]
    assert completion.text == write(completion.tokens)
    for call in (engine.submit, engine.generate):
        with pytest.raises(EngineError, match="closed"):
            call(PROMPTS[0])
    with pytest.raises(EngineError, match="closed"):
        list(engine.stream(PROMPTS[0]))
    engine.close()
    running.cancel()
    assert engine.stats.requests == 8


def test_an_engine_may_be_closed_unused_and_by_its_own_callback():
    Engine(MODEL, PLAN).close()
    before = set(engine_threads())
    engine = Engine(MODEL, PLAN)
    handle = engine.submit(PROMPTS[0], max_tokens=30, on_chunk=lambda chunk: engine.close())
    assert handle.result(60).finish_reason == "cancelled"
    wait_until(lambda: set(engine_threads()) <= before)


def test_generate_is_interrupted_by_closing():
    engine = Engine(MODEL, PLAN)
    with Gate() as gate, ThreadPoolExecutor(2) as pool:
        held = hold(engine, gate, 30)
        found = pool.submit(engine.generate, PROMPTS[:4], max_tokens=30)
        wait_for_mail(engine, 4)
        closed = pool.submit(engine.close)
        wait_for_mail(engine, 5)
        gate.__exit__()
        closed.result(60)
        assert held.result(60).finish_reason == "cancelled"
        assert [c.finish_reason for c in found.result(60)] == ["cancelled"] * 4
        assert [c.tokens for c in found.result(60)] == [[]] * 4


def test_a_handle_keeps_its_engine():
    handle = Engine(MODEL, PLAN).submit(PROMPTS[2], max_tokens=12)
    gc.collect()
    assert handle.result(60).tokens == alone(2, 12)


def test_engines_that_nobody_holds_end_their_threads():
    before = set(engine_threads())
    engine = Engine(MODEL, PLAN)
    handle = engine.submit(PROMPTS[2], max_tokens=3, speculate="ngram")
    handle.result(60)
    alive = weakref.ref(engine)
    del engine, handle
    wait_until(lambda: (gc.collect(), alive() is None)[1])
    wait_until(lambda: set(engine_threads()) <= before)


def test_ended_requests_are_let_go_while_others_run(engine):
    """What callers let go of is not kept by an engine that never rests."""
    stop = threading.Event()

    def slow(chunk: Chunk) -> None:
        if not stop.is_set():
            time.sleep(0.2)

    busy = engine.submit([1], max_tokens=40, on_chunk=slow)
    handle = engine.submit(PROMPTS[3], max_tokens=2)
    handle.result(60)
    alive = weakref.ref(handle)
    del handle
    wait_until(lambda: (gc.collect(), alive() is None)[1], 5)
    assert not busy.done()
    stop.set()
    busy.cancel()
    busy.result(60)


# --- bundles, which share one stream --------------------------------------------------------------


def test_two_engines_over_one_bundle_and_calls_beside_them(bundle):
    """Imported graphs run on one stream of the process, whoever calls them."""
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 13]
    expected = [generate_plain(MODEL, prompt, 10) for prompt in prompts]
    logits = [run_plain(MODEL, prompt)[0] for prompt in prompts]
    with Engine(bundle) as first, Engine(bundle) as second:
        for _ in range(3):
            handles = [e.submit(p, max_tokens=10) for p in prompts for e in (first, second)]
            for prompt, reference in zip(prompts, logits, strict=True):
                assert relative_error(bundle([prompt])[0][0], reference) < 2e-5
            for i, handle in enumerate(handles):
                assert handle.result(60).tokens == expected[i // 2]
        with ThreadPoolExecutor(4) as pool:
            rows = pool.map(lambda p: first.generate(p, max_tokens=10)[0].tokens, prompts)
            for prompt, reference in zip(prompts, logits, strict=True):
                assert relative_error(bundle([prompt])[0][0], reference) < 2e-5
            assert list(rows) == expected
        check_traces(first.compiled)


def test_a_bundle_drafts_for_a_model_and_is_called_beside_it(bundle):
    logits = [run_plain(MODEL, prompt)[0] for prompt in PROMPTS[:4]]
    plan = bundle.plan
    with Engine(MODEL, plan) as engine:
        for turn in range(6):
            speculate = bundle if turn else None
            handles = [
                engine.submit(PROMPTS[i], max_tokens=12, speculate=speculate) for i in range(4)
            ]
            for prompt, reference in zip(PROMPTS, logits, strict=False):
                assert relative_error(bundle([prompt])[0][0], reference) < 2e-5
            for i, handle in enumerate(handles):
                assert handle.result(60).tokens == alone(i, 12)
        assert engine.stats.acceptance > 0.9


def test_a_draft_bundle_has_a_plan_of_its_own(bundle):
    with Engine(MODEL, PLAN, speculate=bundle) as engine:
        found = engine.generate(PROMPTS[:4], max_tokens=12)
        assert [c.tokens for c in found] == [alone(i, 12) for i in range(4)]
        assert engine.stats.accepted_tokens > 0


# --- other processes ------------------------------------------------------------------------------

LEAVE = """
import sys, threading
from funcrt import Engine
from funcrt.bundle import load_bundle
how = sys.argv[2]
engine = Engine(load_bundle(sys.argv[1]))
begun = threading.Event()
handles = [engine.submit([3, 1, 4], max_tokens=25, on_chunk=lambda chunk: begun.set())]
handles += [engine.submit([1, i], max_tokens=25, temperature=1.0, seed=i) for i in range(5)]
begun.wait(60)
if how == "other thread":
    threading.Thread(target=engine.generate, args=([[5, 6]] * 3,), daemon=True).start()
elif how == "forgotten":
    del engine, handles
elif how == "raise":
    sys.exit(0)
"""


def leave(folder: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, str(folder), how],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), how


@pytest.mark.parametrize("how", ["plain", "forgotten"])
def test_a_process_may_end_with_work_under_way(bundle_folder, how):
    leave(bundle_folder, how)


@pytest.mark.long
@pytest.mark.parametrize("how", ["plain", "forgotten", "other thread", "raise"])
def test_processes_end_quietly_twenty_times(bundle_folder, how):
    for _ in range(20):
        leave(bundle_folder, how)


def test_a_bundle_engine_in_a_fresh_thread(bundle_folder):
    """The thread that loads is not the one that runs."""
    found: list[list[int]] = []

    def work() -> None:
        with Engine(load_bundle(bundle_folder)) as engine:
            found.extend(c.tokens for c in engine.generate(PROMPTS[:3], max_tokens=6))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert found == [alone(i, 6) for i in range(3)]


def test_submitting_while_it_closes():
    """Whoever got a handle gets an end; whoever comes later is told."""
    for pause in (0.0, 0.02, 0.1):
        engine = Engine(MODEL, PLAN)
        handles: list[Handle] = []
        refused = threading.Barrier(5)

        def submit(engine: Engine, handles: list[Handle], refused: threading.Barrier) -> None:
            while True:
                try:
                    handles.append(engine.submit(PROMPTS[1], max_tokens=5))
                except EngineError:
                    refused.wait(60)
                    return
                time.sleep(0.001)

        threads = [
            threading.Thread(target=submit, args=(engine, handles, refused)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        time.sleep(pause)
        engine.close()
        refused.wait(60)
        for thread in threads:
            thread.join(60)
        for handle in handles:
            completion = handle.result(0)
            assert completion.tokens == alone(1, 5)[: len(completion.tokens)]
            assert completion.finish_reason in ("length", "cancelled")
