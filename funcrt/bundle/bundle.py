"""`Bundle`: an exported model, called like any other. No model's code is imported for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funcrt import cache, low_rank, streams
from funcrt.buckets import Bucket, BucketPlan
from funcrt.bundle.format.checks import load_manifest
from funcrt.bundle.format.manifest import DTYPES, FunctionEntry, Manifest, describe_arrays
from funcrt.bundle.graphs import import_graph
from funcrt.bundle.weights import as_stored, load_stored
from funcrt.cache import CacheSpec, CacheState
from funcrt.calling import CallForm
from funcrt.compiled import Compiled
from funcrt.errors import BundleError, CapacityError, InputError
from funcrt.flat import FlatFunction
from funcrt.params import Params, evaluate_in_turn, fingerprint
from funcrt.tracing import read

import mlx.core as mx

if TYPE_CHECKING:
    from funcrt.text import Tokenizer


class Bundle(CallForm):
    """An exported model, run through its own graphs.

    Attributes:
        folder: where it was read from.
        manifest: what it holds.
        digest: sha256 of the manifest's file, which stands for everything that it lists.
        device: device class whose functions it runs.
        target: what the manifest holds for that device class.
        vocab_size: V.
        max_positions: longest text that the model was trained for.
        dtype: of logits and cache.
        plan: the declared buckets.
        cache_spec: the arrays of a cache state.
        tokenizer: None for a model of ids only.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        digest: str,
        device: str,
        stored: Params,
        graphs: dict[str, bytes],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.digest = digest
        self.device = device
        self.target = manifest.targets[device]
        self.vocab_size = manifest.vocab_size
        self.max_positions = manifest.max_positions
        self.dtype = self.target.dtype
        self.plan = self.target.plan
        self.cache_spec = self.target.cache_spec
        self.tokenizer = tokenizer
        self._functions = self.target.step_functions()
        self._stored = stored
        self._graphs = graphs
        self._imported: dict[str, FlatFunction] = {}

    def __repr__(self) -> str:
        return f"Bundle({str(self.folder)!r}, {self.dtype}, {self.device})"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: the tokenizer's, or those of the config where there is none."""
        if self.tokenizer is not None:
            return self.tokenizer.eos_token_ids
        return tuple(self.manifest.model.get("eos_token_ids", ()))

    @cached_property
    def prepared(self) -> list[mx.array]:
        """The weights that graphs take, made by the exported `prepare`.

        Raises BundleError where they cannot be read any more.
        """
        entry = self.target.prepare_function()
        if len(self._stored) < len(self.stored_shapes):  # let go of, and nothing came of it
            raise BundleError(f"{self.folder}: could not prepare its weights before: load it again")
        with streams.turn():
            made = list(self._import(entry)(*self._stored.values()))
            expected = self.target.prepared
            ready = dict(zip([spec.name for spec in expected], made, strict=False))
            if len(made) != len(expected) or describe_arrays(ready) != expected:
                raise BundleError(f"{self.folder}: {entry.file} returns other weights than listed")
            self._stored = {}  # not held beside what is made of them
            try:
                for _ in evaluate_in_turn(ready):
                    pass
            except RuntimeError as error:
                raise BundleError(f"{self.folder}: cannot prepare its weights: {error}") from None
        return made

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights that `with_params` takes, in order."""
        return {spec.name: spec.shape for spec in self.manifest.params.stored}

    def with_params(self, params: Mapping[str, mx.array]) -> Bundle:
        """The same functions over other weights: a fine-tune, or another adapter.

        They go through the exported `prepare`, so nothing is exported again and no model's code
        runs. Imported graphs are shared with this bundle; the folder stays as it is, and so do
        its golden calls, which say nothing about other weights.

        Args:
            params: by the names of `stored_shapes`, of the same shapes and dtypes (floats are
                cast); what is left out is read from the folder again.

        Raises:
            ParamsError: unknown names, other shapes, or other packings.
            BundleError: the folder is needed and has been replaced.
        """
        specs = self.manifest.params.stored
        given = as_stored(params, specs)
        if len(given) < len(specs):
            given = {**self._read_stored(), **given}
        given = {spec.name: given[spec.name] for spec in specs}
        mx.eval(given)
        values = {**self.config_values, "dtype": None, "architectures": None}
        manifest = replace(self.manifest, fingerprint=fingerprint(given, values))
        other = Bundle(
            self.folder, manifest, self.digest, self.device, given, self._graphs, self.tokenizer
        )
        other._imported = self._imported
        return other

    def _read_stored(self) -> Params:
        """The weights in the folder, if they are still those that were loaded."""
        if not self.manifest.params.files:
            missing = "it was exported without weights"
        elif load_manifest(self.folder).files != self.manifest.files:
            missing = "it was replaced since it was loaded: load it again"
        else:
            return load_stored(self.folder, self.manifest)
        raise BundleError(f"{self.folder}: some weights are not given, and {missing}")

    @cached_property
    def adapter_count(self) -> int:
        """How many adapters the rows of a batch can choose from."""
        return low_rank.count(self.stored_shapes)

    @property
    def config_values(self) -> Mapping[str, Any]:
        """The exported model's config as plain values."""
        return {**self.manifest.model, "dtype": self.dtype}

    @property
    def whole_cache_spec(self) -> CacheSpec:
        """The arrays of a cache state."""
        return self.cache_spec

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the prepared weights; of the stored ones nothing stays."""
        specs = self.target.prepared
        return sum(math.prod(spec.shape) * DTYPES[spec.dtype].size for spec in specs), 0

    def init_cache(self, batch: int, capacity: int) -> CacheState:
        """An empty cache state. Raises CapacityError unless both sizes are declared."""
        self.plan.check(batch, capacity)
        return cache.init_cache(self.cache_spec, batch, capacity)

    def compiled(self, plan: BucketPlan | None = None) -> Compiled:
        """The exported functions, compiled when first used.

        Raises CapacityError when `plan` has more than the bundle declares.
        """
        for name in ("batch", "tokens", "capacity"):
            declared = getattr(self.plan, name)
            extra = sorted({*getattr(plan or self.plan, name)} - {*declared})
            if extra:
                raise CapacityError(
                    f"plan {name} {', '.join(map(str, extra))} was not exported; "
                    f"exported: {', '.join(map(str, declared))}"
                )
        return Compiled(
            self._source,
            params=self.prepared,
            cache_spec=self.cache_spec,
            plan=plan or self.plan,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            is_imported=True,
            present={name for name, _ in self._functions},
        )

    @cached_property
    def functions(self) -> Compiled:
        """What `forward` and calls of the bundle run on."""
        return self.compiled()

    def forward(
        self, tokens: mx.array, mask: mx.array, cache_state: CacheState
    ) -> tuple[mx.array, CacheState]:
        """The contract, with the weights bound: `(logits [B,T,V], cache_state)`.

        It reads nothing from the device, so what does not fit the capacity is dropped; `lengths`
        then tells. Calling the bundle itself grows the cache instead.

        Args:
            tokens: int32 `[B, T]`; B must be declared, T is padded to the next declared one.
            mask: bool `[B, 1, T, S]`, S the declared capacity of `cache_state`.
            cache_state: from `init_cache` or an earlier call.

        Raises:
            InputError, CacheError: shapes or dtypes that do not fit.
            CapacityError: sizes that were not exported.
        """
        state = self.check_cache(cache_state)
        cache.check_call(tokens, mask, state, None)
        wanted = tokens.shape[1]
        size = self.plan.choose_tokens(wanted)
        if wanted > size:
            raise CapacityError(
                f"{wanted} tokens in one call, largest is {size}: call the bundle itself, which "
                f"feeds them in chunks, or export a larger one (--tokens {wanted})"
            )
        if size > wanted:
            tokens = mx.pad(tokens, [(0, 0), (0, size - wanted)])
            mask = mx.pad(mask, [(0, 0), (0, 0), (0, size - wanted), (0, 0)])
        logits, state = self.functions.forward(tokens, mask, state)
        return logits[:, :wanted] if size > wanted else logits, state

    @property
    def fingerprint(self) -> str:
        """That of the model that was exported."""
        return self.manifest.fingerprint

    def check_cache(self, state: CacheState) -> CacheState:
        """The same arrays in the fixed order. Raises CacheError for a cache of another model."""
        return cache.check_state(self.cache_spec, state)

    def choose_size(self, rows: int, tokens: int) -> tuple[int, int]:
        """The smallest declared batch and capacity. Raises CapacityError."""
        return self.plan.choose_batch(rows), self.plan.choose_capacity(tokens)

    def _run(
        self,
        tokens: mx.array,
        mask: mx.array,
        state: CacheState,
        looks_back: bool,
        positions: mx.array | None,
    ) -> tuple[mx.array, CacheState]:
        """Any T, in chunks of the largest declared one."""
        if positions is not None:
            raise InputError("positions: a bundle has no function that takes them; use the model")
        largest = self.plan.tokens[-1]
        count = tokens.shape[1]
        if count <= largest:
            return self.forward(tokens, mask, state)
        if not looks_back:
            _check_chunks(mask, state["lengths"], largest)
        parts = []
        for start in range(0, count, largest):
            chunk = slice(start, start + largest)
            logits, state = self.forward(tokens[:, chunk], mask[:, :, chunk], state)
            parts.append(logits)
        return mx.concatenate(parts, axis=1), state

    def _source(self, name: str, bucket: Bucket) -> FlatFunction:
        return self._import(self._functions[name, bucket])

    def _import(self, entry: FunctionEntry) -> FlatFunction:
        if entry.key not in self._imported:
            self._imported[entry.key] = import_graph(self._graphs[entry.key], entry)
            del self._graphs[entry.key]
        return self._imported[entry.key]


def _check_chunks(mask: mx.array, lengths: mx.array, largest: int) -> None:
    """Raise CapacityError if a token sees one of a later chunk, which is not written yet."""
    real = mx.any(mask, axis=(1, 3)).astype(mx.int32)  # [B,T]
    slots = mx.arange(mask.shape[3], dtype=mx.int32)
    total = (lengths + mx.sum(real, axis=1))[:, None, None, None]
    ahead = []
    for start in range(0, mask.shape[2], largest):
        after = lengths + mx.sum(real[:, : start + largest], axis=1)
        later = (slots >= after[:, None, None, None]) & (slots < total)
        ahead.append(mx.any(mask[:, :, start : start + largest] & later))
    if read(mx.any(mx.stack(ahead))) is True:
        raise CapacityError(
            f"the mask lets a token see one more than {largest} tokens ahead in chunks: "
            f"export with --tokens {mask.shape[2]}, or pass a mask that looks back only"
        )
