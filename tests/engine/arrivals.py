"""Prompts that reach a threaded engine after so many of its steps, however fast the machine is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from funcrt import BucketPlan, Engine
from funcrt.calling import CallForm
from funcrt.compiled import Compiled
from funcrt.engine import Handle, StepReport


class Served(NamedTuple):
    """New tokens by prompt, what every step reported, and what ran them."""

    tokens: list[list[int]]
    reports: list[StepReport]
    compiled: Compiled


def serve(
    model: CallForm,
    plan: BucketPlan | None,
    prompts: Sequence[Sequence[int]],
    pauses: Sequence[int],
    max_tokens: int,
) -> Served:
    """Complete prompts, each submitted `pauses` calls of the model after the one before it.

    The engine's thread submits all but the first one, between its steps, so that the schedule is
    always the same. An engine that has nothing left to do gets the next prompt at once.
    """
    handles: list[Handle] = []
    reports: list[StepReport] = []
    first, last = threading.Event(), threading.Event()
    due = list(pauses)

    def watch(report: StepReport) -> None:
        reports.append(report)
        assert first.wait(60)
        is_idle = not (report.running or report.prefilling or report.waiting)
        if len(handles) == len(prompts):
            return
        due[len(handles)] -= 1
        while len(handles) < len(prompts) and (is_idle or due[len(handles)] <= 0):
            is_idle = False
            handles.append(engine.submit(prompts[len(handles)], max_tokens=max_tokens))
        if len(handles) == len(prompts):
            last.set()

    with Engine(model, plan, on_step=watch) as engine:
        handles.append(engine.submit(prompts[0], max_tokens=max_tokens))
        first.set()
        assert last.wait(900)
        tokens = [handle.result(900).tokens for handle in handles]
        return Served(tokens, reports, engine.compiled)
