"""`Model`: a config, its weights and the pure function they belong to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from funcrt import cache, low_rank, models, steps, storage
from funcrt import params as weights
from funcrt._version import __version__
from funcrt.buckets import Bucket, BucketPlan, default_plan
from funcrt.cache import FULL, CacheEntry, CacheLayout, CacheSpec, CacheState
from funcrt.calling import CallForm
from funcrt.compiled import Compiled
from funcrt.config import ModelConfig
from funcrt.errors import CacheError, PublishError, SourceError
from funcrt.flat import FlatFunction, flatten
from funcrt.models.family import Family
from funcrt.params import Params, Preparation
from funcrt.publish import Kind, publish, staging
from funcrt.text import TOKENIZER_FILES, Tokenizer

import mlx.core as mx

MADE_BY = "funcrt_version"  # in config.json: only such a folder is ever replaced
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")  # of a large model, see `converters`


def _is_model(folder: Path) -> bool:
    """Whether a folder holds what `Model.save` wrote, and no file of anybody else."""
    names = {path.name for path in folder.iterdir()}
    try:
        made_by_us = MADE_BY in storage.load_json(folder / CONFIG)
    except SourceError:
        return False
    known = {CONFIG, WEIGHTS, f"{WEIGHTS}.index.json", *TOKENIZER_FILES}
    return made_by_us and all(name in known or _SHARD.fullmatch(name) for name in names)


KIND = Kind("a folder of only the files that a saved model has", _is_model)


class Model(CallForm):
    """A language model as a pure function over explicit weights, masks and caches.

    Args:
        config: frozen description; `config.dtype` is the compute dtype.
        params: weights as stored, Hugging Face names, dense or packed.
        tokenizer: for text; None for a model of ids only.
        family: what has the functions of a family; None takes the one of `config.model_type`.
        notes: what a person should know of where it was read from, one sentence each.

    Raises:
        ConfigError: unsupported `model_type`.
        ParamsError: weights do not match the config.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, mx.array],
        tokenizer: Tokenizer | None = None,
        family: Family | None = None,
        *,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.family: Family = family or models.family(config.model_type)
        self.config = config
        self.spec = self.family.param_spec(config)
        self.params = self._check_params(params)
        self.tokenizer = tokenizer
        self.vocab_size = config.vocab_size
        self.notes = notes

    def _check_params(self, params: Mapping[str, mx.array]) -> Params:
        if not any(low_rank.is_low_rank(name) for name in params):
            return weights.check_params(self.spec, params)
        return weights.check_params(self.spec, params, self.family.adaptable(self.config))

    def __repr__(self) -> str:
        config = self.config
        return f"Model({config.model_type}, {config.num_layers} layers, {config.dtype})"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: the tokenizer's, or those of the config where there is none."""
        return self.config.eos_token_ids if self.tokenizer is None else self.tokenizer.eos_token_ids

    def forward(
        self,
        params: Params,
        tokens: mx.array,
        mask: mx.array,
        cache_state: CacheState,
        positions: mx.array | None = None,
    ) -> steps.ForwardOutput:
        """The contract: pure, for stored and prepared params alike.

        Args:
            params: `self.params`, `self.prepared`, or others of the same names and shapes.
            tokens: int32 `[B, T]`.
            mask: bool `[B, 1, T, S]`; a query row without any True is padding.
            cache_state: from `init_cache` or an earlier call.
            positions: int32 `[B, T]` to override slot positions (trees, prefix tricks).

        Returns:
            `(logits [B, T, V], cache_state)`.

        Raises:
            InputError, CacheError: when traced, shapes or dtypes that do not fit.
        """
        state = self.check_cache(cache_state)
        return steps.forward(self.family, self.config, params, tokens, mask, state, positions)

    def init_cache(
        self,
        batch: int,
        capacity: int,
        kv_bits: int | None = None,
        max_tokens: int | None = None,
    ) -> CacheState:
        """An empty cache state.

        Args:
            batch: rows.
            capacity: slots, one of them scratch.
            kv_bits: 8 or 4 packs keys and values; None keeps them in the compute dtype.
            max_tokens: layers with a sliding window keep a ring for calls of at most this many
                tokens; None keeps every slot.

        Raises:
            CacheError: sizes, or `kv_bits` or `max_tokens` that the model cannot have.
        """
        return cache.init_cache(self.cache_spec(CacheLayout(kv_bits, max_tokens)), batch, capacity)

    def cache_spec(self, layout: CacheLayout) -> CacheSpec:
        """The arrays of a cache state in a layout. Raises CacheError if it is impossible."""
        cache.check_layout(layout)
        spec = self._entries(layout)
        if layout.kv_bits is not None and not any(entry.kind == "quantized" for entry in spec):
            raise CacheError(
                f"kv_bits={layout.kv_bits} packs nothing: no layer of this model keeps full keys "
                "and values (rings of a window stay as they are); leave kv_bits out"
            )
        return spec

    def _entries(self, layout: CacheLayout) -> CacheSpec:
        spec = self.family.cache_spec(self.config, layout)
        if not self.adapter_count:
            return spec
        return (spec[0], CacheEntry(low_rank.ROWS, ("B",), "int32"), *spec[1:])

    def check_cache(self, state: CacheState) -> CacheState:
        """The same arrays in the fixed order. Raises CacheError for a cache of another model."""
        layout = cache.layout_of(state, self._entries)
        return cache.check_state(self.cache_spec(layout), state)

    def choose_layout(self, plan: BucketPlan, kv_bits: int | None = None) -> CacheLayout:
        """The layout for a plan: rings where a window makes them smaller than full caches."""
        longest, largest = plan.tokens[-1], plan.capacity[-1]
        rings, whole = (
            cache.state_bytes(self._entries(CacheLayout(None, max_tokens)), 1, largest)
            for max_tokens in (longest, None)
        )
        return CacheLayout(kv_bits, longest if rings < whole else None)

    @cached_property
    def preparation(self) -> Preparation:
        """How stored weights become those that run on this device."""
        fusions = self.family.fusions(self.config)
        return weights.choose_preparation(self.config.dtype, self.params, fusions)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal config and weights, whatever the compute dtype."""
        config = {**self.config.to_dict(), "dtype": None, "architectures": None}
        return weights.fingerprint(self.params, config)

    def prepare(self, stored: Params) -> Params:
        """Pure: stored weights -> those that `compiled` and exported functions take."""
        return weights.prepare(stored, self.spec, self.preparation)

    @cached_property
    def prepared(self) -> Params:
        """`prepare(self.params)`, done once; stored arrays then are rows of what they are in."""
        ready, fusions = self.prepare(self.params), self.preparation.fusions
        for name in weights.evaluate_in_turn(ready):
            weights.share_rows(self.params, ready, name, fusions)
        return ready

    def with_params(
        self, params: Mapping[str, mx.array], notes: tuple[str, ...] | None = None
    ) -> Model:
        """The same model with other weights: a fine-tune, or with an adapter.

        Args:
            params: all of them, of any dtype and packing; changes of low rank may come or go.
            notes: see `Model`; None takes those of this one.

        Raises ParamsError if they do not match the config.
        """
        notes = self.notes if notes is None else notes
        return type(self)(self.config, params, self.tokenizer, self.family, notes=notes)

    def in_float32(self) -> Model:
        """The same model over dense, unfused float32 weights, which are computed when used."""
        preparation = weights.Preparation("float32", dequantize=True, fusions={})
        params = weights.prepare(self.params, self.spec, preparation)
        config = replace(self.config, dtype="float32")
        return Model(config, params, self.tokenizer, self.family)

    @property
    def config_values(self) -> Mapping[str, Any]:
        """The config as plain values."""
        return self.config.to_dict()

    @property
    def whole_cache_spec(self) -> CacheSpec:
        """The arrays of a cache state that keeps every slot."""
        return self.cache_spec(FULL)

    @cached_property
    def adapter_count(self) -> int:
        """How many adapters the rows of a batch can choose from."""
        return low_rank.count({name: array.shape for name, array in self.params.items()})

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the prepared weights, and of stored ones that live beside them."""
        ready = self.prepare(self.params)  # lazy: only shapes and dtypes are looked at
        homes = weights.find_homes(self.params, ready, self.preparation.fusions)
        kept = sum(
            array.nbytes
            for name, array in self.params.items()
            if name not in homes or homes[name].dtype != array.dtype
        )
        return sum(array.nbytes for array in ready.values()), kept

    @property
    def default_plan(self) -> BucketPlan:
        """Declared shapes that fit what the model was trained for."""
        limited = self.config.position_limit is not None
        return default_plan(self.config.max_positions, limited=limited)

    def compiled(
        self, plan: BucketPlan | None = None, kv_bits: int | None = None, eager: bool = False
    ) -> Compiled:
        """The step functions over `plan`; shapes compile when they are first used.

        Args:
            plan: declared shapes; None takes `default_plan`.
            kv_bits: 8 or 4 packs the cache's keys and values.
            eager: run without `mx.compile`.
        """
        plan = plan or self.default_plan
        layout = self.choose_layout(plan, kv_bits)
        return Compiled(
            lambda name, bucket: self.flat_step(name, bucket, layout, plan),
            params=list(self.prepared.values()),
            cache_spec=self.cache_spec(layout),
            plan=plan,
            vocab_size=self.vocab_size,
            dtype=self.config.dtype,
            eager=eager,
        )

    def flat_step(
        self,
        name: str,
        bucket: Bucket,
        layout: CacheLayout = FULL,
        plan: BucketPlan | None = None,
    ) -> FlatFunction:
        """The flat form of a row of `steps.STEPS` for one bucket; `grow` goes by the plan."""
        grown = plan.next_capacity(bucket.capacity) if plan and steps.STEPS[name].grows else None
        step = steps.make_step(name, self.family, self.config, grown)
        return flatten(step, *self.example(name, bucket, layout))[0]

    def example(
        self, name: str, bucket: Bucket, layout: CacheLayout = FULL
    ) -> list[Params | mx.array | CacheState]:
        """Arguments of a step with the right structure, shapes and dtypes (zeros, unevaluated)."""
        step = steps.STEPS[name]
        arguments: list[Params | mx.array | CacheState] = []
        if step.has_params:
            arguments.append(self.prepared)
        for label in step.inputs:
            shape, dtype = steps.input_shape(label, bucket, self.vocab_size, self.config.dtype)
            arguments.append(mx.zeros(shape, dtype))
        if step.has_state:
            spec = self.cache_spec(layout)
            arguments.append(cache.init_cache(spec, bucket.batch, bucket.capacity))
        return arguments

    def choose_size(self, rows: int, tokens: int) -> tuple[int, int]:
        """`rows`, and the least power of two from 256 up that holds `tokens` and a scratch slot.

        Less where the model has fewer positions, but never too small for the tokens.
        """
        capacity, limit = max(256, 1 << tokens.bit_length()), self.config.position_limit
        return rows, capacity if limit is None else min(capacity, max(limit, tokens) + 1)

    def _run(
        self,
        tokens: mx.array,
        mask: mx.array,
        state: CacheState,
        looks_back: bool,
        positions: mx.array | None,
    ) -> tuple[mx.array, CacheState]:
        return self.forward(self.prepared, tokens, mask, state, positions)

    def save(self, folder: str | Path) -> None:
        """Write config, weights as stored, and tokenizer as a Hugging Face style folder.

        mlx-lm reads the same folder, unless experts that it stacks are packed one by one here
        (`funcrt convert` stacks them for it). It appears as a whole or not at all; an older one
        that holds nothing but these files is replaced.

        Raises:
            PublishError: something else is at `folder`.
            SourceError: the folder cannot be written.
        """
        target = Path(folder).absolute()
        try:
            with staging(target, KIND) as place:
                storage.save_arrays(place / WEIGHTS, self.params, {"format": "mlx"})
                config = {**self.config.to_hf(), **self._quantization(), MADE_BY: __version__}
                storage.save_json(place / CONFIG, config)
                if self.tokenizer is not None:
                    self.tokenizer.save(place)
                publish(place, target, KIND)
        except PublishError:
            raise
        except (OSError, RuntimeError) as error:
            raise SourceError(f"cannot write the model to {folder}: {error}") from error

    def _quantization(self) -> dict[str, object]:
        """The `quantization` entry of MLX checkpoints: the commonest packing and the exceptions."""
        packings = weights.packings(self.spec, self.params)
        if not packings:
            return {}
        common = max(set(packings.values()), key=list(packings.values()).count)
        exceptions = {b: p._asdict() for b, p in packings.items() if p != common}
        return {"quantization": {**common._asdict(), **exceptions}}


def load_model(folder: str | Path, dtype: mx.Dtype | str | None = None) -> Model:
    """Read a folder that `Model.save` wrote.

    Args:
        folder: holds config.json, model.safetensors and, for text, tokenizer.json.
        dtype: casts floating weights and computes in it; None keeps them and picks the compute
            dtype by device, see `funcrt.params.choose_dtype`.

    Raises:
        SourceError: a file is missing or damaged.
        ConfigError, ParamsError: they do not fit each other.
    """
    folder = Path(folder)
    stored = storage.load_arrays(folder / WEIGHTS)
    hf = storage.load_json(folder / CONFIG)
    if dtype is not None:
        stored = weights.cast(stored, weights.dtype_name(dtype))
    config = models.read_config(hf, weights.choose_dtype(stored, dtype))
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    model = Model(config, stored, tokenizer)
    mx.eval(model.params)  # what is still to be read would belong to this thread
    return model
