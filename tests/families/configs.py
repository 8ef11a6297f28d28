"""Values of a config that would change the result and that nobody implements: they raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from funcrt.errors import ConfigError
from tests.families.cases import Case
from tests.families.results import Result

NONSENSE = "spiral"
_ROPE = ("rope_parameters", "rope_scaling")
# Strings that are no choices.
_NO_CHOICE = {
    "model_type", "torch_dtype", "dtype", "transformers_version",
    "cache_implementation", "summary_type",
}  # fmt: skip


def unknown_config(case: Case) -> Result:
    """How many of the changed configs load, or are refused by an error that names nothing."""
    wrong = []
    for words, hf in _changed(case.hf):
        try:
            case.load(hf)
        except ConfigError as error:
            if not any(word in str(error) for word in words):
                wrong.append(f"{words[0]} is not named by: {error}")
        else:
            wrong.append(f"{words[0]} loads")
    return Result(len(wrong), 0.0, "; ".join(wrong))


def _changed(hf: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Words of which the error must name one, and a config that must raise."""
    yield ["spiral_scale"], {**hf, "spiral_scale": 2.0}
    yield from _ropes(hf)
    activations = [key for key in hf if "act" in key.split("_") or "activation" in key.split("_")]
    if not any(isinstance(hf[key], str) for key in activations):
        yield [NONSENSE, "hidden_act"], {**hf, "hidden_act": NONSENSE}
    for key, value in hf.items():
        if isinstance(value, str) and key not in _NO_CHOICE:
            yield [NONSENSE, key], {**hf, key: NONSENSE}
        if (
            isinstance(value, list)
            and value
            and isinstance(value[0], str)
            and key != "architectures"
        ):
            yield [NONSENSE, key], {**hf, key: [NONSENSE, *value[1:]]}


def _ropes(hf: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """A rope type that does not exist, in the spelling that the config has."""
    names = [name for name in _ROPE if hf.get(name)] or ["rope_scaling"]
    for name in names:
        old = hf.get(name) or {}
        places = [key for key, value in old.items() if isinstance(value, dict)]  # per layer type
        for place in places or [None]:
            inner = dict(old if place is None else old[place])
            inner.pop("type", None)
            inner |= {"rope_type": NONSENSE, "factor": 2.0}
            yield [NONSENSE, name], {**hf, name: inner if place is None else {**old, place: inner}}
