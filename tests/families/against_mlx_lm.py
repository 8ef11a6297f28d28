"""The same weights through mlx-lm's module, after changes that go round its faults."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import converters
from funcrt.errors import ConfigError
from funcrt.model import Model
from funcrt.params import Params
from funcrt.storage import load_arrays
from tests.families.cases import Case, replace_keys, run_plain
from tests.families.mlx_lm_changes import CHANGES, Change
from tests.families.results import TOLERANCE, Result, worst
from tests.helpers import relative_error

import mlx.core as mx

NEEDED = 4 * TOLERANCE  # what mlx-lm's module is off by at least where one change is left out


def mlx_lm(case: Case) -> Result:
    """The golden prompt through mlx-lm's module gives our logits.

    Where `CHANGES` has the case, both sides are changed alike, and none of its changes can be left
    out: without it the module differs, or cannot be made.
    """
    assert importlib.util.find_spec("mlx_lm") is not None, "mlx-lm is not installed"
    changes = CHANGES.get(case.name, ())
    ours, theirs = _load(case, changes)
    results = [Result(_difference(case, ours, theirs), TOLERANCE)]
    for i, change in enumerate(changes):
        try:
            found = _difference(case, *_load(case, [*changes[:i], *changes[i + 1 :]]))
        except ConfigError as error:
            if "mlx-lm cannot make" not in str(error):
                raise
        else:
            results.append(Result(found, NEEDED, f"needed: {change.note}", at_least=True))
    return worst(results)


def _difference(case: Case, ours: Model, theirs: Model) -> float:
    expected = case.whole if ours is case.model else run_plain(ours, case.prompt)
    return relative_error(run_plain(theirs, case.prompt), expected)


def _load(case: Case, changes: Sequence[Change]) -> tuple[Model, Model]:
    """The hand-written model, and mlx-lm's module on the same weights."""
    if not changes:
        return case.model, converters.load(case.folder, dtype="float32", via="mlx_lm")
    hf, params = case.hf, load_arrays(case.folder / "model.safetensors")
    for change in changes:
        hf, params = replace_keys(hf, change.config), change.weights(params)
    ours = _write(case.scratch / "ours", hf, params)
    for change in changes:
        params = change.layout(params)
    theirs = _write(case.scratch / "theirs", hf, params)
    loaded = converters.load(ours, dtype="float32")
    return loaded, converters.load(theirs, dtype="float32", via="mlx_lm")


def _write(folder: Path, hf: dict[str, object], params: Params) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf), "utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), params, {"format": "pt"})
    return folder
