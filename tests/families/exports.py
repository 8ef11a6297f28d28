"""Graphs written to files, and run by a process that knows nothing of the model.

python -m tests.families.exports FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from funcrt.storage import load_arrays
from tests.families.results import CAPACITY, TOLERANCE, WIDTH, Result

import mlx.core as mx

if TYPE_CHECKING:
    from tests.families.cases import Case

PADS, STEPS = (3, 0), 4
FILES = ("forward", "decode_greedy")


def exported(case: Case) -> Result:
    """A padded prefill and greedy steps of imported graphs: logits, tokens and lengths."""
    from funcrt.buckets import Bucket
    from funcrt.cache import state_size
    from tests.families.cases import causal
    from tests.helpers import relative_error

    model, folder = case.model, case.scratch / "graphs"
    folder.mkdir()
    params = list(model.prepared.values())
    layout = case.layouts()[-1]
    state = model.init_cache(len(PADS), CAPACITY, max_tokens=layout.max_tokens)
    functions = []
    for name, count in zip(FILES, (WIDTH, 1), strict=True):
        bucket = Bucket(len(PADS), count, state_size(state)[1])
        functions.append(model.flat_step(name, bucket, layout))
        example = model.example(name, bucket, layout)
        inputs = [array for array in example if isinstance(array, mx.array)]
        path = str(folder / f"{name}.mlxfn")
        mx.export_function(path, functions[-1], *params, *inputs, *state.values())
    arrays = {f"p{i:04}": array for i, array in enumerate(params)}
    arrays |= {f"s{i:04}": array for i, array in enumerate(state.values())}
    arrays["tokens"] = mx.array([case.tokens(WIDTH, 6), case.tokens(WIDTH, 7)], dtype=mx.int32)
    valid = mx.array([[i >= pad for i in range(WIDTH)] for pad in PADS])
    arrays["mask"] = causal(valid, state)
    mx.save_safetensors(str(folder / "in.safetensors"), arrays)
    lengths = list(state).index("lengths")
    (folder / "lengths.json").write_text(json.dumps(lengths))
    done = subprocess.run(
        [sys.executable, "-m", "tests.families.exports", str(folder)],
        check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1:]
    assert "funcrt.models" not in done.stdout, "the other process imported the models"
    theirs = load_arrays(folder / "out.safetensors")
    ours = run(functions, params, list(state.values()), arrays, lengths)
    for name in ("tokens", "lengths"):
        assert theirs[name].tolist() == ours[name].tolist(), f"other {name}"
    assert ours["lengths"].tolist() == [WIDTH - pad + STEPS for pad in PADS]
    return Result(relative_error(theirs["logits"], ours["logits"]), TOLERANCE)


def run(
    functions: Sequence[Callable[..., Sequence[mx.array]]],
    params: list[mx.array],
    state: list[mx.array],
    inputs: Mapping[str, mx.array],
    lengths: int,
) -> dict[str, mx.array]:
    """What a prefill, padded in one row, and greedy steps give: logits, tokens, lengths."""
    forward, decode = functions
    logits, *state = forward(*params, inputs["tokens"], inputs["mask"], *state)
    kept = [row[pad:] for row, pad in zip(logits, PADS, strict=True)]
    token, chosen = mx.argmax(logits[:, -1], axis=-1).astype(mx.int32), []
    for _ in range(STEPS):
        chosen.append(token)
        token, _, _, logits, *state = decode(*params, token, mx.array([True, True]), *state)
        kept.append(logits)
    return {
        "logits": mx.concatenate(kept), "tokens": mx.stack(chosen), "lengths": state[lengths],
    }  # fmt: skip


def _import(path: Path) -> Callable[..., Sequence[mx.array]]:
    """One function; MLX's stubs allow a tuple here."""
    function = mx.import_function(str(path))
    assert callable(function)
    return function


def main() -> None:
    folder = Path(sys.argv[1])
    arrays = load_arrays(folder / "in.safetensors")
    groups = {key: [arrays[n] for n in sorted(arrays) if n[0] == key and n[1:].isdigit()]
              for key in "ps"}  # fmt: skip
    functions = [_import(folder / f"{name}.mlxfn") for name in FILES]
    lengths = json.loads((folder / "lengths.json").read_text())
    found = run(functions, groups["p"], groups["s"], arrays, lengths)
    mx.save_safetensors(str(folder / "out.safetensors"), found)
    print(*[name for name in sys.modules if name.startswith(("funcrt.models", "converters"))])


if __name__ == "__main__":
    main()
