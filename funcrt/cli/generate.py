"""`funcrt generate` and `funcrt chat`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from funcrt.cli import options as o
from funcrt.cli import sources, terminal
from funcrt.errors import ParamsError

import typer

if TYPE_CHECKING:
    from funcrt.engine import Engine


@o.spread
def generate(
    source: o.Runnable,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text, or - for standard input.")],
    generation: o.Generation,
    loading: o.Opening,
    raw: o.Raw = False,
    system_prompt: o.SystemPrompt = None,
    json_: o.Json = False,
    facts_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Complete a prompt and stream the answer."""
    text = sys.stdin.read() if prompt == "-" else prompt
    begin = time.perf_counter()
    model = sources.load_any(source, loading)
    seconds = time.perf_counter() - begin
    ids = sources.prompt_ids(model, text, raw, system_prompt)
    with sources.open_engine(model, generation) as engine:
        facts = answer(engine, ids, generation, terminal.echo(not json_))
    facts["load_seconds"] = seconds
    if facts_file is not None:
        facts_file.write_text(json.dumps(facts), "utf-8")
    terminal.emit(facts, json_, summary(facts), err=True)


@o.spread
def chat(
    source: o.Runnable,
    generation: o.Generation,
    loading: o.Opening,
    system_prompt: o.SystemPrompt = None,
    json_: o.Json = False,
) -> None:
    """Talk with a model; an empty line or Ctrl-D ends it. With --json, one object per answer."""
    model = sources.load_any(source, loading)
    sources.tokenizer_of(model)
    messages = sources.system_messages(system_prompt)
    with sources.open_engine(model, generation) as engine:
        while line := terminal.ask(">> ", quiet=json_):
            messages.append({"role": "user", "content": line})
            ids = sources.chat_ids(model, messages)
            facts = answer(engine, ids, generation, terminal.echo(not json_))
            messages.append({"role": "assistant", "content": facts["text"]})
            terminal.emit(facts, json_, summary(facts), err=True)


def answer(
    engine: Engine, ids: list[int], generation: o.Generation, show: Callable[[str], None]
) -> dict[str, Any]:
    """Stream the completion of one prompt and return its facts."""
    from funcrt import blas
    from funcrt.machine import peak_memory

    before, begin = engine.stats, time.perf_counter()
    handle = engine.submit(ids, **generation.engine_options)
    first = 0.0
    try:
        for chunk in handle:
            first = first or time.perf_counter() - begin
            show(chunk.text)
    finally:
        show("\n")  # also after Ctrl-C: what comes next begins on a line of its own
    done, spent = handle.result(), engine.stats - before
    if done.finish_reason == "error":
        raise ParamsError(sources.NOT_FINITE)
    facts = {
        "text": done.text,
        "tokens": done.tokens,
        "finish_reason": done.finish_reason,
        "max_tokens": generation.max_tokens,
        "prompt_tokens": done.prompt_tokens,
        "reused_tokens": done.reused_tokens,
        "prompt_tokens_per_s": spent.prompt_rate,
        "generation_tokens": len(done.tokens),
        "generation_tokens_per_s": spent.decode_rate,
        "first_token_seconds": first,
        "peak_memory_bytes": peak_memory(),
        "traces": sum(engine.compiled.traces.values()),
        "blas": blas.describe(),
    }
    if generation.logprobs or generation.top_logprobs:
        facts["logprobs"] = done.logprobs
    if generation.top_logprobs:
        facts["top_logprobs"] = done.top_logprobs
    if generation.speculate:
        facts["guessed_tokens"] = spent.guessed_tokens
        facts["accepted_tokens"] = spent.accepted_tokens
    return facts


def summary(facts: Mapping[str, Any]) -> str:
    """The lines that mlx-lm's users look for."""
    full = facts["finish_reason"] == "length" and facts["generation_tokens"] < facts["max_tokens"]
    note = "\nStopped: the largest cache is full (export a larger --capacity)" if full else ""
    reused = f" ({facts['reused_tokens']} reused)" if facts["reused_tokens"] else ""
    guessed = (
        f"\nGuesses: {facts['accepted_tokens']} of {facts['guessed_tokens']} right"
        if "guessed_tokens" in facts
        else ""
    )
    return (
        f"Prompt: {facts['prompt_tokens']} tokens{reused}, "
        f"{facts['prompt_tokens_per_s']:.1f} tokens/s\n"
        f"Generation: {facts['generation_tokens']} tokens, "
        f"{facts['generation_tokens_per_s']:.1f} tokens/s{guessed}\n"
        f"Peak memory: {terminal.size(facts['peak_memory_bytes'])}{note}"
    )
