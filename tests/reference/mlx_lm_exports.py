"""A model's graphs written to files, and run by a process that knows nothing of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from funcrt import cache
from funcrt.flat import flatten
from funcrt.model import Model

import mlx.core as mx


class Sizes(NamedTuple):
    """Tokens of the prompt, steps after it, and slots of the cache."""

    prompt: int
    steps: int
    capacity: int


def run_exported(model: Model, row: list[int], sizes: Sizes, folder: Path) -> mx.array:
    """Logits of one row from graphs that a new process imported."""
    arrays: dict[str, mx.array] = {f"p.{k}": v for k, v in model.params.items()}
    state = model.init_cache(1, sizes.capacity)
    arrays |= {f"s.{k}": v for k, v in state.items()}
    capacity = cache.state_size(state)[1]
    for count in (sizes.prompt, 1):
        tokens = mx.zeros((1, count), mx.int32)
        mask = mx.zeros((1, 1, count, capacity), mx.bool_)
        flat = flatten(model.forward, model.params, tokens, mask, state)[0]
        mx.export_function(
            str(folder / f"{count}.mlxfn"), flat, *model.params.values(), tokens, mask,
            *state.values(),
        )  # fmt: skip
    arrays["tokens"] = mx.array(row, dtype=mx.int32)
    mx.save_safetensors(str(folder / "in.safetensors"), arrays)
    (folder / "names.json").write_text(
        json.dumps([list(model.params), list(state), capacity, sizes])
    )
    subprocess.run([sys.executable, __file__, str(folder)], check=True, capture_output=True)
    return mx.load(str(folder / "out.safetensors"))["logits"]


def run_imported(folder: Path) -> None:
    """The other process: knows nothing of the model."""
    arrays = mx.load(str(folder / "in.safetensors"))
    params, names, capacity, (prompt, steps, _) = json.loads((folder / "names.json").read_text())
    state = [arrays[f"s.{name}"] for name in names]
    weights = [arrays[f"p.{name}"] for name in params]
    ids = arrays["tokens"].tolist()
    out, start = [], 0
    for count in (prompt, *[1] * steps):
        forward = mx.import_function(str(folder / f"{count}.mlxfn"))
        tokens = mx.array([ids[start : start + count]], dtype=mx.int32)
        slot = mx.arange(start, start + count)[:, None]
        mask = (mx.arange(capacity) <= slot)[None, None]
        logits, *state = forward(*weights, tokens, mask, *state)
        out.append(logits[0])
        start += count
    mx.save_safetensors(str(folder / "out.safetensors"), {"logits": mx.concatenate(out)})


if __name__ == "__main__":
    run_imported(Path(sys.argv[1]))
