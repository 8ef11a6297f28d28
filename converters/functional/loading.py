"""Checkpoints whose model_type has no family here, through mlx-lm's module for it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from converters import huggingface
from converters.functional import functionalize, mlx_lm_source
from converters.functional.binding import Binding
from converters.functional.family import ModuleFamily
from converters.functional.layout import make_stand_ins
from converters.functional.model import make_model
from funcrt.model import Model
from funcrt.params import FLOATS, choose_dtype
from funcrt.storage import load_json
from funcrt.text import Tokenizer

import mlx.core as mx


def check(folder: Path) -> None:
    """Raise what `load` would raise for a folder's config.json, without any weights."""
    config = load_json(folder / huggingface.CONFIG)
    functionalize(mlx_lm_source.make_module(config), config)


def load(
    folder: Path,
    dtype: mx.Dtype | str | None = None,
    ignore: Collection[str] = (),
    *,
    lazy: bool = False,
) -> Model:
    """The model of a checkpoint folder, functionalized.

    Args:
        folder: config.json and safetensors files, in any form that mlx-lm reads.
        dtype: see `converters.load`; what the module keeps in float32 stays.
        ignore: "tokenizer" leaves the tokenizer out.
        lazy: leave tensors unread, as they are stored.

    Raises:
        SourceError: mlx-lm is missing; files are missing, damaged or do not fit.
        ConfigError: mlx-lm has no such module, or refuses the config.
        ModuleError: the module cannot be turned into a pure function.
        TextError: see `Tokenizer.from_folder`.
    """
    huggingface.check_weights(folder)
    module, config = mlx_lm_source.load_module(folder)
    caches = mlx_lm_source.make_caches(module)
    binding = Binding(module, mlx_lm_source.dense_kinds())
    if not lazy:
        binding.replace(_cast(module, binding.params(), dtype))
    params = binding.params()
    by_token = mlx_lm_source.needs_single_tokens(module, caches)
    family = ModuleFamily(binding, make_stand_ins(caches), params, by_token)
    has_tokenizer = (folder / "tokenizer.json").is_file() and "tokenizer" not in ignore
    tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
    model = make_model(family, config, tokenizer)
    if not lazy:
        mx.eval(model.params)  # a file replaced later must not change the model
    return model


def _cast(
    module: Any, params: dict[str, mx.array], dtype: mx.Dtype | str | None
) -> dict[str, mx.array]:
    wanted = FLOATS[choose_dtype(params, dtype)]
    keep = getattr(module, "cast_predicate", lambda _: True)
    return {
        name: array.astype(wanted) if array.dtype in FLOATS.values() and keep(name) else array
        for name, array in params.items()
    }
