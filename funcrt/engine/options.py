"""What a call of the engine is given, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from funcrt import settings
from funcrt.buckets import BucketPlan
from funcrt.calling import CallForm
from funcrt.errors import InputError, TextError

import mlx.core as mx

if TYPE_CHECKING:
    from funcrt.text import TextStream

Prompt = str | Sequence[int]
Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Stops = str | Sequence[str] | Sequence[Sequence[str]] | None

MOST_ALTERNATIVES = 20


class Options(TypedDict, total=False):
    """How to complete prompts: one value for all, or one per prompt.

    `funcrt.sampling` says what the settings mean; `logit_bias` is a number for each id that is
    added to its logit, `allowed_tokens` are the only ids that may be chosen, `top_logprobs` is how
    many alternatives of each token to report. `adapter` is the number of one of the model's
    adapters (`funcrt.adapters.stack`); 0 is the model itself.
    """

    max_tokens: int | Sequence[int]
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    seed: int | Sequence[int]
    repetition_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]]
    allowed_tokens: Sequence[int] | Sequence[Sequence[int]]
    top_logprobs: int | Sequence[int]
    speculate: Any
    adapter: int | Sequence[int]


@dataclass(frozen=True)
class Wish:
    """One prompt and its options, checked.

    Attributes:
        prompt: ids.
        limit: most new tokens, within what the largest capacity holds.
        settings: a row of sampling settings, plain values.
        top: alternatives of each token.
        text: a new stream; None without a tokenizer.
        speculate: None, "ngram" or a draft model.
        adapter: which of the model's adapters; 0 for none.
    """

    prompt: list[int]
    limit: int
    settings: dict[str, Any]
    top: int
    text: TextStream | None
    speculate: Any
    adapter: int


def read_wishes(
    model: CallForm, plan: BucketPlan, prompts: object, stop: object, options: Mapping[str, Any]
) -> list[Wish]:
    """Check prompts and options.

    Raises:
        InputError: an empty prompt, ids out of range, options out of range or unknown.
        CapacityError: a prompt that no declared capacity holds.
        TextError: a string prompt or stop strings without a tokenizer.
    """
    ids = [_encode(model, prompt, i) for i, prompt in enumerate(_listed(prompts))]
    stops = _read_stops(stop, len(ids))
    known = Options.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise InputError(f"unknown option {unknown[0]!r}; known: stop, {', '.join(known)}")
    chosen = {name: value for name, value in options.items() if name in settings.OPTION_NAMES}
    rows = settings.split_settings(len(ids), model.vocab_size, **chosen)
    limits = _per_prompt("max_tokens", options.get("max_tokens", 128), len(ids))
    tops = _per_prompt("top_logprobs", options.get("top_logprobs", 0), len(ids))
    drafts = _per_prompt("speculate", options.get("speculate"), len(ids))
    adapters = _per_prompt("adapter", options.get("adapter", 0), len(ids))
    if any(stops) and model.tokenizer is None:
        raise TextError("stop strings need a tokenizer; this model has none")
    wishes = []
    for prompt, limit, row, top, draft, adapter, ends in zip(
        ids, limits, rows, tops, drafts, adapters, stops, strict=True
    ):
        most = _check_count("max_tokens", limit, 1, None)
        alternatives = _check_count("top_logprobs", top, 0, MOST_ALTERNATIVES)
        number = _check_count("adapter", adapter, 0, model.adapter_count)
        plan.choose_capacity(len(prompt), "prompt")
        # The last new token is never written to the cache.
        room = plan.capacity[-1] - len(prompt)
        text = None if model.tokenizer is None else model.tokenizer.stream(ends)
        wishes.append(Wish(prompt, min(most, room), row, alternatives, text, draft, number))
    return wishes


def _check_count(name: str, value: Any, low: int, high: int | None) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        wanted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise InputError(f"{name}: expected {wanted}, got {value!r}")
    return int(value)


def _read_stops(stop: object, count: int) -> list[tuple[Any, ...]]:
    """Stop strings of each prompt: one or several for all, or a list with those of each."""
    if stop is None or isinstance(stop, str):
        return [() if stop is None else (stop,)] * count
    if isinstance(stop, Mapping) or not isinstance(stop, Iterable):
        raise InputError(f"stop: expected a string or several, got {stop!r}")
    items: list[Any] = list(stop)
    if not any(item is None or _is_list(item) for item in items):
        return [tuple(items)] * count
    if len(items) != count:
        raise InputError(f"stop: expected strings, or a list for each of {count} prompts, "
                         f"got {len(items)}")  # fmt: skip
    return [tuple(item) if _is_list(item) else _read_stops(item, 1)[0] for item in items]


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


def _encode(model: CallForm, prompt: str | Sequence[int], index: int) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise TextError("a text prompt needs a tokenizer; this model has none: pass ids")
        ids = list(model.tokenizer.encode(prompt))
    elif not isinstance(prompt, Iterable):
        raise InputError(f"prompt {index}: expected text or a list of ids, got {prompt!r}")
    else:
        if isinstance(prompt, (bytes, bytearray, Mapping)):
            kind = type(prompt).__name__
            raise InputError(f"prompt {index}: expected text or a list of ids, got {kind}")
        ids = [_id(token, index) for token in prompt]
    if not ids:
        raise InputError(f"prompt {index} is empty: pass at least one token")
    for token in ids:
        if not 0 <= token < model.vocab_size:
            raise InputError(
                f"prompt {index}: token id {token} is outside the vocabulary "
                f"(0 to {model.vocab_size - 1})"
            )
    return ids


def _listed(prompts: object) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    unfit = (mx.array, bytes, bytearray, Mapping)
    if not isinstance(prompts, Iterable) or isinstance(prompts, unfit):
        raise InputError(f"prompts: expected strings or lists of ids, got {type(prompts).__name__}")
    listed: list[Any] = list(prompts)
    alone = bool(listed) and not isinstance(listed[0], Iterable)
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
