"""The host loop: requests take rows, are prefilled in chunks, decoded together and retired.

It knows arrays and ids; text is what the tokenizer's stream makes of them. Rows are slots: an idle
one is a row of padding, so every request gets what it would get alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from funcrt import cache, sampling
from funcrt.buckets import BucketPlan
from funcrt.calling import CallForm
from funcrt.errors import InputError, TextError

import mlx.core as mx

if TYPE_CHECKING:
    from funcrt.compiled import Compiled
    from funcrt.text import TextStream

    from typing_extensions import Unpack

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


class Options(TypedDict, total=False):
    """How to complete prompts: one value for all, or one per prompt. See `sampling` for ranges."""

    max_tokens: int | Sequence[int]
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    seed: int | Sequence[int]


@dataclass
class Completion:
    """What one prompt got.

    Attributes:
        tokens: new ids, the end-of-text token included where one ended it.
        text: their text without special tokens, cut before a stop string.
        logprobs: natural log of each token's probability before temperature and filters.
        finish_reason: "stop" (end of text or stop string), "length" (`max_tokens`, or the largest
            capacity is full) or "error" (the model gave logits that are not finite).
        prompt_tokens: how many ids the prompt had.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Chunk:
    """One step of one prompt: `text` may be empty while a character or stop string is open."""

    index: int
    token: int
    text: str
    finish_reason: str


@dataclass
class Stats:
    """Counters of an engine since it was made; seconds are wall time inside the model."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of the steps after the first token of each prompt."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Engine:
    """Generate for one or more prompts with a model or a bundle.

    Args:
        model: anything that runs the contract.
        plan: buckets to use; None takes the bundle's, or `buckets.default_plan` of a model.
    """

    def __init__(self, model: CallForm, plan: BucketPlan | None = None) -> None:
        self.model = model
        self.compiled = model.compiled(plan)
        self.stats = Stats()

    def generate(
        self,
        prompts: Prompts,
        *,
        stop: str | Sequence[str] | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Complete every prompt, one `Completion` each, in order; arguments as of `stream`."""
        requests = self._requests(prompts, stop, options)
        deque(self._run(requests), maxlen=0)
        return [request.completion for request in requests]

    def stream(
        self,
        prompts: Prompts,
        *,
        stop: str | Sequence[str] | None = None,
        **options: Unpack[Options],
    ) -> Iterator[Chunk]:
        """Yield every new token as it comes, for all prompts at once.

        Args:
            prompts: strings, or lists of ids; one of them alone is a list of one.
            stop: strings that end a completion and are cut off.
            **options: `max_tokens` (128), `temperature` (0 = greedy), `top_k`, `top_p`, `min_p`,
                `seed`: one value, or one per prompt. Draws depend on a prompt's own seed and
                positions, never on its neighbours.

        Raises:
            InputError: an empty prompt, ids out of range, options out of range or unknown.
            CapacityError: a prompt that no declared capacity holds.
            TextError: a string prompt or stop strings without a tokenizer.
        """
        return self._run(self._requests(prompts, stop, options))

    def _requests(self, prompts: Prompts, stop: object, options: Options) -> list[_Request]:
        if stop is None:
            stop = ()
        if not isinstance(stop, Iterable):
            raise InputError(f"stop: expected a string or several, got {stop!r}")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        ids = [self._encode(prompt, i) for i, prompt in enumerate(_listed(prompts))]
        known = Options.__annotations__
        if unknown := sorted(options.keys() - known.keys()):
            raise InputError(f"unknown option {unknown[0]!r}; known: stop, {', '.join(known)}")
        limits = _per_prompt("max_tokens", options.get("max_tokens", 128), len(ids))
        chosen: dict[str, Any] = {k: v for k, v in options.items() if k != "max_tokens"}
        rows = sampling.split_settings(len(ids), self.model.vocab_size, **chosen)
        return [self._request(i, prompt, limits[i], rows[i], stops) for i, prompt in enumerate(ids)]

    def _request(
        self,
        index: int,
        prompt: list[int],
        limit: Any,
        settings: dict[str, Any],
        stop: tuple[str, ...],
    ) -> _Request:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InputError(f"max_tokens: expected an integer >= 1, got {limit!r}")
        self.compiled.plan.choose_capacity(len(prompt), "prompt")
        # The last new token is never written to the cache.
        room = self.compiled.plan.capacity[-1] - len(prompt)
        tokenizer = self.model.tokenizer
        if tokenizer is None and stop:
            raise TextError("stop strings need a tokenizer; this model has none")
        return _Request(
            index=index,
            prompt=prompt,
            limit=min(limit, room),
            settings=settings,
            text=None if tokenizer is None else tokenizer.stream(stop),
            ends=frozenset(self.model.eos_token_ids),
            completion=Completion(prompt_tokens=len(prompt)),
        )

    def _encode(self, prompt: str | Sequence[int], index: int) -> list[int]:
        if isinstance(prompt, str):
            if self.model.tokenizer is None:
                raise TextError("a text prompt needs a tokenizer; this model has none: pass ids")
            ids = list(self.model.tokenizer.encode(prompt))
        elif not isinstance(prompt, Iterable):
            raise InputError(f"prompt {index}: expected text or a list of ids, got {prompt!r}")
        else:
            if isinstance(prompt, bytes):
                raise InputError(f"prompt {index}: expected text, got bytes: decode them")
            ids = [_id(token, index) for token in prompt]
        if not ids:
            raise InputError(f"prompt {index} is empty: pass at least one token")
        for token in ids:
            if not 0 <= token < self.model.vocab_size:
                raise InputError(
                    f"prompt {index}: token id {token} is outside the vocabulary "
                    f"(0 to {self.model.vocab_size - 1})"
                )
        return ids

    def _run(self, requests: list[_Request]) -> Iterator[Chunk]:
        waiting = deque(requests)
        rows = _Rows(self.compiled, self.stats, requests)
        while waiting or rows.busy:
            rows.admit(waiting)
            # Alternating: a running row never waits longer than one chunk of someone's prompt.
            yield from rows.prefill()
            yield from rows.decode()


@dataclass
class _Request:
    index: int
    prompt: list[int]
    limit: int
    settings: dict[str, Any]
    text: TextStream | None
    ends: frozenset[int]
    completion: Completion
    prefilled: int = 0

    @property
    def pending(self) -> int:
        return len(self.prompt) - self.prefilled

    def take(self, token: int, logprob: float, finite: bool) -> Chunk:
        """Record one new token; `completion.finish_reason` says whether it was the last."""
        done = self.completion
        if not finite:
            done.finish_reason = "error"
        else:
            done.tokens.append(token)
            done.logprobs.append(logprob)
            done.finish_reason = "stop" if token in self.ends else ""
        piece = ""
        if self.text is not None:
            # An end token is not text: neither its characters nor a stop string begun before it.
            piece = "" if done.finish_reason else self.text.push(token)
            if self.text.stopped:
                done.finish_reason = "stop"
        if not done.finish_reason and len(done.tokens) == self.limit:
            done.finish_reason = "length"
        if self.text is not None:
            if done.finish_reason:
                piece += self.text.finish()
            done.text += piece
        return Chunk(self.index, token, piece, done.finish_reason)


class _Rows:
    """The running batch: one bucket, its cache state, and who sits in which row."""

    def __init__(self, compiled: Compiled, stats: Stats, requests: list[_Request]) -> None:
        plan = compiled.plan
        self.compiled = compiled
        self.stats = stats
        self.batch = (
            plan.choose_batch(min(len(requests), plan.batch[-1])) if requests else plan.batch[0]
        )
        need = max((len(r.prompt) + r.limit - 1 for r in requests), default=1)
        self.state = compiled.init_cache(self.batch, plan.choose_capacity(need))
        self.requests: list[_Request | None] = [None] * self.batch
        self.lengths = [0] * self.batch  # host mirror: no device read to know what fits
        self.tokens = [0] * self.batch
        self.settings: dict[str, mx.array] = {}

    @property
    def busy(self) -> bool:
        return any(self.requests)

    def admit(self, waiting: deque[_Request]) -> None:
        free = [row for row, request in enumerate(self.requests) if request is None]
        admitted = free[: len(waiting)]
        if not admitted:
            return
        for row in admitted:
            self.requests[row] = waiting.popleft()
            self.lengths[row] = 0
        self.state = cache.reset(self.state, admitted)
        vocab = self.compiled.vocab_size
        idle = sampling.check_settings(vocab)
        rows = [idle if request is None else request.settings for request in self.requests]
        self.settings = sampling.stack_settings(rows, vocab)

    def prefill(self) -> Iterator[Chunk]:
        """One chunk of every prompt that is not in the cache yet."""
        rows = {i: r for i, r in enumerate(self.requests) if r is not None and r.pending}
        if not rows:
            return
        begin = time.perf_counter()
        width = self.compiled.plan.choose_tokens(max(r.pending for r in rows.values()))
        tokens = [[0] * width for _ in range(self.batch)]
        counts = [0] * self.batch
        for i, request in rows.items():
            chunk = request.prompt[request.prefilled : request.prefilled + width]
            tokens[i][: len(chunk)] = chunk
            counts[i] = len(chunk)
            request.prefilled += len(chunk)
            self.lengths[i] += len(chunk)
        valid = mx.arange(width) < mx.array(counts)[:, None]
        logits, self.state = self.compiled.prefill(
            mx.array(tokens, dtype=mx.int32), valid, self.state
        )
        ready = {i: request for i, request in rows.items() if not request.pending}
        if ready:
            results = self._sample(logits, ready)
        else:
            mx.eval(self.state)
            results = []
        self.stats.prompt_tokens += sum(counts)
        self.stats.prompt_seconds += time.perf_counter() - begin
        yield from self._take(ready, results)

    def decode(self) -> Iterator[Chunk]:
        """One token of every row whose prompt is in the cache."""
        rows = {i: r for i, r in enumerate(self.requests) if r is not None and not r.pending}
        if not rows:
            return
        begin = time.perf_counter()
        token = mx.array(self.tokens, dtype=mx.int32)
        active = mx.array([i in rows for i in range(self.batch)])
        if _greedy(rows):
            chosen, self.state = self.compiled.decode_greedy(token, active, self.state)
        else:
            chosen, self.state = self.compiled.decode(token, active, self.settings, self.state)
        for i in rows:
            self.lengths[i] += 1
        values = self._read(chosen[:3])
        self.stats.decode_tokens += len(rows)
        self.stats.decode_seconds += time.perf_counter() - begin
        yield from self._take(rows, values)

    def _sample(self, logits: mx.array, rows: dict[int, _Request]) -> list[list[Any]]:
        if _greedy(rows):
            return self._read(sampling.greedy(logits)[:3])
        positions = mx.array(self.lengths, dtype=mx.int32)
        return self._read(self.compiled.sample(logits, positions, self.settings)[:3])

    def _read(self, results: Iterable[mx.array]) -> list[list[Any]]:
        results = list(results)
        mx.eval(results, self.state)
        return [_values(array) for array in results]

    def _take(self, rows: dict[int, _Request], results: list[list[Any]]) -> Iterator[Chunk]:
        for i, request in rows.items():
            token, logprob, finite = (values[i] for values in results)
            chunk = request.take(token, logprob, finite)
            self.tokens[i] = token
            self.stats.generated_tokens += 1
            if chunk.finish_reason:
                self.requests[i] = None
            if chunk.finish_reason == "error":
                # A value that is not finite leaks through a masked slot to the row's next user.
                self.state = cache.clear(self.state, mx.array([i], dtype=mx.int32))
            yield chunk


def _greedy(rows: dict[int, _Request]) -> bool:
    return all(request.settings["temperature"] == 0 for request in rows.values())


def _values(array: mx.array) -> list[Any]:
    values = array.tolist()
    assert isinstance(values, list)
    return values


def _listed(prompts: object) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, mx.array):
        raise InputError(f"prompts: expected strings or lists of ids, got {type(prompts).__name__}")
    listed: list[Any] = list(prompts)
    alone = bool(listed) and not isinstance(listed[0], (str, Sequence, mx.array))
    return [listed] if alone else listed


def _id(token: Any, index: int) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise InputError(f"prompt {index}: expected text or a list of integer ids, got {token!r}")
    return int(token)


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    is_one = isinstance(value, str) or not isinstance(value, Iterable)
    values = [value] * count if is_one else list(value)
    if len(values) != count:
        raise InputError(f"{name}: expected one value or {count}, got {len(values)}")
    return values
