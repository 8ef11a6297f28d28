"""Steps stay as long, states and graphs as large, and traces as few as they are said to be."""

from __future__ import annotations

import json

from benchmarks import counters

import mlx.core as mx
import pytest

COMMITTED = json.loads(counters.FILE.read_text("utf-8"))


def test_every_kind_is_counted() -> None:
    assert list(COMMITTED) == counters.kinds()


@pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="the committed graphs are those of a CPU"
)
@pytest.mark.parametrize("kind", counters.kinds())
def test_counters_are_the_committed_ones(kind: str) -> None:
    assert counters.count(kind) == COMMITTED[kind], (
        f"{kind}: if the change is meant, run `{counters.COMMAND}` and commit {counters.FILE.name}"
    )


def test_values_and_idle_rows_trace_nothing() -> None:
    assert {kind: found["traces"] for kind, found in COMMITTED.items()} == dict.fromkeys(
        counters.kinds(), 3
    )
