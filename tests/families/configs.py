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
    "model_type", "torch_dtype", "dtype", "transformers_version", "cache_implementation",
}  # fmt: skip
