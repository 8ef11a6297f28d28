"""Every feature of a case matters: switched off or changed, it moves the logits.

Otherwise an implementation that leaves it out would equal the golden logits too. Each kind of
tensor and each key of config.json is tried without being named. What a family has besides (a
window on the wrong layers, a norm before instead of after) its author adds to `EXTRA`; keys that
cannot matter in a case go to `IDLE`. Names of both that do not exist in the case are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from funcrt.errors import FuncrtError
from funcrt.model import Model
from funcrt.params import Params
from tests.families import (
    deepseek_features,
    expert_features,
    gemma_features,
    gpt_features,
    llama_features,
    recurrent_features,
)
from tests.families.cases import Case, replace_keys, run_plain
from tests.families.results import BLINDNESS, Result, worst
from tests.helpers import relative_error, to_numpy

import mlx.core as mx

Change = Mapping[str, Any]  # keys of config.json; a dot leads into a dict

# Case, or model_type -> name of a feature -> what switches it off.
EXTRA: dict[str, Mapping[str, Change]] = {
    "mistral": {"with a window": {"sliding_window": 128}},
    "mistral-window": {"without a window": {"sliding_window": None}},
    **deepseek_features.EXTRA,
    **gpt_features.EXTRA,
    **expert_features.EXTRA,
    **llama_features.EXTRA,
    **gemma_features.EXTRA,
    **recurrent_features.EXTRA,
}

# Case, or model_type, or "*" for all -> keys that change nothing there, and why.
IDLE: dict[str, set[str]] = {
    "*": {
        # Of training, of text, of bookkeeping; or a limit that nothing is computed from.
        "architectures", "attention_dropout", "attn_pdrop", "bos_token_id", "dtype", "embd_pdrop",
        "eos_token_id", "hidden_dropout", "initializer_range", "max_position_embeddings",
        "model_type", "pad_token_id", "pretraining_tp", "resid_pdrop", "torch_dtype",
        "transformers_version", "use_cache",
    },
    **deepseek_features.IDLE,
    **gpt_features.IDLE,
    **expert_features.IDLE,
    **llama_features.IDLE,
    **gemma_features.IDLE,
    **recurrent_features.IDLE,
}  # fmt: skip


def features(case: Case) -> Result:
    """The feature that moves the logits least."""
    results = []
    for name, params in _tensors(case.model.params):
        results.append(Result(_moved(case, case.model, params), BLINDNESS, name, at_least=True))
    for name, changes in _changes(case):
        moved = max(_moved_by(case, change) for change in changes)
        results.append(Result(moved, BLINDNESS, name, at_least=True))
    found = worst(results)
    names = ", ".join(result.note for result in results if not result.passed)
    return found if found.passed else found._replace(note=names)


def _moved_by(case: Case, change: Change) -> float:
    try:
        model = case.load(replace_keys(case.hf, change))
        return _moved(case, model, model.params)
    except FuncrtError:
        return 1.0  # a size that no longer fits the tensors, a value that is not supported


def _moved(case: Case, model: Model, params: Params) -> float:
    return relative_error(run_plain(model, case.prompt, params), case.whole)


def _tensors(params: Params) -> Iterator[tuple[str, Params]]:
    """Each kind of tensor (the same name in any layer, any expert) without what it says."""
    kinds: dict[str, list[str]] = {}
    for name in params:
        kinds.setdefault(re.sub(r"\d+", "N", name), []).append(name)
    for kind, names in kinds.items():
        yield kind, {**params, **{name: _plain(params[name]) for name in names}}


def _plain(array: mx.array) -> mx.array:
    """Zeros; but ones for a vector that scales around one."""
    around_one = array.ndim == 1 and 0.5 < to_numpy(array).mean() < 1.5
    return mx.full(array.shape, 1 if around_one else 0, array.dtype)


def _changes(case: Case) -> Iterator[tuple[str, list[Change]]]:
    """Names of features, and changes of which one must move the logits."""
    idle, extra = set[str](), dict[str, Change]()
    for place in ("*", case.model_type, case.name):
        idle |= IDLE.get(place, set())
        extra |= EXTRA.get(place, {})
    unknown = {key for key in IDLE.get(case.name, ()) if key.split(".")[0] not in case.hf}
    assert not unknown, f"IDLE[{case.name!r}] names keys that are not in its config: {unknown}"
    for key, value in _keys(case.hf):
        if key not in idle:
            for others in _others(key, value):
                yield f"{key} = {others[0]!r}", [{key: other} for other in others]
    for name, change in extra.items():
        if (
            replace_keys(case.hf, change) != case.hf
        ):  # a model type's may be what one of its cases has
            yield name, [change]


def _keys(hf: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in hf.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{path}{key}.")
        else:
            yield path + key, value


def _others(key: str, value: Any) -> list[list[Any]]:
    """What is tried instead of a value, in groups of which one must matter; none for texts."""
    if isinstance(value, bool):
        return [[not value]]
    if isinstance(value, int) and "window" in key:
        return [[value + 1], [value - 1]]
    if isinstance(value, int):
        return [[value + 1, 2 * value, 4 * value]]
    if isinstance(value, float):
        return [[value * 1e4 if "eps" in key else 1.5 * value or 0.5]]
    if isinstance(value, list) and value and isinstance(value[0], float):
        return [[[1.5 * x for x in value]]]
    return []
