"""What every checkpoint format is read into, and the one way from there to a `Model`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from converters import mlx_names, published
from funcrt.config import ModelConfig
from funcrt.errors import ParamsError
from funcrt.model import Model
from funcrt.models import FAMILIES, read_config
from funcrt.params import Params, cast, choose_dtype, dtype_name
from funcrt.text import Tokenizer

import mlx.core as mx

# Buffers that old transformers versions saved; every reader computes them from the config.
_BUFFERS = (".rotary_emb.inv_freq",)
_PREFIX = "transformer."  # of all names but the head's, in files of a GPT-2 saved with its head
_HEADS = ("lm_head", "embed_out")
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of experts


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face config, tensors under Hugging Face names, and a tokenizer if there is one.

    `notes` are what a person should know of what was read, one sentence each.
    """

    config: dict[str, Any]
    params: Params
    tokenizer: Tokenizer | None
    notes: tuple[str, ...] = ()


def make_model(
    checkpoint: Checkpoint,
    dtype: mx.Dtype | str | None,
    ignore: Collection[str],
    *,
    lazy: bool = False,
) -> Model:
    """Check a checkpoint against its config and bind the two.

    Args:
        checkpoint: as read.
        dtype: compute in it and cast floating leaves to it; None keeps what is stored and leaves
            the choice to `funcrt.params.choose_dtype`.
        ignore: config keys and tensor names to leave out.
        lazy: leave tensors unread, as they are stored, and their scales unchecked.

    Raises:
        ConfigError: see `funcrt.models.read_config`.
        ParamsError: missing, unknown or misshapen tensors, all listed; scales that are no numbers.
    """
    params = {name: array for name, array in checkpoint.params.items() if name not in ignore}
    config = read_config(checkpoint.config, choose_dtype(params, dtype), ignore)
    _check_counts(config, params)
    params = mlx_names.restore(config, published_names(config, params))
    params = drop_extras(config, stack_experts(config, params))
    if dtype is not None and not lazy:
        params = cast(params, dtype_name(dtype))
    model = Model(config, params, checkpoint.tokenizer, notes=checkpoint.notes)
    if lazy:
        return model
    published.check_scales(model.spec, model.params)
    mx.eval(model.params)  # reading is lazy: a file replaced later must not change the model
    return model


def _check_counts(config: ModelConfig, params: Params) -> None:
    """Raise ParamsError before anything is built for each layer and expert that a config claims."""
    if config.num_layers > len(params):
        raise ParamsError(f"config has {config.num_layers} layers, but only {len(params)} tensors")
    experts = getattr(config, "num_experts", 0)
    rows = max((array.shape[0] for array in params.values() if array.ndim), default=0)
    if experts > rows:  # which a router has for each of them
        raise ParamsError(f"config has {experts} experts, but no tensor has as many rows")


def published_names(config: ModelConfig, params: Params) -> Params:
    """Tensors under the names of the family, which are those of its first files."""
    if any(name.startswith(_PREFIX) for name in FAMILIES[config.model_type].param_spec(config)):
        return params
    return {name.removeprefix(_PREFIX): array for name, array in params.items()}


def stack_experts(config: ModelConfig, params: Params) -> Params:
    """Experts that transformers saved one by one, as stacks where the family has them so."""
    stacked = dict(params)
    for name, shape in FAMILIES[config.model_type].param_spec(config).items():
        experts, _, stack = name.rpartition(".")
        parts = _STACKS.get(stack, ())
        members = [f"{experts}.{i}.{part}.weight" for i in range(shape[0]) for part in parts]
        sizes = {params[member].shape if member in params else None for member in members}
        if members and sizes == {(shape[1] // len(parts), shape[2])}:
            stacked[name] = mx.concatenate([stacked.pop(m) for m in members]).reshape(shape)
    return stacked


def drop_extras(config: ModelConfig, params: Params) -> Params:
    """Leave out tensors that change nothing, or repeat what config or other tensors say.

    Raises ParamsError if a tied last projection differs from the embedding that it should repeat.
    """
    unused = config.unused_tensors()
    kept = {
        name: array
        for name, array in params.items()
        if not name.endswith(_BUFFERS) and not name.startswith(unused)
    }
    if not config.tie_word_embeddings:
        return kept
    embedding = FAMILIES[config.model_type].network(config).tied_to
    for name in [f"{head}.{part}" for head in _HEADS for part in ("weight", "scales", "biases")]:
        array = kept.pop(name, None)
        other = f"{embedding}.{name.rpartition('.')[2]}"
        if array is not None and (other not in kept or not mx.array_equal(array, kept[other])):
            raise ParamsError(
                f"{name} differs from {other}, but the config ties them; "
                "set tie_word_embeddings to false in config.json to use it, "
                f"or name {name} in `ignore`"
            )
    return kept
