"""One graph file for each function and shape, or one for each function with all of its shapes?

    python -m benchmarks.graph_files

MLX can keep several traces in a file (`mx.exporter`) and picks the one that fits a call. SmolLM2 is
exported both ways, without weights. Prints a table and writes benchmarks/results/graph_files.json;
benchmarks/README.md says what each number means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import RESULTS, ROOT, describe_run, note, write_json
from benchmarks.endurance import process_bytes

if TYPE_CHECKING:
    from funcrt.buckets import Bucket
    from funcrt.cache import CacheLayout
    from funcrt.model import Model

    import mlx.core as mx

PLAN = {"batch": [1, 4], "tokens": [4, 64], "capacity": [512, 2048]}
ADDED_CAPACITY = 4096
ONE_PROMPT = ("prefill_b1_t64_s512", "sample_b1_t1_s0", "decode_b1_t1_s512")
FORMS = ("a file per shape", "a file per function")
WANTED = {"all": "every function", "one prompt": "what one prompt needs"}
CALLS = 20
Facts = dict[str, Any]
Files = dict[str, list[str]]  # name of a file -> keys of the functions in it


def group(form: str, keys: Sequence[str]) -> Files:
    """Which functions go into which file."""
    files: Files = {}
    for key in keys:
        name = key if form == FORMS[0] else key.rsplit("_b", 1)[0]
        files.setdefault(f"{name}.mlxfn", []).append(key)
    return files


class Exporter:
    """Traces the functions of one model."""

    def __init__(self, model: Model, layout: CacheLayout) -> None:
        self.model, self.layout = model, layout

    def arguments(self, name: str, bucket: Bucket) -> list[mx.array]:
        """What a function is called with, as a flat list of unevaluated arrays."""
        from mlx.utils import tree_flatten

        return [array for _, array in tree_flatten(self.model.example(name, bucket, self.layout))]

    def export(
        self, files: Mapping[str, Sequence[str]], buckets: Mapping[str, Bucket], folder: Path
    ) -> float:
        """Write files into an empty folder; seconds that it took."""
        folder.mkdir()
        begin = time.perf_counter()
        for file, keys in files.items():
            self._export_file(str(folder / file), {key: buckets[key] for key in keys})
        return time.perf_counter() - begin

    def _export_file(self, path: str, buckets: Mapping[str, Bucket]) -> None:
        import mlx.core as mx

        functions: dict[object, Callable[..., Any]] = {}
        examples = []
        for key, bucket in buckets.items():
            name = key.rsplit("_b", 1)[0]
            example = self.arguments(name, bucket)
            functions[_shapes(example)] = self.model.flat_step(name, bucket, self.layout)
            examples.append(example)
        if len(examples) == 1:
            mx.export_function(path, *functions.values(), *examples[0])
            return
        with mx.exporter(path, lambda *arrays: functions[_shapes(arrays)](*arrays)) as exporter:
            for example in examples:
                exporter(*example)


def _shapes(arrays: Sequence[mx.array]) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for array in arrays)


# --- importing, in a process of its own ----------------------------------------------------------


def measure_import(folder: Path, files: Sequence[str], call: Sequence[Any]) -> Facts:
    """Import files and call one function lazily: nothing is evaluated.

    Args:
        folder: where the files are.
        files: their names.
        call: the file of the function that is called, and shape and dtype of its arguments.
    """
    import funcrt  # noqa: F401 (its way of starting MLX, as in every other process)

    import mlx.core as mx

    mx.eval(mx.zeros(1))
    before = process_bytes()
    begin = time.perf_counter()
    functions: dict[str, Any] = {file: mx.import_function(str(folder / file)) for file in files}
    seconds = time.perf_counter() - begin
    grown = process_bytes() - before
    called, specs = call
    arguments = [mx.zeros(shape, getattr(mx, dtype)) for shape, dtype in specs]
    return {
        "seconds": seconds,
        "memory": grown,
        "call_s": statistics.median(time_call(functions[called], arguments) for _ in range(CALLS)),
    }


def time_call(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Seconds to build the graph of one call."""
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def import_elsewhere(folder: Path, files: Sequence[str], call: Sequence[Any]) -> Facts:
    """`measure_import` in a new process."""
    command = [sys.executable, "-m", "benchmarks.graph_files", "--import", str(folder)]
    request = json.dumps({"files": list(files), "call": call})
    done = subprocess.run(
        command, input=request, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True
    )
    facts: Facts = json.loads(done.stdout)
    return facts


# --- all of it -----------------------------------------------------------------------------------


def list_buckets(plan: Mapping[str, Sequence[int]]) -> dict[str, Bucket]:
    """The functions of a plan by key, but the small ones: `prepare` and `grow`."""
    from funcrt.buckets import BucketPlan
    from funcrt.steps import STEPS

    sizes = BucketPlan(**plan)
    return {
        f"{step.name}_{bucket}": bucket
        for step in STEPS.values()
        if step.name != "grow"
        for bucket in step.buckets(sizes.batch, sizes.tokens, sizes.capacity)
    }


def run(rounds: int) -> Facts:
    """Alternate the two forms."""
    from converters import load, smollm2
    from funcrt.buckets import BucketPlan

    model = load(smollm2.fetch())
    exporter = Exporter(model, model.choose_layout(BucketPlan(**PLAN)))
    buckets = list_buckets(PLAN)
    larger = list_buckets({**PLAN, "capacity": [*PLAN["capacity"], ADDED_CAPACITY]})
    called = ONE_PROMPT[-1]
    arguments = exporter.arguments(called.rsplit("_b", 1)[0], buckets[called])
    # "mlx.core.float32" -> "float32"; the name of mlx.core.bool in MLX is bool_.
    specs = [(a.shape, str(a.dtype).split(".")[-1].replace("bool", "bool_")) for a in arguments]
    runs: dict[str, list[Facts]] = {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory() as scratch:
        warm = Path(scratch) / "warm"
        exporter.export(group(FORMS[0], ONE_PROMPT), buckets, warm)
        for i in range(rounds):
            for form in FORMS:
                folder = Path(scratch) / f"{form} {i}"
                runs[form].append(measure(form, exporter, buckets, larger, specs, folder))
                note(f"round {i + 1}, {form}: {json.dumps(runs[form][-1])}")
    return {
        **describe_run("benchmarks.graph_files"),
        "plan": PLAN,
        "added_capacity": ADDED_CAPACITY,
        "one_prompt": ONE_PROMPT,
        "functions": len(buckets),
        "medians": {form: summarize(measured) for form, measured in runs.items()},
        "runs": runs,
    }


def measure(
    form: str,
    exporter: Exporter,
    buckets: Mapping[str, Bucket],
    larger: Mapping[str, Bucket],
    specs: Sequence[Any],
    folder: Path,
) -> Facts:
    """Export, import all, import what one prompt needs, and add a capacity, once."""
    files = group(form, list(buckets))
    seconds = exporter.export(files, buckets, folder)
    facts: Facts = {"files": len(files), "bytes": _bytes(folder), "export_s": seconds}
    needed = [file for file, keys in files.items() if set(keys) & set(ONE_PROMPT)]
    call = (next(file for file, keys in files.items() if ONE_PROMPT[-1] in keys), specs)
    for name, wanted in (("all", list(files)), ("one prompt", needed)):
        facts[name] = {
            "bytes": sum((folder / file).stat().st_size for file in wanted),
            **import_elsewhere(folder, wanted, call),
        }
    # A file whose functions stay as they are stays, too; a trace cannot be added to one.
    changed = {f: keys for f, keys in group(form, list(larger)).items() if files.get(f) != keys}
    added = folder.with_name(f"{folder.name} added")
    seconds = exporter.export(changed, larger, added)
    facts["added"] = {
        "files": len(changed),
        "traces": sum(map(len, changed.values())),
        "bytes": _bytes(added),
        "seconds": seconds,
    }
    return facts


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def summarize(measured: Sequence[Facts]) -> Facts:
    """The median of every number, in the same structure."""
    return {
        key: summarize([facts[key] for facts in measured])
        if isinstance(value, dict)
        else statistics.median(facts[key] for facts in measured)
        for key, value in measured[0].items()
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the table."""
    from funcrt.cli import terminal

    medians = [result["medians"][form] for form in FORMS]
    size = terminal.size
    rows: list[tuple[str, Callable[[Facts], str]]] = [
        ("files", lambda m: str(m["files"])),
        ("size", lambda m: size(m["bytes"])),
        ("export", lambda m: f"{m['export_s']:.2f} s"),
    ]
    for name, text in WANTED.items():
        rows += [
            (f"import {text}", lambda m, name=name: f"{1000 * m[name]['seconds']:.0f} ms"),
            ("  files read", lambda m, name=name: size(m[name]["bytes"])),
            ("  memory taken", lambda m, name=name: size(m[name]["memory"])),
            ("  graph of a call", lambda m, name=name: f"{1000 * m[name]['call_s']:.2f} ms"),
        ]
    rows += [
        (f"add capacity {result['added_capacity']}: files written",
         lambda m: f"{m['added']['files']}, {size(m['added']['bytes'])}"),
        ("  traces made", lambda m: f"{m['added']['traces']} in {m['added']['seconds']:.2f} s"),
    ]  # fmt: skip
    terminal.table(
        f"SmolLM2-135M, {result['functions']} functions without weights, {result['machine']}",
        ("", *FORMS),
        [(title, *map(shown, medians)) for title, shown in rows],
    )


def main() -> None:
    """Run, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "graph_files.json")
    parser.add_argument("--import", dest="folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        request = json.load(sys.stdin)
        print(json.dumps(measure_import(options.folder, request["files"], request["call"])))
        return
    result = run(options.rounds)
    write_json(options.out, result)
    show(result)


if __name__ == "__main__":
    main()
