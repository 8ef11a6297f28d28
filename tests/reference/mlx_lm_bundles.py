"""Bundles of mlx-lm's modules: exported for a small plan, and run where mlx-lm is not imported.

    python -m tests.reference.mlx_lm_bundles [NAME ...]

Prints each module and what is wrong with its bundle; without names, all that pass in the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import converters
import funcrt
from funcrt.buckets import BucketPlan
from tests.reference.make_mlx_lm_modules import load_table, passed
from tests.reference.mlx_lm_checks import make_module, tokens_of, without_metal

import mlx.core as mx
from mlx import nn

PLAN = BucketPlan(batch=[1], tokens=[2], capacity=[32])
PROMPT, NEW = 13, 8  # more together than the windows of the tiny configurations
RUN = """
import json, sys
import funcrt
with funcrt.Engine(funcrt.load_bundle(sys.argv[1])) as engine:
    found = engine.submit(json.loads(sys.argv[2]), max_tokens=int(sys.argv[3])).result().tokens
seen = [n for n in sys.modules if n.split(".")[0] in ("mlx_lm", "converters")]
print(json.dumps([list(found), seen]))
"""


def check_bundle(name: str) -> str:
    """What is wrong with the bundle of a module; empty if it gives mlx-lm's greedy tokens."""
    module = make_module(name)
    prompt = tokens_of(0, PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "b.funcrt"
        funcrt.export(converters.functionalize(module), bundle, PLAN)
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(bundle), json.dumps(prompt), str(NEW)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        return f"does not run: {done.stderr.strip().splitlines()[-1:]}"
    tokens, imported = json.loads(done.stdout)
    if imported:
        return f"imports {imported}"
    # Where mlx-lm's prompts and steps differ, one of the two is right.
    theirs = [_generate(module, prompt, cached) for cached in (True, False)]
    return "" if tokens in theirs else f"gives {tokens}, mlx-lm {theirs[0]}"


def _generate(module: nn.Module, prompt: list[int], cached: bool) -> list[int]:
    """mlx-lm's greedy tokens, with its caches or from the whole text every time."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(module) if cached else None
    ids, found = prompt, []
    with without_metal():
        for _ in range(NEW):
            logits = module(mx.array([ids]), cache=caches or make_prompt_cache(module))
            found.append(int(mx.argmax(logits[0, -1]).item()))
            ids = found[-1:] if cached else [*prompt, *found]
    return found


def main() -> None:
    names = sys.argv[1:]
    if len(names) == 1:
        print(names[0], check_bundle(names[0]) or "ok", flush=True)
        return
    wrong = 0
    for name in names or [row["module"] for row in load_table() if passed(row)]:
        done = subprocess.run(
            [sys.executable, "-m", "tests.reference.mlx_lm_bundles", name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = (done.stdout if not done.returncode else done.stderr).strip().splitlines()
        print(said[-1] if not done.returncode else f"{name} {said[-1:]}", flush=True)
        wrong += done.returncode != 0 or not said[-1].endswith(" ok")
    print(f"{wrong} bundles are wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
