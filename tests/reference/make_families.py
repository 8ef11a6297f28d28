"""Make a tiny checkpoint of each model family and the logits that transformers computes from it.

    python make_families.py [CASE ...]            write families/ beside this file
    python make_families.py --check [CASE ...]    make it again elsewhere, compare; exit 1 where it
                                                  differs

Needs the pinned libraries of requirements.txt and nothing of this project. What is written:

    families/CASE/config.json          as a published checkpoint of the family has it
    families/CASE/model.safetensors    its tensors under the names that published files use
    families/CASE/golden.safetensors   tokens [T], positions [P], logits [P, V] float32, argmax [T],
                                       from a whole-prompt, uncached, eager float32 run; where the
                                       way of feeding matters also chunks and chunked_logits [P, V]
    families/defaults.json             per model_type a config.json that leaves out what it can, and
                                       what transformers fills in
    families/versions.json             libraries that made the above
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checking import check, difference, save_versions
from family_cases import CASES
from family_weights import Case
from making import (
    HEADER,
    compute_logits,
    load_folder,
    load_model,
    measure,
    read_arguments,
    save_arrays,
    write_folder,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

HERE = Path(__file__).parent
POSITIONS = [0, 1, 23, 24, 25, 47, 128, 300, 538, 539]  # around a window of 24 and far behind it
BLINDNESS = 2e-3  # of the largest logit: what every tensor and setting must move
# Sizes, and what says nothing about results: the rest of a config has a default to write down.
KEPT = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "n_embd",
    "n_head", "n_layer", "num_hidden_layers", "num_attention_heads", "n_positions", "n_ctx",
    "torch_dtype", "dtype", "transformers_version", "use_cache",
)  # fmt: skip
# Its class insists that they fit the width.
SIZES = {"mamba2": ("num_heads", "head_dim")}
# What the base class of all configs adds, whatever the family.
GENERIC = set(PreTrainedConfig().to_dict()) - {"bos_token_id", "eos_token_id", "pad_token_id"}


def read_config(config: dict[str, Any]) -> Any:
    """The configuration object that transformers makes of a config.json."""
    return AutoConfig.for_model(**json.loads(json.dumps(config)))


def read_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers saves for a config.json."""
    model = AutoModelForCausalLM.from_config(read_config(case.config))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_original_format=not case.stacked)
        tensors = load_file(Path(folder) / "model.safetensors")
    return {name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())}


def make_weights(name: str, case: Case) -> dict[str, torch.Tensor]:
    """Random weights under the names of published files."""
    shapes = dict(case.ignored)
    for key, shape in read_shapes(case).items():
        for pattern, replacement in case.renamed.items():
            key = re.sub(pattern, replacement, key)
        shapes[key] = shape
    tensors = {}
    for key, shape in shapes.items():
        dtype = "float32" if key.endswith("e_score_correction_bias") else case.dtype
        values = torch.from_numpy(case.draw(name, key, shape)).to(torch.bfloat16)
        tensors[key] = values.to(getattr(torch, dtype))
    return tensors


def measure_tensors(
    case: Case, model: PreTrainedModel, tokens: np.ndarray, logits: np.ndarray
) -> dict[str, float]:
    """How far the logits move when all tensors of a kind are as if they were not there."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(tensor)
    moved = {}
    for kind, tensors in kinds.items():
        kept = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.fill_(case.rule_of(kind).neutral)
        moved[kind] = difference(compute_logits(model, tokens), logits)
        for tensor, values in zip(tensors, kept, strict=True):
            tensor.copy_(values)
    return moved


def measure_settings(
    case: Case, weights: dict[str, torch.Tensor], tokens: np.ndarray, logits: np.ndarray
) -> dict[str, float]:
    """How far the logits move with each change of the config."""
    return {
        label: difference(
            compute_logits(load_model({**case.config, **changes}, weights), tokens), logits
        )
        for label, changes in case.off.items()
    }


def make_case(name: str, folder: Path) -> None:
    """Write one case; exits where its golden would be blind to a tensor or a setting."""
    case = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    weights = make_weights(name, case)
    write_folder(folder, case.config, weights)
    load = partial(load_folder, folder)
    measured = measure(name, load, POSITIONS, case.chunks, depends=case.depends)
    save_arrays(measured.arrays, folder / "golden.safetensors")
    tokens = measured.arrays["tokens"].astype(np.int64)
    moved = measure_tensors(case, load(), tokens, measured.logits)
    moved |= measure_settings(case, weights, tokens, measured.logits)
    blind = {key: f"{value:.1e}" for key, value in moved.items() if value < BLINDNESS}
    if blind:
        raise SystemExit(f"{name}: the logits hardly show {blind}")


def read_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config.json that leaves out all it can."""
    kept = (*KEPT, *SIZES.get(config["model_type"], ()))
    given = {key: value for key, value in config.items() if key in kept}
    heads = "n_head" if "n_head" in given else "num_attention_heads"
    if heads in given:
        given[heads] = 16  # other than the key/value heads that a class may assume
    known = {*given, *GENERIC} - {"tie_word_embeddings"}
    filled = read_config(given).to_dict()
    return {"config": given, "filled": {k: v for k, v in filled.items() if k not in known}}


def save_defaults(folder: Path) -> None:
    """Write defaults.json: one entry for each model_type, whichever of its cases comes first."""
    configs = {case.config["model_type"]: case.config for case in reversed(CASES.values())}
    defaults = {
        kind: read_defaults(config)
        for kind, config in sorted(configs.items())
        if "text_config" not in config
    }
    (folder / "defaults.json").write_text(json.dumps(defaults, indent=1) + "\n")


def make(folder: Path, names: list[str]) -> None:
    """Write cases and all defaults under `folder`; print what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    print(HEADER)
    for name in names:
        make_case(name, folder / name)
    save_defaults(folder)
    save_versions(folder)


def main() -> int:
    arguments = read_arguments("Make the references of the model families.", cases=list(CASES))
    work = partial(make, names=arguments.cases or list(CASES))
    if arguments.check:
        return check(HERE / "families", work, complete=not arguments.cases)
    work(HERE / "families")
    return 0


if __name__ == "__main__":
    sys.exit(main())
