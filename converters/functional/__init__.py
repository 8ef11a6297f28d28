"""Any module of mlx-lm, or one written like them, as a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from funcrt.errors import ModuleError

if TYPE_CHECKING:
    from funcrt.model import Model

    from mlx.nn.layers.base import Module

__all__ = ["functionalize"]


def functionalize(module: Module, config: Mapping[str, Any] | None = None) -> Model:
    """A module of mlx-lm as the same `Model` as every other: pure, compiled, exported.

    The module's code runs as it is, with its parameters taken from an argument and its caches
    from explicit arrays; it is left exactly as it was found after every call and every trace.

    Args:
        module: called as `module(tokens, cache=caches)`, with logits `[B, T, V]` as the result;
            `make_cache()` or `layers` say which caches it wants.
        config: the Hugging Face config that it was made from, for sizes and end-of-text ids.

    Returns:
        A model whose params are the module's own arrays under the module's own names.

    Raises:
        ModuleError: caches of an unknown class or without fixed shapes, or code that depends on
            the values of arrays; the line is named.
        ConfigError: end-of-text ids that are no numbers.
        SourceError: mlx-lm is missing, or a version that is not supported.
    """
    from converters.functional import mlx_lm_source
    from converters.functional.binding import Binding
    from converters.functional.family import ModuleFamily
    from converters.functional.layout import make_stand_ins
    from converters.functional.model import make_model

    if not callable(module):
        raise ModuleError(f"expected a module of mlx-lm, got {type(module).__name__}")
    caches = mlx_lm_source.make_caches(module)
    binding = Binding(module, mlx_lm_source.dense_kinds())
    by_token = mlx_lm_source.needs_single_tokens(module, caches)
    family = ModuleFamily(binding, make_stand_ins(caches), binding.params(), by_token)
    return make_model(family, config)
