"""`funcrt demo`: from a checkpoint to an answer in a process that has only the bundle."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from funcrt.buckets import BucketPlan
from funcrt.cli import bundles, terminal
from funcrt.cli import options as o
from funcrt.errors import BundleError, FuncrtError
from funcrt.storage import load_json, save_json

import typer

NAME = "SmolLM2-135M-Instruct"
PLAN = BucketPlan(batch=(1, 4), tokens=(1, 64), capacity=(512, 1024))
QUESTION = "Why is the sky blue? Answer in two sentences."


def demo(
    folder: Annotated[Path, typer.Option(help="Where the bundle goes.")] = Path("exported"),
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask.")] = QUESTION,
    max_tokens: o.MaxTokens = 96,
    json_: o.Json = False,
) -> None:
    """Fetch SmolLM2-135M-Instruct, convert, export, and chat with it in a new process."""
    bundle = folder / f"{NAME}.funcrt"
    made = _make(bundle, folder / f"{NAME}.json", quiet=json_)
    if not json_:
        terminal.show(f"\nA new process loads {bundle} and nothing else.\n\n> {prompt}\n")
    answer = _ask(bundle, prompt, max_tokens, quiet=json_)
    if json_:
        terminal.emit({"made": made, "answer": answer}, json_, "")
    else:
        _show(made, answer)


def _make(bundle: Path, facts_file: Path, quiet: bool) -> dict[str, Any]:
    """Fetch, convert and export, unless an earlier run left a bundle that loads here."""
    from funcrt.bundle.loader import open_bundle

    try:
        open_bundle(bundle)
        made = load_json(facts_file)
    except FuncrtError:
        pass
    else:
        if not quiet:
            terminal.show(f"{bundle} is there already: fetching, converting, exporting are skipped")
        return {**made, "skipped": True}

    from converters import load, smollm2

    steps: dict[str, float] = {}
    begin = time.perf_counter()
    checkpoint = smollm2.fetch()
    steps["fetch_seconds"] = time.perf_counter() - begin
    with terminal.timed(f"Converting {checkpoint.name}") as clock:
        model = load(checkpoint)
    steps["convert_seconds"] = clock.seconds
    bundle.parent.mkdir(parents=True, exist_ok=True)
    facts = bundles.export_facts(bundles.export_with_progress(model, bundle, PLAN))
    made = {**steps, **facts}
    save_json(facts_file, made)
    return {**made, "skipped": False}


def _ask(bundle: Path, prompt: str, max_tokens: int, quiet: bool) -> dict[str, Any]:
    """Answer in a new process that streams to this terminal."""
    with tempfile.TemporaryDirectory() as scratch:
        facts = Path(scratch) / "facts.json"
        command = [
            sys.executable, "-m", "funcrt", "generate", str(bundle), "--prompt", prompt,
            "--max-tokens", str(max_tokens), "--facts-file", str(facts),
        ]  # fmt: skip
        begin = time.perf_counter()
        child = subprocess.run(
            command, stdout=subprocess.DEVNULL if quiet else None, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        if child.returncode != 0:
            raise BundleError(
                f"the process that ran {bundle} ended with exit code {child.returncode}: "
                f"{child.stderr.strip() or 'it said nothing'}"
            )
        return {**load_json(facts), "process_seconds": time.perf_counter() - begin}


def _show(made: dict[str, Any], answer: dict[str, Any]) -> None:
    functions = made["functions"].values()
    seconds = [function["seconds"] for function in functions]
    earlier = " (by an earlier run)" if made["skipped"] else ""
    terminal.table(
        f"{NAME}, {answer['blas']}",
        ("", ""),
        [
            ("convert" + earlier, f"{made['convert_seconds']:.1f} s"),
            (f"export, {len(seconds)} functions" + earlier,
             f"{sum(seconds):.1f} s; each {min(seconds):.2f} to {max(seconds):.2f} s"),
            ("check them against float32, eager" + earlier,
             f"{made['seconds'] - sum(seconds):.1f} s"),
            ("bundle", terminal.size(made["bytes"])),
            ("load, new process", f"{answer['load_seconds']:.2f} s"),
            ("time to first token", f"{answer['first_token_seconds']:.2f} s"),
            ("prompt", f"{answer['prompt_tokens']} tokens, "
             f"{answer['prompt_tokens_per_s']:.1f} tokens/s"),
            ("generation", f"{answer['generation_tokens']} tokens, "
             f"{answer['generation_tokens_per_s']:.1f} tokens/s"),
            ("peak memory", terminal.size(answer["peak_memory_bytes"])),
            ("traces made", str(answer["traces"])),
            ("parity: largest difference compiled/eager", f"{made['compiled_to_eager']:.1e}"),
            ("parity: largest difference imported/eager", f"{made['imported_to_eager']:.1e}"),
        ],
    )  # fmt: skip
    terminal.table(
        "Export time and size per function" + earlier,
        ("function", "seconds", "bytes"),
        [
            (name, f"{function['seconds']:.2f}", terminal.size(function["bytes"]))
            for name, function in made["functions"].items()
        ],
    )
