"""From a line of `funcrt batch` to a request, and from its completion to a result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from funcrt.cli import jobs, sources
from funcrt.cli.options import Generation
from funcrt.errors import EngineError, FuncrtError, InputError

if TYPE_CHECKING:
    from funcrt.engine import Completion, Engine, Handle

_DIGITS = 6  # of log-probabilities, about what float32 logits mean


@dataclass
class Started:
    """A line under way, or one that failed before it began."""

    index: int
    digest: str
    facts: dict[str, Any]
    handle: Handle | None = None
    tokens: int = 0
    logprobs: bool = False

    @property
    def is_done(self) -> bool:
        """Whether `Asker.finish` returns at once."""
        return self.handle is None or self.handle.done()


@dataclass
class Asker:
    """Turns lines into requests, and their completions into facts."""

    engine: Engine
    generation: Generation
    raw: bool
    system_prompt: str | None

    def start(self, index: int, digest: str, line: bytes) -> Started:
        """Submit what a line asks for."""
        started = Started(index, digest, {})
        try:
            data = jobs.parse(line)
            if "id" in data:
                started.facts["id"] = data["id"]
            task = jobs.task_of(data)
            ids = self._ids(task)
            options = {**self.generation.engine_options, **task.options}
            started.logprobs = self._wants_logprobs(options)
            started.handle = self.engine.submit(ids, **options)
            started.tokens = len(ids)
        except EngineError:  # no line's fault
            raise
        except FuncrtError as error:
            started.facts["error"] = _sentence(error)
        return started

    def finish(self, started: Started, timeout: float) -> dict[str, Any]:
        """What to write. Raises TimeoutError if it takes longer than `timeout` seconds."""
        if started.handle is None:
            return started.facts
        try:
            done = started.handle.result(timeout)
        except EngineError:
            raise
        except FuncrtError as error:
            return {**started.facts, "error": _sentence(error)}
        if done.finish_reason == "error":
            return {**started.facts, "error": sources.NOT_FINITE}
        return {**started.facts, **self._facts(done, started.logprobs)}

    def _facts(self, done: Completion, logprobs: bool) -> dict[str, Any]:
        # Nothing that depends on when a line ran: a continued file equals one that was not.
        facts: dict[str, Any] = {
            "text": done.text,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": len(done.tokens),
        }
        if logprobs or self.engine.model.tokenizer is None:
            facts["tokens"] = done.tokens
        if logprobs:
            facts["logprobs"] = [_rounded(value) for value in done.logprobs]
        if logprobs and done.top_logprobs:
            facts["top_logprobs"] = [
                [[token, _rounded(value)] for token, value in step] for step in done.top_logprobs
            ]
        return facts

    def _ids(self, task: jobs.Task) -> list[int]:
        if task.ids is not None:
            return task.ids
        if task.text is not None:
            return sources.prompt_ids(self.engine.model, task.text, self.raw, self.system_prompt)
        messages = task.messages or []
        has_system = any(isinstance(m, dict) and m.get("role") == "system" for m in messages)
        begin = [] if has_system else sources.system_messages(self.system_prompt)
        return sources.chat_ids(self.engine.model, [*begin, *messages])

    def _wants_logprobs(self, options: dict[str, Any]) -> bool:
        wanted = options.pop("logprobs", self.generation.logprobs)
        if not isinstance(wanted, bool):
            raise InputError(f"logprobs: expected true or false, got {wanted!r}")
        return wanted or bool(options["top_logprobs"])


def _sentence(error: FuncrtError) -> str:
    text = " ".join(str(error).split())
    return text.replace("prompt 0", "prompt", 1) if text.startswith("prompt 0") else text


def _rounded(logprob: float) -> float | None:
    return round(logprob, _DIGITS) if math.isfinite(logprob) else None
