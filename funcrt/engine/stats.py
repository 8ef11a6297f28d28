"""What an engine counts, in all and for each call of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from funcrt.buckets import Bucket
from funcrt.engine.calls import Call

import mlx.core as mx


@dataclass
class Stats:
    """Counters of an engine since it was made; `later - earlier` is what happened between.

    Attributes:
        requests: ended ones, however they ended.
        prompt_tokens: computed for prompts; `reused_tokens` were in the cache already.
        prompt_seconds: wall time of prefill calls.
        generated_tokens: handed out.
        decode_tokens: those of them that decode and verify calls gave: all but each first one.
        decode_seconds: wall time of these calls.
        guessed_tokens, accepted_tokens: of speculation.
        steps: calls of the model.
        token_places, token_real: B x T of prefill and verify calls, and how many were real tokens.
        row_places, row_real: B of decode and verify calls, and how many rows were in use.
        slot_places, slot_real: B x S of decode and verify calls, and how many slots were filled.
    """

    requests: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    reused_tokens: int = 0
    generated_tokens: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    token_places: int = 0
    token_real: int = 0
    row_places: int = 0
    row_real: int = 0
    slot_places: int = 0
    slot_real: int = 0

    def __sub__(self, earlier: Stats) -> Stats:
        values: dict[str, Any] = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in fields(self)
        }
        return Stats(**values)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens computed per second of prefill."""
        return _over(self.prompt_tokens, self.prompt_seconds)

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decode and verify calls, all rows together."""
        return _over(self.decode_tokens, self.decode_seconds)

    @property
    def acceptance(self) -> float:
        """Share of guessed tokens that were right."""
        return _over(self.accepted_tokens, self.guessed_tokens)

    @property
    def token_waste(self) -> float:
        """Share of the tokens computed in prefill and verify calls that were padding."""
        return _waste(self.token_real, self.token_places)

    @property
    def row_waste(self) -> float:
        """Share of the rows computed in decode and verify calls that were idle."""
        return _waste(self.row_real, self.row_places)

    @property
    def slot_waste(self) -> float:
        """Share of the cache slots in decode and verify calls that held nothing."""
        return _waste(self.slot_real, self.slot_places)


@dataclass(frozen=True)
class StepReport:
    """One call of the model, as `on_step` gets it.

    Attributes:
        function: "prefill", "decode" or "verify".
        bucket: its shape.
        rows: rows in use, of `bucket.batch`.
        tokens: real tokens among B x T.
        slots: filled slots among B x S, after the call.
        new_tokens: tokens that it gave.
        seconds: wall time.
        waiting: requests that are not admitted yet.
        prefilling: admitted ones whose prompt is not all in the cache.
        running: requests in the running batch.
        traces: made since the engine was, in all.
        memory: bytes that MLX holds.
        prefix_bytes: bytes of kept rows among them.
    """

    function: str
    bucket: Bucket
    rows: int
    tokens: int
    slots: int
    new_tokens: int
    seconds: float
    waiting: int
    prefilling: int
    running: int
    traces: int
    memory: int
    prefix_bytes: int

    @property
    def occupancy(self) -> float:
        """Share of the rows in use."""
        return self.rows / self.bucket.batch

    @property
    def token_waste(self) -> float:
        """Share of the tokens that were padding."""
        return _waste(self.tokens, self.bucket.batch * self.bucket.tokens)

    @property
    def slot_waste(self) -> float:
        """Share of the slots that held nothing."""
        return _waste(self.slots, self.bucket.batch * self.bucket.capacity)

    @property
    def rate(self) -> float:
        """New tokens per second of this call."""
        return _over(self.new_tokens, self.seconds)


OnStep = Callable[[StepReport], None]


class Meter:
    """Counts calls and reports them.

    Args:
        traces: of the functions that are called, a draft model's among them.
        on_step: gets a report of every call; if it raises, this is logged and it gets no more.

    Attributes:
        stats: the counters.
        traces: may get more.
    """

    def __init__(self, traces: Counter[str], on_step: OnStep | None) -> None:
        self.stats = Stats()
        self.traces = [traces]
        self._on_step = on_step
        self._reports: list[StepReport] = []

    def count(self, call: Call, new_tokens: int, **present: int) -> None:
        """Count a call that gave so many tokens; `present` are the fields of the report on now."""
        stats, bucket = self.stats, call.bucket
        slots = sum(request.cached for request in call.rows.values())
        stats.steps += 1
        stats.generated_tokens += new_tokens
        if call.function == "prefill":
            stats.prompt_tokens += call.tokens
            stats.reused_tokens += call.reused
            stats.prompt_seconds += call.seconds
        else:
            stats.decode_tokens += new_tokens
            stats.decode_seconds += call.seconds
            stats.guessed_tokens += call.guessed
            stats.accepted_tokens += call.accepted
            stats.row_places += bucket.batch
            stats.row_real += len(call.rows)
            stats.slot_places += bucket.batch * bucket.capacity
            stats.slot_real += slots
        if call.function != "decode":
            stats.token_places += bucket.batch * bucket.tokens
            stats.token_real += call.tokens
        if self._on_step is not None:
            report = StepReport(
                function=call.function,
                bucket=bucket,
                rows=len(call.rows),
                tokens=call.tokens,
                slots=slots,
                new_tokens=new_tokens,
                seconds=call.seconds,
                traces=sum(traces.total() for traces in self.traces),
                memory=mx.get_active_memory(),
                **present,
            )
            self._reports.append(report)

    def deliver(self) -> None:
        """Call `on_step` with what was counted since."""
        reports, self._reports = self._reports, []
        for report in reports:
            if self._on_step is None:
                return
            try:
                self._on_step(report)
            except BaseException:
                import logging  # slow to import, and seldom needed

                logging.getLogger(__name__).exception("on_step raised; it is not called again")
                self._on_step = None


def _over(count: float, whole: float) -> float:
    return count / whole if whole else 0.0


def _waste(real: int, places: int) -> float:
    return 1 - real / places if places else 0.0
