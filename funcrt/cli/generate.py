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


def generate(
    source: o.Runnable,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text, or - for standard input.")],
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    system_prompt: o.SystemPrompt = None,
    max_tokens: o.MaxTokens = 256,
    temp: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = 0,
    stop: o.Stop = None,
    dtype: o.Dtype = None,
    ignore: o.Ignore = None,
    json_: o.Json = False,
    facts_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Complete a prompt and stream the answer."""
    from funcrt.engine import Engine

    text = sys.stdin.read() if prompt == "-" else prompt
    with terminal.timed(f"Loading {source}") as clock:
        model = sources.load_any(source, dtype, ignore)
    ids = sources.prompt_ids(model, text, raw, system_prompt)
    facts = answer(
        Engine(model), ids, terminal.echo(not json_), stop=stop or (), max_tokens=max_tokens,
        temperature=temp, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
    )  # fmt: skip
    facts["load_seconds"] = clock.seconds
    if facts_file is not None:
        facts_file.write_text(json.dumps(facts), "utf-8")
    terminal.emit(facts, json_, summary(facts), err=True)


def chat(
    source: o.Runnable,
    system_prompt: o.SystemPrompt = None,
    max_tokens: o.MaxTokens = 256,
    temp: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = 0,
    stop: o.Stop = None,
    dtype: o.Dtype = None,
    ignore: o.Ignore = None,
    json_: o.Json = False,
) -> None:
    """Talk with a model; an empty line or Ctrl-D ends it. With --json, one object per answer."""
    from funcrt.engine import Engine

    with terminal.timed(f"Loading {source}"):
        model = sources.load_any(source, dtype, ignore)
    sources.tokenizer_of(model)
    engine = Engine(model)
    messages = sources.system_messages(system_prompt)
    while line := terminal.ask(">> ", quiet=json_):
        messages.append({"role": "user", "content": line})
        facts = answer(
            engine, sources.chat_ids(model, messages), terminal.echo(not json_), stop=stop or (),
            max_tokens=max_tokens, temperature=temp, top_p=top_p, top_k=top_k, min_p=min_p,
            seed=seed,
        )  # fmt: skip
        messages.append({"role": "assistant", "content": facts["text"]})
        terminal.emit(facts, json_, summary(facts), err=True)


def answer(
    engine: Engine, ids: list[int], show: Callable[[str], None], **options: Any
) -> dict[str, Any]:
    """Stream the completion of one prompt and return its facts."""
    from funcrt import blas
    from funcrt.engine import Stats
    from funcrt.machine import peak_memory

    engine.stats = Stats()
    begin = time.perf_counter()
    first = 0.0
    tokens: list[int] = []
    text = reason = ""
    for chunk in engine.stream([ids], **options):
        if chunk.finish_reason == "error":
            raise ParamsError("the model's logits are not finite: its weights are broken")
        first = first or time.perf_counter() - begin
        tokens.append(chunk.token)
        text += chunk.text
        reason = chunk.finish_reason
        show(chunk.text)
    show("\n")
    return {
        "text": text,
        "tokens": tokens,
        "finish_reason": reason,
        "max_tokens": options["max_tokens"],
        "prompt_tokens": len(ids),
        "prompt_tokens_per_s": engine.stats.prompt_rate,
        "generation_tokens": len(tokens),
        "generation_tokens_per_s": engine.stats.decode_rate,
        "first_token_seconds": first,
        "peak_memory_bytes": peak_memory(),
        "traces": sum(engine.compiled.traces.values()),
        "blas": blas.describe(),
    }


def summary(facts: Mapping[str, Any]) -> str:
    """The lines that mlx-lm's users look for."""
    full = facts["finish_reason"] == "length" and facts["generation_tokens"] < facts["max_tokens"]
    note = "\nStopped: the largest cache is full (export a larger --capacity)" if full else ""
    return (
        f"Prompt: {facts['prompt_tokens']} tokens, {facts['prompt_tokens_per_s']:.1f} tokens/s\n"
        f"Generation: {facts['generation_tokens']} tokens, "
        f"{facts['generation_tokens_per_s']:.1f} tokens/s\n"
        f"Peak memory: {terminal.size(facts['peak_memory_bytes'])}{note}"
    )
