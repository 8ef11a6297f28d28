"""Handles in event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from functools import cache as memo
from typing import Any

from funcrt import Engine
from funcrt.engine import Chunk, Handle
from tests.engine.gates import Gate, wait_for_mail
from tests.engine.harness import PLAN
from tests.helpers import generate_plain, make_model, random_tokens

import pytest

MODEL = make_model()
PROMPTS = [random_tokens(count, count) for count in (5, 1, 12, 8, 14, 2)]


@memo
def alone(index: int, count: int) -> list[int]:
    return generate_plain(MODEL, PROMPTS[index], count)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, PLAN) as made:
        yield made


async def collect(chunks: AsyncIterator[Chunk]) -> list[int]:
    return [chunk.token async for chunk in chunks]


def test_many_are_awaited_and_followed(engine):
    async def work() -> tuple[list[Any], list[list[int]]]:
        handles = [engine.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        followed = [engine.submit(prompt, max_tokens=7) for prompt in PROMPTS]
        done = await asyncio.gather(*handles)
        return done, await asyncio.gather(*(collect(aiter(handle)) for handle in followed))

    completions, tokens = asyncio.run(work())
    assert [c.tokens for c in completions] == [alone(i, 6) for i in range(6)]
    assert tokens == [alone(i, 7) for i in range(6)]


def test_one_handle_has_many_readers(engine):
    async def work() -> list[Any]:
        handle = engine.submit(PROMPTS[2], max_tokens=9)

        async def wait() -> list[int]:
            return (await handle).tokens

        readers = [collect(aiter(handle)), wait(), collect(aiter(handle)), wait()]
        found = await asyncio.gather(*readers)
        again = [await collect(aiter(handle)), (await handle).tokens]  # late
        return [*found, *again, [chunk.token for chunk in handle]]

    assert asyncio.run(work()) == [alone(2, 9)] * 7


def test_the_loop_goes_on_while_it_waits(engine):
    async def work() -> int:
        turns = 0
        task = asyncio.ensure_future(collect(aiter(engine.submit(PROMPTS[0], max_tokens=30))))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert task.result() == alone(0, 30)
        return turns

    assert asyncio.run(work()) > 30


def test_a_timeout_cancels(engine):
    gate = threading.Event()

    async def work() -> Handle:
        held = engine.submit(PROMPTS[0], max_tokens=20, on_chunk=lambda chunk: gate.wait(60))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(held, 0.05)
        gate.set()
        while not held.done():
            await asyncio.sleep(0.01)
        return held

    handle = asyncio.run(work())
    completion = handle.result(0)
    assert completion.finish_reason == "cancelled"
    assert completion.tokens == alone(0, 20)[: len(completion.tokens)]


def test_a_reader_that_leaves_early_cancels_nothing(engine):
    async def work() -> tuple[list[int], list[int]]:
        handle = engine.submit(PROMPTS[0], max_tokens=8)
        first = []
        async for chunk in handle:
            first.append(chunk.token)
            if len(first) == 3:
                break
        return first, (await handle).tokens

    assert asyncio.run(work()) == (alone(0, 8)[:3], alone(0, 8))


def test_a_loop_that_closes_harms_nobody(engine):
    """Nobody waits there any more; the request goes on for whoever has its handle."""
    gate = threading.Event()
    kept: list[Handle] = []

    async def work() -> None:
        kept.append(engine.submit(PROMPTS[0], max_tokens=20, on_chunk=lambda c: gate.wait(60)))
        reader = asyncio.ensure_future(collect(aiter(kept[0])))
        await asyncio.sleep(0.05)
        assert not reader.done()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(work())
    pending = asyncio.all_tasks(loop)
    loop.close()  # with its reader still waiting
    gate.set()
    assert kept[0].result(60).tokens == alone(0, 20)
    assert len(pending) == 1
    for task in pending:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.get_coro().close()  # type: ignore[union-attr]
    assert engine.generate(PROMPTS[1], max_tokens=2)[0].tokens == alone(1, 2)


def test_one_handle_in_two_loops(engine):
    handle = engine.submit(PROMPTS[4], max_tokens=12)
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(asyncio.run(collect(aiter(handle)))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [alone(4, 12)] * 3


def test_what_goes_wrong_is_raised_there_too(engine):
    def fail(chunk: Chunk) -> None:
        raise KeyError("mine")

    async def work() -> None:
        handle = engine.submit(PROMPTS[0], max_tokens=5, on_chunk=fail)
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                await handle
            with pytest.raises(KeyError, match="mine"):
                await collect(aiter(handle))

    asyncio.run(work())


def test_closing_ends_those_who_wait():
    """The engine stands still behind a first chunk until it has been told to close."""

    async def work() -> Any:
        engine = Engine(MODEL, PLAN)
        with Gate() as gate:
            handle = engine.submit(PROMPTS[0], max_tokens=40, on_chunk=gate)
            assert await asyncio.to_thread(gate.reached.wait, 60)
            waiting = engine.submit(PROMPTS[1], max_tokens=40)
            both = asyncio.gather(handle, waiting)
            closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
            await asyncio.to_thread(wait_for_mail, engine, 2)  # the prompt, and the end
        await closing
        return await asyncio.wait_for(both, 60)

    running, waiting = asyncio.run(work())
    assert (running.finish_reason, waiting.finish_reason) == ("cancelled", "cancelled")
    assert 1 <= len(running.tokens) < 40
    assert running.tokens == alone(0, 40)[: len(running.tokens)]
    assert waiting.tokens == []
