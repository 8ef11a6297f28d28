"""Random checkpoints of any family, for what the golden ones do not show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import converters
from funcrt.model import Model
from funcrt.models import FAMILIES, read_config
from funcrt.params import Params
from tests.families.cases import run_plain
from tests.helpers import TOLERANCE, relative_error
from tests.reference.golden import FAMILIES as FOLDER

import mlx.core as mx
import numpy as np


def draw_params(config: dict[str, Any]) -> Params:
    """Random weights of a config.json; matrices keep the size of what they multiply."""
    rng, params = np.random.default_rng(0), Params()
    for name, shape in FAMILIES[config["model_type"]].param_spec(read_config(config)).items():
        around_one = len(shape) == 1 and name.endswith("weight")
        scale = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
        params[name] = mx.array(rng.normal(around_one, scale, shape).astype(np.float32))
    return params


def assert_filled_in(model_type: str, **sizes: int) -> None:
    """What a config.json leaves out reads as what transformers fills in there."""
    said = json.loads((FOLDER / "defaults.json").read_text("utf-8"))[model_type]
    given = {**said["config"], **sizes}
    assert read_config(given) == read_config({**given, **said["filled"]})


def write_folder(folder: Path, config: dict[str, Any], params: Params) -> Path:
    """Lay a checkpoint out as a Hugging Face folder."""
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), params)
    return folder


def some_tokens(count: int = 40) -> list[int]:
    """Random ids of the tiny vocabularies."""
    return [int(token) for token in np.random.default_rng(1).integers(1, 96, count)]


def assert_as_mlx_lm(ours: Model, folder: Path) -> None:
    """The folder's weights through mlx-lm's module give our logits."""
    theirs = converters.load(folder, dtype="float32", via="mlx_lm")
    found, expected = (run_plain(model, some_tokens()) for model in (ours, theirs))
    assert relative_error(found, expected) <= TOLERANCE
