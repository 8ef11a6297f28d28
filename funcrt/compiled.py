"""The only place that calls `mx.compile`: one callable per function and bucket, counting traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from funcrt import sampling, streams
from funcrt.buckets import Bucket, BucketPlan
from funcrt.cache import (
    CacheSpec,
    CacheState,
    check_recurrent,
    check_state,
    init_cache,
    place,
    slot_axis,
    state_size,
)
from funcrt.errors import CapacityError, InputError
from funcrt.flat import FlatFunction
from funcrt.masks import from_block
from funcrt.sampling import Sampled
from funcrt.steps import FIRST, STEPS, input_shape

import mlx.core as mx

Source = Callable[[str, Bucket], FlatFunction]


class Compiled:
    """The step functions of one model over a declared plan.

    A function compiles when its bucket is first used; its params are captured, so a call passes
    only what changes. Values never retrace, and another shape is refused rather than traced.
    Nothing is read from the device: check `lengths + new <= S - 1` on your own mirror of the
    lengths, as `Engine` does, since what does not fit is dropped.

    Args:
        source: gives the flat function of a name and a bucket, traced here or imported.
        params: prepared weights in the order that the flat functions take them.
        cache_spec: the arrays of a cache state.
        plan: the declared buckets.
        vocab_size: V.
        dtype: of the logits.
        eager: run without `mx.compile`, which is what compiled results are compared with.
        is_imported: the functions are imported graphs, which take turns, see `funcrt.streams`.
        present: names of the functions that `source` has; older bundles lack optional ones.
    """

    def __init__(
        self,
        source: Source,
        *,
        params: Sequence[mx.array],
        cache_spec: CacheSpec,
        plan: BucketPlan,
        vocab_size: int,
        dtype: str,
        eager: bool = False,
        is_imported: bool = False,
        present: Container[str] = STEPS.keys(),
    ) -> None:
        self.plan = plan
        self.cache_spec = cache_spec
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.is_imported = is_imported
        self.traces: Counter[str] = Counter()
        self._source = source
        self.present = present
        self._eager = eager
        self._params = list(params)
        self._slotted = next(  # an array that has slots, and where
            ((e.name, axis) for e in cache_spec if (axis := slot_axis(e.name)) is not None), None
        )
        self._is_recurrent = any(entry.kind == "recurrent" for entry in cache_spec)
        self._callables: dict[tuple[str, Bucket], Callable[..., Sequence[mx.array]]] = {}

    def init_cache(self, batch: int, capacity: int) -> CacheState:
        """An empty state. Raises CapacityError unless both sizes are declared."""
        self.plan.check(batch, capacity)
        return init_cache(self.cache_spec, batch, capacity)

    def forward(
        self, tokens: mx.array, mask: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        """Contract form: int32 `[B,T]`, bool `[B,1,T,S]` -> logits `[B,T,V]`, new state."""
        (logits,), state = self._stateful("forward", _tokens_of(tokens), [tokens, mask], state)
        return logits, state

    def prefill(
        self, tokens: mx.array, valid: mx.array, state: CacheState, *, first: bool = False
    ) -> tuple[mx.array, CacheState]:
        """Logits `[B,V]` of each row's last real token, and the new state.

        Args:
            tokens: int32 `[B,T]`.
            valid: `[B,T]` of any dtype, nonzero = real.
            state: the cache state.
            first: its rows are known to be empty; takes `prefill_first` where there is one.
        """
        size = _tokens_of(tokens)
        name = FIRST if first and self.has_first(size) else "prefill"
        (logits,), state = self._stateful(name, size, [tokens, valid != 0], state)
        return logits, state

    def prefill_first(
        self, tokens: mx.array, valid: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        """`prefill` of the first tokens of all rows: faster, since no slot has to be looked at.

        What the rows hold before, their lengths included, does not matter; it has to be finite.
        Rows keep the adapters that they have chosen. Bundles that are older have no such function.

        Args:
            tokens: int32 `[B,T]`, T from 32.
            valid: `[B,T]` of any dtype, nonzero = real.
            state: the cache state.
        """
        inputs = [tokens, valid != 0]
        (logits,), state = self._stateful(FIRST, _tokens_of(tokens), inputs, state)
        return logits, state

    def has_first(self, tokens: int) -> bool:
        """Whether there is a `prefill_first` of so many tokens."""
        return tokens in self._choose_sizes(FIRST)

    def prefill_block(
        self, tokens: mx.array, block: mx.array, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        """`prefill` with a block of what the new tokens see of each other.

        Args:
            tokens: int32 `[B,T]`.
            block: `[B,T,T]` or `[T,T]` of any dtype, see `masks.from_block`.
            state: the cache state.
        """
        if block.ndim == 2:
            block = mx.broadcast_to(block[None], (tokens.shape[0], *block.shape))
        inputs = [tokens, block != 0]
        (logits,), state = self._stateful("prefill_block", _tokens_of(tokens), inputs, state)
        return logits, state

    def decode(
        self,
        token: mx.array,
        active: mx.array,
        settings: Mapping[str, mx.array],
        state: CacheState,
    ) -> tuple[Sampled, CacheState]:
        """One token per row: int32 and bool `[B]` -> what comes next, and the new state.

        The result has the raw logits, and the history with the new tokens of active rows.
        """
        inputs = [token, active, *_values(settings)]
        results, state = self._stateful("decode", 1, inputs, state)
        return _sampled("decode", results), state

    def decode_greedy(
        self, token: mx.array, active: mx.array, state: CacheState
    ) -> tuple[Sampled, CacheState]:
        """`decode` at temperature 0 with nothing else set, without its cost or history."""
        results, state = self._stateful("decode_greedy", 1, [token, active], state)
        return _sampled("decode_greedy", results), state

    def verify(
        self,
        tokens: mx.array,
        valid: mx.array,
        settings: Mapping[str, mx.array],
        state: CacheState,
    ) -> tuple[Sampled, CacheState]:
        """Several steps of `decode` in one call, as far as guesses are right.

        The text is token for token what `decode` would have made of it. A row's new tokens are
        those at its first `accepted + 1` real places; the state and the history are as if only
        they had been decoded.

        Args:
            tokens: int32 `[B,T]`, T from 2 to 16: at the real places of a row the token that
                `decode` would be given, then a guess for each token after it.
            valid: `[B,T]` of any dtype, nonzero = real. An idle row has none, a row without
                guesses one.
            settings: as `make_settings` returns them.
            state: the cache state, with room for all real tokens, wrong guesses too.
        """
        inputs = [tokens, valid != 0, *_values(settings)]
        results, state = self._stateful("verify", _tokens_of(tokens), inputs, state)
        return _sampled("verify", results), state

    def verify_greedy(
        self, tokens: mx.array, valid: mx.array, state: CacheState
    ) -> tuple[Sampled, CacheState]:
        """`verify` for `decode_greedy`."""
        inputs = [tokens, valid != 0]
        results, state = self._stateful("verify_greedy", _tokens_of(tokens), inputs, state)
        return _sampled("verify_greedy", results), state

    def sample(
        self, logits: mx.array, positions: mx.array, settings: Mapping[str, mx.array]
    ) -> Sampled:
        """Logits `[B,V]`, int32 `[B]` positions of the new tokens -> what every row chooses.

        The history counts the new tokens of all rows.
        """
        inputs = [logits, positions, *_values(settings)]
        return _sampled("sample", self._stateless("sample", inputs))

    def top(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Logits `[B,V]` -> ids and logprobs `[B,N]` of the N = min(20, V) likeliest tokens."""
        ids, logprobs = self._stateless("top", [logits])
        return ids, logprobs

    def grow(self, state: CacheState) -> CacheState:
        """The same contents in the next declared capacity; the old state stays as it is.

        Raises CapacityError at the largest one.
        """
        return self._stateful("grow", 1, [], state)[1]

    def _stateless(self, name: str, inputs: list[mx.array]) -> Sequence[mx.array]:
        bucket = Bucket(inputs[0].shape[0] if inputs[0].ndim else 0, 1, 0)
        self._check_inputs(name, bucket, inputs)
        return self._call(name, bucket, inputs)

    def _stateful(
        self, name: str, tokens: int, inputs: list[mx.array], state: CacheState
    ) -> tuple[Sequence[mx.array], CacheState]:
        state = check_state(self.cache_spec, state)
        slots = 1 if self._slotted is None else state[self._slotted[0]].shape[self._slotted[1]]
        bucket = Bucket(state["lengths"].shape[0], tokens, slots)
        self._check_inputs(name, bucket, inputs)
        self._check_order(name, inputs, state)
        names = list(state)
        results = self._call(name, bucket, inputs, list(state.values()))
        split = len(results) - len(names)
        return results[:split], dict(zip(names, results[split:], strict=True))

    def _call(
        self, name: str, bucket: Bucket, inputs: list[mx.array], state: Sequence[mx.array] = ()
    ) -> Sequence[mx.array]:
        def call() -> Sequence[mx.array]:
            return self._callable(name, bucket)(*inputs, *state)

        try:
            return streams.run(call) if self.is_imported else call()
        except RuntimeError as error:
            if "There is no Stream" not in str(error):
                raise
            raise InputError(
                "MLX's streams belong to threads, and the one that this needs is another thread's: "
                "import funcrt before MLX is used for the first time, and evaluate arrays in the "
                f"thread that made them ({error})"
            ) from error

    def _check_inputs(self, name: str, bucket: Bucket, inputs: list[mx.array]) -> None:
        for label, array in zip(STEPS[name].inputs, inputs, strict=True):
            shape, dtype = input_shape(label, bucket, self.vocab_size, self.dtype)
            if array.shape != shape or array.dtype != dtype:
                raise InputError(
                    f"{name} {label}: expected {dtype} {list(shape)}, "
                    f"got {array.dtype} {list(array.shape)}"
                )

    def _check_order(self, name: str, inputs: list[mx.array], state: CacheState) -> None:
        """A recurrent state takes causal masks only, which a compiled function cannot check."""
        if name not in ("forward", "prefill_block") or not self._is_recurrent:
            return
        mask = inputs[1]
        if name == "prefill_block":
            mask = from_block(mask, state["lengths"], state_size(state)[1])
        check_recurrent(place(mask, state["lengths"]))

    def _callable(self, name: str, bucket: Bucket) -> Callable[..., Sequence[mx.array]]:
        key = (name, bucket)
        if key not in self._callables:
            self._check_declared(name, bucket)
            function = self._source(name, bucket)
            params = self._params if STEPS[name].has_params else []

            def traced(*inputs: mx.array) -> tuple[mx.array, ...]:
                self.traces[f"{name}_{bucket}"] += 1
                return function(*params, *inputs)

            self._callables[key] = traced if self._eager else mx.compile(traced)
        return self._callables[key]

    def _choose_sizes(self, name: str) -> tuple[int, ...]:
        """The T that a function exists for."""
        return STEPS[name].choose_sizes(self.plan.tokens) if name in self.present else ()

    def _check_declared(self, name: str, bucket: Bucket) -> None:
        step = STEPS[name]
        # States without slots have one capacity, whatever the plan says of the others.
        has_slots = step.has_state and any("S" in entry.shape for entry in self.cache_spec)
        self.plan.check(bucket.batch, bucket.capacity if has_slots else None)
        if step.grows:
            self.plan.next_capacity(bucket.capacity)
        sizes = self._choose_sizes(name)
        if bucket.tokens not in sizes:
            raise CapacityError(
                f"{name} of {bucket.tokens} tokens is not declared; "
                f"declared: {', '.join(map(str, sizes)) or 'none of the sizes that it takes'}"
            )


def _values(settings: Mapping[str, mx.array]) -> list[mx.array]:
    if missing := [name for name in sampling.SETTING_INPUTS if name not in settings]:
        raise InputError(f"settings: {missing[0]} is missing; funcrt.sampling makes all of them")
    return [settings[name] for name in sampling.SETTING_INPUTS]


def _sampled(name: str, results: Sequence[mx.array]) -> Sampled:
    return Sampled(**dict(zip(STEPS[name].outputs, results, strict=True)))


def _tokens_of(tokens: mx.array) -> int:
    if tokens.ndim != 2:
        raise InputError(f"tokens: expected int32 [B, T], got {list(tokens.shape)}")
    return tokens.shape[1]
