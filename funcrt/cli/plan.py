"""`funcrt plan`: which shapes to export for requests like those of a log."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from funcrt.buckets import BucketPlan
from funcrt.cli import options as o
from funcrt.cli import sources, terminal
from funcrt.errors import InputError

import typer

if TYPE_CHECKING:
    from funcrt.expectation import Expectation
    from funcrt.footprint import Footprint
    from funcrt.planning import Request

_STAND_IN = "the caches of a 1B llama in bfloat16 (name yours with --model)"
_NAMED = 5  # bad lines that an error message names


@o.spread
def plan(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="JSON lines with token counts, or - for input.")
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help=f"Model or bundle to plan for; else {_STAND_IN}."),
    ] = None,
    memory: o.Memory = None,
    batches: Annotated[int, typer.Option(min=1, help="How many batch sizes at most.")] = 5,
    chunks: Annotated[int, typer.Option(min=1, help="How many sizes of --tokens at most.")] = 4,
    capacities: Annotated[int, typer.Option(min=1, help="How many capacities at most.")] = 3,
    max_batch: Annotated[int, typer.Option(min=1, help="Largest batch.")] = 64,
    max_chunk: Annotated[int, typer.Option(min=1, help="Most tokens per call.")] = 512,
    kv_bits: o.KvBits = None,
    loading: o.Loading,
    json_: o.Json = False,
) -> None:
    """Choose --batch, --tokens and --capacity for requests like those in TRACE.

    Each line is one request: {"prompt_tokens": 20, "completion_tokens": 50}, the same within
    "usage" as OpenAI's servers answer, a result line of `funcrt batch`, or [20, 50].
    """
    from funcrt.expectation import expect
    from funcrt.footprint import stand_in

    budget = None if memory is None else o.byte_count(memory)
    if kv_bits not in (None, 4, 8):
        raise typer.BadParameter(f"--kv-bits: expected 4 or 8, got {kv_bits}")
    if kv_bits is not None and model is None:
        raise typer.BadParameter("--kv-bits needs --model")
    with _open(trace) as lines:
        requests, failed = read_trace(lines)
    footprint, positions = stand_in(), None
    if model is not None:
        longest = max(request.slots for request in requests)
        largest = BucketPlan(batch=[1], tokens=[max_chunk], capacity=[longest])
        footprint, positions = _measure(model, loading, kv_bits, largest)
    known = None if model is None else footprint
    chosen = BucketPlan.from_trace(
        requests, budget, footprint=known, max_batches=batches, max_chunks=chunks,
        max_capacities=capacities, max_batch=max_batch, max_chunk=max_chunk,
    )  # fmt: skip
    expected = expect(chosen, requests, footprint)
    if failed:
        terminal.warn(f"lines that report an error, passed over: {failed}")
    if positions is not None and (beyond := sum(r.slots - 1 > positions for r in requests)):
        terminal.warn(f"requests beyond the {positions} positions of the model: {beyond}")
    if json_:
        terminal.emit(_facts(chosen, expected, footprint, model, failed), json_, "")
    else:
        _show(chosen, expected, footprint, model or _STAND_IN)


def read_trace(lines: Iterable[bytes]) -> tuple[list[Request], int]:
    """Requests of a trace, and the number of lines that report an error instead.

    Raises InputError naming the lines that are neither, or if there is no request.
    """
    requests: list[Request] = []
    failed, bad, first = 0, [], ""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _read_line(f"line {number}", line)
        except InputError as error:
            bad.append(number)
            first = first or str(error)
        else:
            failed += request is None
            if request is not None:
                requests.append(request)
    if bad:
        others = ", ".join(map(str, bad[1:_NAMED]))
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise InputError(first + (f"; also bad: lines {others}{more}" if others else ""))
    if not requests:
        raise InputError("the trace has no request: expected lines with token counts")
    return requests, failed


def _read_line(where: str, line: bytes) -> Request | None:
    """The request of one line; None where it reports an error."""
    from funcrt.planning import check_pair

    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from None
    if isinstance(entry, list):
        return check_pair(where, entry)
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected an object or a pair of numbers, got {entry!r:.60}")
    counts = _counts(entry)
    if counts is not None:
        return check_pair(where, counts)
    if entry.get("error") is not None:
        return None
    raise InputError(f"{where}: expected prompt_tokens and completion_tokens, got {_named(entry)}")


def _counts(entry: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """(prompt tokens, new tokens), unchecked; None if they are not there."""
    usage = entry.get("usage")
    for place in (entry, usage if isinstance(usage, dict) else {}):
        new, tokens = place.get("completion_tokens"), place.get("tokens")
        if new is None and isinstance(tokens, list):
            new = len(tokens)
        if "prompt_tokens" in place and new is not None:
            return place["prompt_tokens"], new
    return None


def _named(entry: Mapping[str, Any]) -> str:
    listed = ", ".join(list(entry)[:6]) or "nothing"
    return listed[:80]


@contextmanager
def _open(trace: str) -> Iterator[BinaryIO]:
    if trace == "-":
        yield sys.stdin.buffer
        return
    with Path(trace).open("rb") as file:
        yield file


def _measure(
    source: str, loading: o.Loading, kv_bits: int | None, largest: BucketPlan
) -> tuple[Footprint, int]:
    """The footprint of a bundle, or of what an export makes of a model; the model's positions."""
    from funcrt.footprint import Footprint

    folder = sources.find_bundle(source)
    if folder is not None:
        from funcrt.bundle.loader import open_bundle

        if kv_bits is not None or loading.dtype is not None:
            raise InputError("--kv-bits and --dtype are fixed when a bundle is exported")
        bundle = open_bundle(folder)  # its weights stay on disk
        return Footprint.of(bundle, bundle.cache_spec), bundle.max_positions
    with terminal.timed(f"Loading {source}"):
        model = sources.load_checkpoint(source, loading.dtype, loading.ignore)
    spec = model.cache_spec(model.choose_layout(largest, kv_bits))
    # A bundle does not keep weights as stored beside those that run.
    return replace(Footprint.of(model, spec), stored=0), model.config.max_positions


def _options(chosen: BucketPlan) -> str:
    return " ".join(
        f"--{name} {','.join(map(str, getattr(chosen, name)))}"
        for name in ("batch", "tokens", "capacity")
    )


def _facts(
    chosen: BucketPlan, expected: Expectation, footprint: Footprint, model: str | None, failed: int
) -> dict[str, Any]:
    memory = [{"batch": b, "capacity": s, "bytes": n} for (b, s), n in expected.memory.items()]
    return {
        **asdict(chosen),
        "options": _options(chosen),
        "model": model,
        "failed": failed,
        **asdict(expected),
        "wasted": {
            "tokens": expected.wasted_tokens,
            "slots": expected.wasted_slots,
            "rows": expected.wasted_rows,
        },
        "memory": memory,
        "weights": footprint.weights,
    }


def _show(chosen: BucketPlan, expected: Expectation, footprint: Footprint, model: str) -> None:
    terminal.show(_options(chosen))
    terminal.table(
        f"{expected.requests} requests, all there from the start",
        ("", "needed", "taken", "wasted"),
        [
            ("tokens of prompts", *_shares(expected.prompt_tokens, expected.prefill_tokens)),
            ("cache slots", *_shares(expected.slots, expected.reserved_slots)),
            ("rows of decoding steps", *_shares(expected.new_tokens, expected.decode_rows)),
        ],
    )
    terminal.table(
        f"Memory for {model}: {terminal.size(footprint.weights)} of weights, and with them",
        ("batch", *(f"capacity {capacity}" for capacity in chosen.capacity)),
        [
            (str(b), *(terminal.size(expected.memory[b, s]) for s in chosen.capacity))
            for b in chosen.batch
        ],
    )
    terminal.show(
        f"{expected.prefill_calls} calls of prompts, {expected.decode_calls} of decoding; "
        f"{expected.functions} functions to export"
    )


def _shares(needed: int, taken: int) -> tuple[str, str, str]:
    return f"{needed:,}", f"{taken:,}", f"{(taken - needed) / taken:.1%}"
