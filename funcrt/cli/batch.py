"""`funcrt batch`: many prompts from a file, one result line for each, in their order."""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from funcrt.cli import jobs, sources, terminal
from funcrt.cli import options as o
from funcrt.cli.results import Results, open_results
from funcrt.errors import EngineError, FuncrtError, InputError

import typer

if TYPE_CHECKING:
    from funcrt.calling import CallForm
    from funcrt.engine import Completion, Engine, Handle, Stats

FORMAT = 1  # of result lines; another one never continues a file
_WINDOW = 128  # prompts under way: enough to fill the rows behind a long one, few enough to hold
_WINDOW_TOKENS = 1_000_000
_PATIENCE = 0.1  # seconds to wait in one place while there may be work in another
_DIGITS = 6  # of log-probabilities, about what float32 logits mean

Tick = Callable[[int, "int | None", str], None]


@o.spread
def batch(
    source: o.Runnable,
    prompts: Annotated[
        str, typer.Argument(metavar="IN.jsonl", help="One prompt a line, - for standard input.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="One result a line, - for standard output.")
    ],
    generation: o.Generation,
    sizes: o.Sizes,
    loading: o.Loading,
    raw: o.Raw = False,
    system_prompt: o.SystemPrompt = None,
    memory: o.Memory = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start OUT.jsonl anew.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue OUT.jsonl from standard input, too.")
    ] = False,
    json_: o.Json = False,
) -> None:
    """Complete many prompts; the same command continues where one was interrupted.

    A line of input is a JSON string or an object: "prompt" (text or a list of ids) or "messages"
    (a chat), and if wanted "id" and options of its own, named as in Python (max_tokens,
    temperature, seed, stop, ...). A line that cannot be answered gets a result with "error".
    """
    if overwrite and resume:
        raise typer.BadParameter(
            "either starts the file anew or continues it", param_hint="--resume"
        )
    budget = None if memory is None else o.byte_count(memory)
    _check_paths(prompts, out, overwrite or resume)
    model = sources.load_any(source, loading)
    if generation.stop:
        sources.tokenizer_of(model)
    plan = sources.choose_plan(source, model, sizes)
    digest = jobs.Digest(_what_matters(model, generation, raw, system_prompt))
    with (
        _open_prompts(prompts) as (reader, total),
        open_results(out, overwrite) as results,
        sources.open_engine(model, generation, plan, budget) as engine,
        terminal.progress(f"Running {prompts}") as tick,
    ):
        asker = _Asker(engine, model, generation, raw, system_prompt)
        run = _Run(asker, reader, digest, results, tick, total)
        try:
            facts = run.all()
        except KeyboardInterrupt:
            terminal.warn(f"{run.done} lines are in {out}: the same command goes on from there")
            raise
    terminal.emit(facts, json_, _summary(facts), err=True)
    if results.failed:
        raise InputError(f'{results.failed} of {run.done} lines failed: see "error" in {out}')


@dataclass
class _Started:
    """A line under way, or one that failed before it began."""

    index: int
    digest: str
    facts: dict[str, Any]
    handle: Handle | None = None
    tokens: int = 0
    logprobs: bool = False


@dataclass
class _Asker:
    """Turns lines into requests, and their completions into facts."""

    engine: Engine
    model: CallForm
    generation: o.Generation
    raw: bool
    system_prompt: str | None

    def start(self, index: int, digest: str, line: bytes) -> _Started:
        """Submit what a line asks for."""
        started = _Started(index, digest, {})
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

    def finish(self, started: _Started, timeout: float) -> dict[str, Any]:
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
            return {
                **started.facts,
                "error": "the model's logits are not finite: its weights are broken",
            }
        return {**started.facts, **self._facts(done, started.logprobs)}

    def _facts(self, done: Completion, logprobs: bool) -> dict[str, Any]:
        # Nothing that depends on when a line ran: a continued file equals one that was not.
        facts: dict[str, Any] = {
            "text": done.text,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": len(done.tokens),
        }
        if logprobs or self.model.tokenizer is None:
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
            return sources.prompt_ids(self.model, task.text, self.raw, self.system_prompt)
        messages = task.messages or []
        has_system = any(isinstance(m, dict) and m.get("role") == "system" for m in messages)
        begin = [] if has_system else sources.system_messages(self.system_prompt)
        return sources.chat_ids(self.model, [*begin, *messages])

    def _wants_logprobs(self, options: dict[str, Any]) -> bool:
        wanted = options.pop("logprobs", self.generation.logprobs)
        if not isinstance(wanted, bool):
            raise InputError(f"logprobs: expected true or false, got {wanted!r}")
        return wanted or bool(options["top_logprobs"])


@dataclass
class _Run:
    """All lines: what is in the file stays, the others are asked and written in order."""

    asker: _Asker
    reader: jobs.LineReader
    digest: jobs.Digest
    results: Results
    tick: Tick
    total: int | None
    done: int = 0
    under_way: deque[_Started] = field(default_factory=deque)

    def all(self) -> dict[str, Any]:
        """Run to the end of the input and return what it took."""
        before, begin = self.asker.engine.stats, time.perf_counter()
        shown = -math.inf
        while True:
            head = self.under_way[0] if self.under_way else None
            if head and (self._is_full() or self.reader.ended or _is_done(head)):
                self._write(head)
            elif self.reader.ended:
                break
            else:
                self._read(timeout=_PATIENCE if head else None)
            seconds = time.perf_counter() - begin
            if seconds - shown > _PATIENCE:
                shown = seconds
                made = (self.asker.engine.stats - before).generated_tokens
                self.tick(self.done, self.total, f"{made / seconds:.1f} tokens/s")
        self.results.finish(self.done)
        return self._facts(self.asker.engine.stats - before, time.perf_counter() - begin)

    def _read(self, timeout: float | None) -> None:
        line = self.reader.next(timeout)
        if line is None:
            return
        index, digest = self.done + len(self.under_way), self.digest.of(line)
        if self.results.holds(index, digest):
            self.done += 1
        else:
            self.under_way.append(self.asker.start(index, digest, line))

    def _write(self, head: _Started) -> None:
        try:
            facts = self.asker.finish(head, _PATIENCE)
        except TimeoutError:
            return
        self.results.add(head.index, head.digest, facts)
        self.under_way.popleft()
        self.done += 1

    def _is_full(self) -> bool:
        tokens = sum(started.tokens for started in self.under_way)
        return len(self.under_way) >= _WINDOW or tokens >= _WINDOW_TOKENS

    def _facts(self, spent: Stats, seconds: float) -> dict[str, Any]:
        from funcrt.machine import peak_memory

        return {
            "lines": self.done,
            "kept": self.results.kept,
            "failed": self.results.failed,
            "prompt_tokens": spent.prompt_tokens,
            "reused_tokens": spent.reused_tokens,
            "generation_tokens": spent.generated_tokens,
            "generation_tokens_per_s": spent.generated_tokens / seconds,
            "seconds": seconds,
            "peak_memory_bytes": peak_memory(),
        }


def _is_done(started: _Started) -> bool:
    return started.handle is None or started.handle.done()


def _what_matters(
    model: CallForm, generation: o.Generation, raw: bool, system_prompt: str | None
) -> dict[str, Any]:
    """What results depend on beside the lines; guesses, buckets and memory change none."""
    return {
        "format": FORMAT,
        "model": model.fingerprint,
        "template": None if model.tokenizer is None else model.tokenizer.chat_template,
        "raw": raw,
        "system_prompt": system_prompt,
        "logprobs": generation.logprobs,
        **generation.engine_options,
    }


def _check_paths(prompts: str, out: Path, may_continue: bool) -> None:
    if out.is_dir():
        raise InputError(f"{out} is a folder: name a file for the results")
    if prompts == "-":
        if out.is_file() and out.stat().st_size and not may_continue:
            raise InputError(
                f"{out} holds something: --resume continues it if standard input is the same "
                "again, --overwrite starts it anew"
            )
    elif not Path(prompts).exists() or Path(prompts).is_dir():
        raise InputError(f"{prompts}: expected a file with one prompt a line, found none")
    elif out.exists() and out.samefile(prompts):
        raise InputError(f"{out} is both input and output: choose another output")


@contextmanager
def _open_prompts(prompts: str) -> Iterator[tuple[jobs.LineReader, int | None]]:
    """A reader of the lines, and how many there are where that can be known."""
    if prompts == "-":
        yield jobs.LineReader(sys.stdin.fileno()), None
        return
    with Path(prompts).open("rb", buffering=0) as file:
        is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        known = jobs.count_lines(Path(prompts)) if is_file and terminal.is_shown() else None
        yield jobs.LineReader(file.fileno()), known


def _sentence(error: FuncrtError) -> str:
    text = " ".join(str(error).split())
    return text.replace("prompt 0", "prompt", 1) if text.startswith("prompt 0") else text


def _rounded(logprob: float) -> float | None:
    return round(logprob, _DIGITS) if math.isfinite(logprob) else None


def _summary(facts: dict[str, Any]) -> str:
    kept = f", {facts['kept']} of them were there" if facts["kept"] else ""
    reused = f" ({facts['reused_tokens']} more reused)" if facts["reused_tokens"] else ""
    return (
        f"Lines: {facts['lines']}{kept}, {facts['failed']} failed\n"
        f"Prompts: {facts['prompt_tokens']} tokens{reused}\n"
        f"Generation: {facts['generation_tokens']} tokens, "
        f"{facts['generation_tokens_per_s']:.1f} tokens/s\n"
        f"Peak memory: {terminal.size(facts['peak_memory_bytes'])}"
    )
