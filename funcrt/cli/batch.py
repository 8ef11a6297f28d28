"""`funcrt batch`: many prompts from a file, one result line for each, in their order."""

from __future__ import annotations

import json
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
from funcrt.cli.asking import Asker, Started
from funcrt.cli.results import Results, open_results
from funcrt.errors import InputError

import typer

if TYPE_CHECKING:
    from funcrt.engine import Engine, Stats

FORMAT = 1  # of result lines; another one never continues a file
_WINDOW = 128  # prompts under way: enough to fill the rows behind a long one, few enough to hold
_WINDOW_BATCHES = 4  # at least, where rows are many
_WINDOW_TOKENS = 1_000_000
_PATIENCE = 0.1  # seconds to wait in one place while there may be work in another

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
    loading: o.Opening,
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
    with (
        _open_prompts(prompts) as (reader, total),
        open_results(out, overwrite) as results,
        sources.open_engine(model, generation, plan, budget) as engine,
        terminal.progress(f"Running {prompts}") as tick,
    ):
        asker = Asker(engine, generation, raw, system_prompt)
        digest = jobs.Digest(_what_matters(engine, generation, raw, system_prompt))
        run = _Run(asker, reader, digest, results, tick, total)
        try:
            facts = run.all()
        except KeyboardInterrupt:
            if prompts != "-":
                terminal.warn(f"what is done is in {out}: the same command goes on from there")
            raise
    summary = json.dumps(facts, ensure_ascii=False) if json_ else _summary(facts)
    # Results go to standard output if asked to, and a summary is not one of them.
    (terminal.show if json_ and str(out) != "-" else terminal.warn)(summary)
    if results.failed:
        raise InputError(f'{results.failed} of {run.done} lines failed: see "error" in {out}')


@dataclass
class _Run:
    """All lines: what is in the file stays, the others are asked and written in order."""

    asker: Asker
    reader: jobs.LineReader
    digest: jobs.Digest
    results: Results
    tick: Tick
    total: int | None
    done: int = 0
    under_way: deque[Started] = field(default_factory=deque)

    def all(self) -> dict[str, Any]:
        """Run to the end of the input and return what it took."""
        before, begin = self.asker.engine.stats, time.perf_counter()
        shown = -math.inf
        while True:
            head = self.under_way[0] if self.under_way else None
            if head and (self._is_full() or self.reader.ended or head.is_done):
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

    def _write(self, head: Started) -> None:
        try:
            facts = self.asker.finish(head, _PATIENCE)
        except TimeoutError:
            return
        self.results.add(head.index, head.digest, facts)
        self.under_way.popleft()
        self.done += 1

    def _is_full(self) -> bool:
        rows = self.asker.engine.compiled.plan.batch[-1]
        tokens = sum(started.tokens for started in self.under_way)
        window = max(_WINDOW, _WINDOW_BATCHES * rows)
        return len(self.under_way) >= window or tokens >= _WINDOW_TOKENS

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


def _what_matters(
    engine: Engine, generation: o.Generation, raw: bool, system_prompt: str | None
) -> dict[str, Any]:
    """What results depend on beside the lines; guesses, buckets and memory change none."""
    model, spec = engine.model, engine.compiled.cache_spec
    return {
        "format": FORMAT,
        "model": model.fingerprint,
        "dtype": model.config_values.get("dtype"),
        "packed": [[entry.name, entry.shape] for entry in spec if entry.kind == "quantized"],
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
