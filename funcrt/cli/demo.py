"""`funcrt demo`: from a checkpoint to an answer in a process that has only the bundle."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from funcrt.buckets import BucketPlan
from funcrt.cli import export, terminal
from funcrt.cli import options as o
from funcrt.errors import BundleError, FuncrtError
from funcrt.storage import load_json, save_json

import typer

NAME = "SmolLM2-135M-Instruct"
PLAN = BucketPlan(batch=(1, 4), tokens=(4, 64), capacity=(512, 1024))
QUESTION = "What is the capital of France?"


def demo(
    folder: Annotated[Path, typer.Option(help="Where the bundle goes.")] = Path("exported"),
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask.")] = QUESTION,
    max_tokens: o.MaxTokens = 96,
    json_: o.Json = False,
) -> None:
    """Fetch SmolLM2-135M-Instruct, convert, export, and chat with it in a new process."""
    bundle = folder / f"{NAME}.funcrt"
    made = _make(bundle, folder / f".{NAME}.json", quiet=json_)
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
    facts = export.export_facts(export.export_with_progress(model, bundle, PLAN))
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
    functions: dict[str, dict[str, float]] = made["functions"]
    exporting = sum(function["seconds"] for function in functions.values())
    cut = ", cut at --max-tokens" if answer["finish_reason"] == "length" else ""
    if made["skipped"]:
        terminal.show("\nConvert and export times are those of the earlier run.")
    terminal.table(
        f"\n{NAME}, {answer['blas']}",
        ("", ""),
        [
            ("convert", f"{made['convert_seconds']:.1f} s"),
            (f"export {len(functions)} functions", f"{exporting:.1f} s"),
            ("check them against an uncached float32 run", f"{made['seconds'] - exporting:.1f} s"),
            ("bundle", terminal.size(made["bytes"])),
            ("load, in the new process", f"{answer['load_seconds']:.2f} s"),
            ("time to first token", f"{answer['first_token_seconds']:.2f} s"),
            ("prompt", f"{answer['prompt_tokens']} tokens, "
             f"{answer['prompt_tokens_per_s']:.1f} tokens/s"),
            ("generation", f"{answer['generation_tokens']} tokens, "
             f"{answer['generation_tokens_per_s']:.1f} tokens/s{cut}"),
            ("peak memory", terminal.size(answer["peak_memory_bytes"])),
            ("traces made", str(answer["traces"])),
            ("parity: compiled to eager, largest difference", _parity(made["compiled_to_eager"])),
            ("parity: imported to eager, largest difference", _parity(made["imported_to_eager"])),
        ],
    )  # fmt: skip
    kinds: dict[str, list[dict[str, float]]] = {}
    for key, function in functions.items():
        kinds.setdefault(key.rsplit("_b", 1)[0], []).append(function)
    terminal.table(
        "Export time per function",
        ("function", "shapes", "seconds, each", "size, each"),
        [
            (kind, str(len(same)), _range([f["seconds"] for f in same], "{:.2f}".format),
             _range([f["bytes"] for f in same], terminal.size))
            for kind, same in kinds.items()
        ],
    )  # fmt: skip


def _parity(error: float) -> str:
    return "0, bit for bit" if error == 0 else f"{error:.1e} of the largest logit"


def _range(values: list[float], shown: Callable[[float], str]) -> str:
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"
