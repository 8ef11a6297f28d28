"""The `Model` of a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from converters.functional.family import ModuleFamily
from funcrt import params as weights
from funcrt.config import ModelConfig, RopeConfig
from funcrt.errors import ConfigError, ParamsError
from funcrt.model import Model
from funcrt.params import Params, Preparation, Quantization
from funcrt.text import Tokenizer

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class ModuleConfig(ModelConfig):
    """What is known of a module: sizes for estimates, and the config that it was made from.

    Nothing here changes what is computed: the module has settled that.
    """

    source: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Any sizes will do."""

    def to_hf(self) -> dict[str, Any]:
        """The config that the module was made from."""
        return dict(self.source)


class FunctionalModel(Model):
    """A module of mlx-lm in the form of every other model.

    Its params have the module's own names, shapes and dtypes.
    """

    family: ModuleFamily

    def _check_params(self, params: Mapping[str, mx.array]) -> Params:
        """The same arrays in the module's order. Raises ParamsError naming all that differ."""
        expected = self.family.binding.params()
        for name in self.family.binding.packed:
            if f"{name}.scales" not in params and f"{name}.weight" in params:
                expected.pop(f"{name}.scales")
                expected.pop(f"{name}.biases", None)
                expected[f"{name}.weight"] = params[f"{name}.weight"]  # dense
        problems = [f"missing: {name}" for name in expected if name not in params]
        problems += [f"unknown: {name}" for name in params if name not in expected]
        for name, array in expected.items():
            if name in params and params[name].shape != array.shape:
                problems.append(f"{name}: expected {array.shape}, got {params[name].shape}")
        if problems:
            listed = "; ".join(problems[:12])
            raise ParamsError(f"weights do not match the module: {listed}")
        return {name: params[name] for name in expected}

    @cached_property
    def preparation(self) -> Preparation:
        """Dense weights where packed ones are slow; nothing is cast or fused."""
        return weights.choose_preparation(self.config.dtype, self.params, {})

    def prepare(self, stored: Params) -> Params:
        """The same weights, packed ones expanded where this device multiplies those faster."""
        return self._dense(stored) if self.preparation.dequantize else dict(stored)

    def _dense(self, stored: Params) -> Params:
        """Pure: packed matrices expanded, in the dtype of their scales or of the whole."""
        dense = dict(stored)
        whole = weights.FLOATS[self.config.dtype]
        for name, layer in self.family.binding.packed.items():
            if f"{name}.scales" not in stored:
                continue
            mode = getattr(layer, "mode", "affine")
            packing = Quantization(layer.bits, layer.group_size, mode)
            scales = dense.pop(f"{name}.scales")
            dense.pop(f"{name}.biases", None)
            expanded = weights.dequantize(stored, name, packing)
            dense[f"{name}.weight"] = expanded.astype(scales.dtype if mode == "affine" else whole)
        return dense

    def in_float32(self) -> Model:
        """The same module over dense float32 weights."""
        params = weights.cast(self._dense(self.params), "float32")
        old = self.family
        family = ModuleFamily(old.binding, old.make_caches, params, old.by_token)
        config = dataclasses.replace(self.config, dtype=family.layout.dtype)
        return FunctionalModel(config, params, self.tokenizer, family)


def describe(
    family: ModuleFamily, params: Params, config: Mapping[str, Any] | None
) -> ModuleConfig:
    """A config for a module, as far as `config`, its arguments and its arrays tell.

    Raises ConfigError for end-of-text ids that are no numbers.
    """
    args = getattr(family.binding.module, "args", None) or getattr(
        family.binding.module, "config", None
    )
    known: dict[str, Any] = dict(vars(args)) if hasattr(args, "__dict__") else {}
    source = dict(config or {})
    for settings in (source, source.get("text_config")):
        known.update(settings if isinstance(settings, Mapping) else {})
    layout = family.layout
    keys = [entry.shape for entry in layout.entries if entry.kind == "full"]
    tables = [array.shape for array in params.values() if array.shape[:1] == (layout.vocab_size,)]

    def size(fallback: int, *names: str) -> int:
        values = (known.get(name) for name in names)
        return next((v for v in values if type(v) is int and v > 0), fallback)

    hidden = size(tables[0][-1] if tables else 1, "hidden_size", "d_model", "n_embd", "dim")
    kv_heads, head_dim = (keys[0][1], keys[0][3]) if keys else (1, hidden)
    heads = size(int(kv_heads), "num_attention_heads", "n_heads", "n_head", "num_heads")
    return ModuleConfig(
        model_type=str(known.get("model_type", type(family.binding.module).__module__)),
        vocab_size=layout.vocab_size,
        hidden_size=hidden,
        intermediate_size=size(4 * hidden, "intermediate_size", "ffn_hidden_size", "n_inner"),
        num_layers=size(1, "num_hidden_layers", "n_layers", "n_layer", "num_layers"),
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        norm_eps=1e-5,
        rope=RopeConfig(),
        max_positions=size(2048, "max_position_embeddings", "n_positions", "max_seq_len"),
        eos_token_ids=_read_ids(known.get("eos_token_id")),
        dtype=layout.dtype,
        source=source,
    )


def _read_ids(value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"eos_token_id: expected a token id or a list of them, got {value!r}")
    return tuple(ids)


def make_model(
    family: ModuleFamily, config: Mapping[str, Any] | None, tokenizer: Tokenizer | None = None
) -> FunctionalModel:
    """The model of a family made of a module."""
    params = family.binding.params()
    return FunctionalModel(describe(family, params, config), params, tokenizer, family)
