"""What a CUDA GPU does while the engine serves ragged requests: its kernels, and its pauses.

    python -m benchmarks.tracing llama-8b:bfloat16 --plan '{"batch": [...], ...}' --prompts '[16]'
    python -m benchmarks.tracing llama-1b:bfloat16 --plan ... --steps '[100, 8000]'

torch's profiler listens to the driver and so sees MLX's kernels, too; nothing else of torch is
used. Requests are served three times: to make all kernels, without the tracer, and with it. So are
greedy steps of one row that begin where it holds so many tokens, of which there is one such result
for each number, with `step_ms` and `traced_ms` instead of the first three. Prints JSON:

| | |
|---|---|
| served_s, traced_s | seconds that the requests took, without and with the tracer |
| calls | of the model by function and shape: how many, and ms from one report to the next |
| busy_ms | in which at least one kernel or copy ran |
| pauses | times in which none did, by length: how many and ms in all |
| between | those of at least 50 us, by what ran before and after: what the host did meanwhile |
| kernels | those that took longest: how many, and ms in all |
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

SHOWN = 25
_LONG_US = 50.0
PAUSES_US = (5, 20, 100, 500, 2000)
_WARM_UP_S = 10.0  # the tracer begins to listen in a thread of its own


class Event(NamedTuple):
    """A kernel or a copy, times in us."""

    name: str
    begin: float
    end: float


def trace(source: str, plan: Mapping[str, Sequence[int]], rounds: Any, new: int) -> dict[str, Any]:
    """Serve three rounds of prompts.

    Args:
        source: of the weights, see `benchmarks.weights`.
        plan: the declared buckets.
        rounds: prompts that arrive together, three times.
        new: tokens that each gets.
    """
    import funcrt
    from benchmarks import weights

    calls: list[tuple[str, float]] = []

    def on_step(report: funcrt.StepReport) -> None:
        bucket = report.bucket
        shape = f"{bucket.batch}x{bucket.tokens}, {bucket.capacity} slots"
        calls.append((f"{report.function} {shape}", time.perf_counter()))

    engine = funcrt.Engine(weights.make_model(source), funcrt.BucketPlan(**plan), on_step=on_step)

    def serve(prompts: Any) -> float:
        calls.clear()
        begin = time.perf_counter()
        for _ in engine.stream(prompts, max_tokens=new):
            pass
        return time.perf_counter() - begin

    warm, plain, traced = rounds
    serve(warm)
    seconds = serve(plain)
    steps = summarize_calls(calls)
    traced_seconds, events = listen(lambda: serve(traced))
    return {
        "served_s": seconds,
        "traced_s": traced_seconds,
        "calls": steps,
        **summarize_events(events),
    }


def trace_steps(
    source: str, plan: Mapping[str, Sequence[int]], lengths: Sequence[int], count: int
) -> dict[str, Any]:
    """Decode steps of one row in the bucket of a plan, by how many tokens it holds.

    Args:
        source: of the weights, see `benchmarks.weights`.
        plan: of one bucket.
        lengths: tokens that are held at the first step, whatever they are.
        count: steps.
    """
    import funcrt
    from benchmarks import weights

    import mlx.core as mx

    compiled = weights.make_model(source).compiled(funcrt.BucketPlan(**plan))
    active = mx.ones((1,), mx.bool_)

    def decode(length: int) -> float:
        state = compiled.init_cache(1, max(plan["capacity"]))
        state["lengths"] = mx.full((1,), length, mx.int32)
        token = mx.ones((1,), mx.int32)
        mx.eval(state, token)
        begin = time.perf_counter()
        for _ in range(count):  # each begins before the token of the last one is waited for
            sampled, state = compiled.decode_greedy(token, active, state)
            mx.async_eval(sampled.tokens, state)
            mx.eval(token)
            token = sampled.tokens
        mx.eval(token)
        return time.perf_counter() - begin

    found = {}
    for length in lengths:
        decode(length)
        seconds = decode(length)
        traced_seconds, events = listen(lambda at=length: decode(at))  # type: ignore[misc]
        found[str(length)] = {
            "step_ms": 1000 * seconds / count,
            "traced_ms": None if traced_seconds is None else 1000 * traced_seconds / count,
            **summarize_events(events),
        }
    return found


def listen(serve: Callable[[], float]) -> tuple[float | None, list[Event]]:
    """What `serve` returns, and the kernels and copies of the GPU meanwhile.

    (None, []) where torch is not installed, no events where there is no CUDA GPU.
    """
    try:
        import torch
    except ImportError:
        return None, []
    import mlx.core as mx

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    time.sleep(_WARM_UP_S if torch.cuda.is_available() else 0)
    mx.eval(mx.zeros(8) + 1)
    seconds = serve()
    mx.synchronize()
    profiler.stop()
    events = [
        Event(str(event.name), float(event.time_range.start), float(event.time_range.end))
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    last = max((event.end for event in events), default=0.0)
    return seconds, [event for event in events if event.begin >= last - 1e6 * seconds]


def summarize_calls(calls: Sequence[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Calls by their shapes; the first one has nothing to be measured from."""
    times: dict[str, list[float]] = {}
    for (_, before), (name, at) in pairwise(calls):
        times.setdefault(name, []).append(1000 * (at - before))
    return {
        name: {"count": len(each), "ms": statistics.median(each), "ms_in_all": sum(each)}
        for name, each in sorted(times.items())
    }


def summarize_events(events: Sequence[Event]) -> dict[str, Any]:
    """Where the time of one device went, and the time between."""
    ordered = sorted(events, key=lambda event: event.begin)
    busy, pauses, before = 0.0, [], ""
    between: dict[str, list[float]] = {}
    first = until = ordered[0].begin if ordered else 0.0
    for name, begin, end in ordered:
        if begin > until:
            pauses.append(begin - until)
            if begin - until >= _LONG_US:
                sides = f"{shorten(before)} -> {shorten(name)}"
                between.setdefault(sides, []).append(begin - until)
        busy += max(0.0, end - max(begin, until))
        if end > until:
            until, before = end, name
    by_name: dict[str, list[float]] = {}
    for name, begin, end in events:
        by_name.setdefault(shorten(name), []).append(end - begin)
    return {
        "span_ms": (until - first) / 1000,
        "busy_ms": busy / 1000,
        "events": len(events),
        "pauses": group(pauses),
        "between": _add_up(_find_longest(between)),
        "kernels": _add_up(_find_longest(by_name)),
    }


def group(pauses: Iterable[float]) -> dict[str, dict[str, float]]:
    """Pauses in us by length."""
    found: dict[str, list[float]] = {}
    for pause in pauses:
        limit = next((limit for limit in PAUSES_US if pause < limit), None)
        name = f"from {PAUSES_US[-1]} us" if limit is None else f"below {limit} us"
        found.setdefault(name, []).append(pause)
    return _add_up(sorted(found.items()))


def _find_longest(groups: Mapping[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(groups.items(), key=lambda item: -sum(item[1]))[:SHOWN]


def _add_up(groups: Iterable[tuple[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {name: {"count": len(each), "ms": sum(each) / 1000} for name, each in groups}


def shorten(name: str) -> str:
    """A kernel's name without its parameters and most of its template's arguments."""
    plain = re.sub(r"\(.*\)$", "", name.removeprefix("void "))
    return plain if len(plain) <= 96 else f"{plain[:93]}..."


def main() -> None:
    """Read what to serve from the arguments, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("source")
    parser.add_argument("--plan", type=json.loads, required=True, help="buckets as JSON")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompts", type=json.loads, help="lengths as JSON")
    what.add_argument("--steps", type=json.loads, help="tokens that a row holds, as JSON")
    parser.add_argument("--new", type=int, default=128, help="tokens of each")
    options = parser.parse_args()
    if options.steps:
        found = trace_steps(options.source, options.plan, options.steps, options.new)
    else:
        from benchmarks.prompts import draw
        from benchmarks.weights import SHAPES

        vocab = int(SHAPES[options.source.partition(":")[0]]["vocab_size"])
        rounds = draw(options.prompts, 3, vocab)
        found = trace(options.source, options.plan, rounds, options.new)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
