"""Model families: one file each, found by `model_type` as Hugging Face spells it."""

from __future__ import annotations

from funcrt.errors import ConfigError
from funcrt.models import llama
from funcrt.models.family import Family

FAMILIES: dict[str, Family] = {"llama": llama, "mistral": llama}


def family(model_type: str) -> Family:
    """The file with `param_spec`, `cache_spec`, `fusions`, `hidden`, `unembed` of a family.

    Raises ConfigError naming the supported types.
    """
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
