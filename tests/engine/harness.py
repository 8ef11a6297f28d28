"""Engines over every kind of cache, run step by step in one thread, and what they should say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache as memo
from typing import Any

from funcrt import BucketPlan, Engine, sampling, settings
from funcrt.cache import CacheSpec, CacheState, init_cache
from funcrt.calling import CallForm
from funcrt.compiled import Compiled
from funcrt.engine.handle import Handle
from funcrt.engine.request import Completion, Request
from funcrt.engine.scheduler import Scheduler
from funcrt.engine.stats import Stats, StepReport
from funcrt.errors import CapacityError
from funcrt.model import Model
from funcrt.text import Tokenizer
from tests.cache_kinds import MISTRAL, PACKED
from tests.helpers import TOLERANCE, Array, make_model, to_numpy
from tests.toy_families import make_toy, registered

import mlx.core as mx
import numpy as np
import tokenizers

VOCAB = 96
EOS = VOCAB - 1
PACKED_TOLERANCE = 2e-4  # as a share of the largest logit: a value may round to its neighbour
PLAN = BucketPlan(batch=(1, 3), tokens=(4, 8), capacity=(24, 48))


def make_tokenizer(*ends: int, shift: int = 0) -> Tokenizer:
    """One printable ASCII character per id, the last id is special."""
    vocabulary = {"Ġ" if i == 0 else chr(32 + i): (i + shift) % EOS for i in range(EOS)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, {}, eos_token_ids=ends)


def write(tokens: Sequence[int]) -> str:
    """The text that the tokenizer makes of ids."""
    return "".join(chr(32 + token) for token in tokens if token < EOS)


# --- models ---------------------------------------------------------------------------------------

CACHES: dict[str, tuple[dict[str, Any], int | None]] = {
    "full": ({}, None),
    "ring": (MISTRAL, None),
    "kv8": (PACKED, 8),
    "toy_latent": ({}, None),
    "toy_hybrid": ({}, None),
    "toy_recurrent": ({}, None),
}


class Subject(CallForm):
    """A model whose engines share one `Compiled` per plan, so that shapes are traced once.

    Args:
        model: what is run.
        kv_bits: packs the cache.
        ends: ids that end a text.
    """

    def __init__(self, model: Model, kv_bits: int | None = None, ends: Sequence[int] = ()) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.tokenizer = make_tokenizer(*ends)
        self._kv_bits = kv_bits
        self._compiled: dict[BucketPlan | None, Compiled] = {}

    def compiled(self, plan: BucketPlan | None = None) -> Compiled:
        if plan not in self._compiled:
            self._compiled[plan] = self.model.compiled(plan, kv_bits=self._kv_bits)
        return self._compiled[plan]

    def solo(self) -> Compiled:
        """One row, token by token, uncompiled."""
        plan = BucketPlan(batch=1, tokens=1, capacity=PLAN.capacity[-1])
        return self.model.compiled(plan, kv_bits=self._kv_bits, eager=True)

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.tokenizer.eos_token_ids

    @property
    def config_values(self) -> Mapping[str, Any]:
        return self.model.config_values

    @property
    def whole_cache_spec(self) -> CacheSpec:
        return self.model.whole_cache_spec

    @property
    def weight_bytes(self) -> tuple[int, int]:
        return self.model.weight_bytes

    def check_cache(self, state: Any) -> Any:
        raise NotImplementedError

    def init_cache(self, batch: int, capacity: int) -> Any:
        raise NotImplementedError

    def choose_size(self, rows: int, tokens: int) -> tuple[int, int]:
        raise NotImplementedError

    def _run(self, *arguments: Any) -> Any:
        raise NotImplementedError


@memo
def subject(kind: str) -> Subject:
    """A model with that kind of cache; a toy family must be registered."""
    changes, kv_bits = CACHES[kind]
    if kind.startswith("toy"):
        model = make_toy(kind, vocab_size=VOCAB)
    else:
        model = make_model("float32", **changes)
    return Subject(model, kv_bits, ends=(17, EOS))


@memo
def draft(kind: str, blur: float) -> Subject:
    """The same model with noise on its weights: the more, the worse its guesses."""
    model = subject(kind).model
    key = mx.random.key(7)
    params = {
        name: array + blur * mx.random.normal(array.shape, key=key) * mx.std(array)
        for name, array in model.params.items()
    }
    return Subject(Model(model.config, params), CACHES[kind][1])


@contextmanager
def toys() -> Iterator[None]:
    """Toy families exist within this context, and no model of theirs outlives it."""
    with registered():
        yield
    for made in (subject, draft, oracle, least_budget):
        made.cache_clear()


@memo
def least_budget(
    kind: str, plan: BucketPlan = PLAN, longest: int = 47, guesses: bool = True
) -> int:
    """The smallest budget with which a text of so many tokens is taken."""
    options = {"max_tokens": 1, "speculate": "ngram" if guesses else None}
    low, high = 1, 1 << 30
    while low < high:
        budget = (low + high) // 2
        try:
            engine = DirectEngine(subject(kind), plan, memory_budget=budget)
            engine.submit([1] * longest, **options)
            high = budget
        except CapacityError:
            low = budget + 1
    return low


# --- what one prompt gets when it is alone --------------------------------------------------------


class Oracle:
    """Completions of one row at a time, token by token, remembered.

    Args:
        subject: the model.
    """

    def __init__(self, subject: Subject) -> None:
        self._compiled = subject.solo()
        self._ends = subject.eos_token_ids
        self._vocab_size = subject.vocab_size
        self._known: dict[tuple[int, ...], tuple[mx.array, CacheState]] = {
            (): (mx.zeros((1, self._vocab_size)), self._begin())
        }

    def _begin(self) -> CacheState:
        spec = self._compiled.cache_spec
        has_slots = any("S" in entry.shape for entry in spec)
        return init_cache(spec, 1, PLAN.capacity[-1] if has_slots else 1)

    def logits(self, tokens: Sequence[int]) -> mx.array:
        """`[1, V]` after all of `tokens`."""
        done = len(tokens)
        while tuple(tokens[:done]) not in self._known:
            done -= 1
        for end in range(done, len(tokens)):
            _, state = self._known[tuple(tokens[:end])]
            one = mx.array([[tokens[end]]], dtype=mx.int32)
            found = self._compiled.prefill(one, mx.ones((1, 1)), state)
            mx.eval(found)
            self._known[tuple(tokens[: end + 1])] = found
        return self._known[tuple(tokens)][0]

    def distribution(self, tokens: Sequence[int]) -> Array:
        """Log-probabilities `[V]` of what follows."""
        logits = self._logits(tokens)
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    def scale(self, tokens: Sequence[int]) -> float:
        """The largest magnitude among the logits of what follows."""
        return float(np.abs(self._logits(tokens)).max())

    def _logits(self, tokens: Sequence[int]) -> Array:
        return to_numpy(self.logits(tokens))[0]

    def gap(self, prompt: Sequence[int], new: Sequence[int], options: Mapping[str, Any]) -> float:
        """By how much the best token leads at the next step, after bias, penalties and noise.

        The scale is that of logits; without noise the lead of greedy decoding.
        """
        ranked = np.sort(self._adjusted(prompt, new, options))
        return float(ranked[-1] - ranked[-2])

    def _adjusted(
        self, prompt: Sequence[int], new: Sequence[int], options: Mapping[str, Any]
    ) -> Array:
        row = self._settings(prompt, new, options)
        return to_numpy(sampling.adjust(self.logits([*prompt, *new]), row))[0]

    def _settings(
        self, prompt: Sequence[int], new: Sequence[int], options: Mapping[str, Any]
    ) -> settings.Settings:
        return settings.make_settings(
            1, self._vocab_size, history=settings.History(prompt, new), **options
        )

    def next(self, prompt: Sequence[int], new: Sequence[int], options: Mapping[str, Any]) -> int:
        """The token that a row with these settings chooses."""
        tokens = [*prompt, *new]
        row = self._settings(prompt, new, options)
        drawn = sampling.sample(self.logits(tokens), row, mx.array([len(tokens)]))
        return int(drawn.tokens.item())

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop: str | None = None,
        **options: Any,
    ) -> tuple[list[int], str, str]:
        """New tokens, their text, and why they end."""
        room = PLAN.capacity[-1] - len(prompt)
        new: list[int] = []
        while len(new) < min(max_tokens, room):
            new.append(self.next(prompt, new, options))
            text = write(new)
            if new[-1] in self._ends:
                return new, write(new[:-1]), "stop"
            if stop is not None and stop in text:
                return new, text[: text.index(stop)], "stop"
        return new, write(new), "length"


@memo
def oracle(kind: str) -> Oracle:
    return Oracle(subject(kind))


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that decide what comes next."""
    return {name: value for name, value in options.items() if name in settings.OPTION_NAMES}


# --- an engine without its thread -----------------------------------------------------------------


class _Steps:
    """Stands for the thread of an engine: whoever calls `round` is it."""

    runs_imported = False
    is_current = True

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: dict[Handle, Request] = {}

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats - Stats()

    def add(self, request: Request) -> None:
        self.requests[request.handle] = request
        self.scheduler.add(request)

    def cancel(self, handle: Handle) -> None:
        self.scheduler.cancel(handle)
        self.scheduler.deliver()
        self.scheduler.deliver()


class DirectEngine(Engine):
    """An engine that does nothing until `round` is called, by this thread.

    It works ahead as on a GPU, unless told otherwise; other engines here are those of a CPU.
    """

    def __init__(
        self,
        model: CallForm,
        plan: BucketPlan | None = PLAN,
        *,
        ahead: bool = True,
        **options: Any,
    ) -> None:
        self.reports: list[StepReport] = []
        super().__init__(model, plan, on_step=self.reports.append, **options)
        self._owner: Any = _Steps(self._owner._scheduler)
        self.scheduler._ahead = ahead
        self.scheduler.begin()

    @property
    def scheduler(self) -> Scheduler:
        return self._owner.scheduler

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def waiting(self) -> list[Request]:
        return list(self.scheduler._waiting)

    @property
    def prefilling(self) -> list[Request]:
        return list(self.scheduler._prompts.requests)

    @property
    def running(self) -> dict[int, Request]:
        return self.scheduler._running.seated

    def where(self, handle: Handle) -> str:
        """Where a request is."""
        request = self._owner.requests[handle]
        if handle.done():
            return "ended"
        places = {"waiting": self.waiting, "prefilling": self.prefilling}
        found = [name for name, place in places.items() if request in place]
        found += ["running"] * list(self.running.values()).count(request)
        (place,) = found  # in one place only
        return place

    def round(self) -> None:
        for half in (self.scheduler.feed, self.scheduler.step):
            try:
                half()
            finally:
                self.scheduler.deliver()

    def fail(self, error: BaseException) -> None:
        """What the thread does after a round that raised."""
        self.scheduler.fail(error)
        self.scheduler.deliver()
        self.scheduler.deliver()

    def run(self, limit: int = 2000) -> None:
        """To the end; an engine that does not get there is at fault."""
        for _ in range(limit):
            if not self.busy:
                return
            self.round()
        raise AssertionError("it does not end")

    def check(self) -> None:
        """What is always true between rounds."""
        check_traces(self.compiled)
        scheduler, plan = self.scheduler, self.compiled.plan
        rows = scheduler._running
        assert len(self.running) + len(self.prefilling) <= plan.batch[-1]
        assert scheduler._prefixes.nbytes <= scheduler._prefixes._limit
        if not self.running:
            assert rows.state is None
            assert rows.requests == rows._readers == []
        else:
            assert rows.batch in plan.batch
            lengths = rows.state["lengths"].tolist()
            assert len(lengths) == rows.batch
            flight = scheduler._decoding._flight  # a step that is not read yet
            flying = set(flight.rows.values()) if flight is not None else set()
            for row, request in self.running.items():
                known = len(request.sequence) - 1
                assert lengths[row] == request.cached == known + (request in flying)
        for request in self.prefilling:
            held = 0 if request.row is None else request.row["lengths"].tolist()[0]
            assert held == request.cached < len(request.prompt)

    def check_idle(self) -> None:
        """Nothing is left of requests that have ended."""
        self.check()
        assert not self.busy
        assert all(handle.done() for handle in self._owner.requests)
        assert self.stats.requests == len(self._owner.requests)
        for drafter in self._drafters.values():
            assert not getattr(drafter, "_indexed", {})
            assert not getattr(drafter, "_held", {})


def check_traces(compiled: Compiled) -> None:
    """Every shape that was traced is declared, and was traced once."""
    plan = compiled.plan
    for name, count in compiled.traces.items():
        batch, tokens, capacity = (int(size[1:]) for size in name.rsplit("_", 3)[1:])
        assert count == 1, name
        assert batch in plan.batch, name
        assert tokens in (1, *plan.tokens), name
        assert capacity in (0, 1, *plan.capacity), name  # 0: of logits only; 1: without slots


def check_completion(
    kind: str, prompt: Sequence[int], options: Mapping[str, Any], completion: Completion
) -> None:
    """It is what the prompt gets alone, or the beginning of that if it was cancelled."""
    known = oracle(kind)
    own = sampling_of(options)
    expected, text, reason = known.complete(
        prompt, options["max_tokens"], options.get("stop"), **own
    )
    if completion.finish_reason == "cancelled":
        assert completion.tokens == expected[: len(completion.tokens)]
        assert len(completion.tokens) < len(expected)
        assert completion.text == write(completion.tokens)
    else:
        assert completion.tokens == expected
        assert (completion.text, completion.finish_reason) == (text, reason)
    assert completion.prompt_tokens == len(prompt)
    assert 0 <= completion.reused_tokens < len(prompt)
    assert len(completion.logprobs) == len(completion.tokens)
    tolerance = TOLERANCE if CACHES[kind][1] is None else PACKED_TOLERANCE
    top = options.get("top_logprobs", 0)
    assert len(completion.top_logprobs) == (len(completion.tokens) if top else 0)
    for n, logprob in enumerate(completion.logprobs):
        before = [*prompt, *completion.tokens[:n]]
        whole = known.distribution(before)
        close = tolerance * known.scale(before)
        assert math.isclose(logprob, whole[completion.tokens[n]], rel_tol=0, abs_tol=close)
        if top:
            alternatives = completion.top_logprobs[n]
            assert len(alternatives) == top
            values = [value for _, value in alternatives]
            assert values == sorted(values, reverse=True)
            np.testing.assert_allclose(values, np.sort(whole)[::-1][:top], rtol=0, atol=close)
            np.testing.assert_allclose(
                [whole[i] for i, _ in alternatives], values, rtol=0, atol=close
            )
