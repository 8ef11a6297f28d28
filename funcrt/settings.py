"""Sampling options as people write them, checked on the host, and the arrays made of them.

A row of options is a dict of plain values (`check_settings`), cheap to keep; the arrays of a batch
are stacked from such rows (`stack_settings`). `sampling` says what each means.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

from funcrt.errors import InputError

import mlx.core as mx

SETTING_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""The settings that are one number per row, an array `[B]` each."""

SETTING_INPUTS = (*SETTING_NAMES, "bias", "history")
"""The keys of a settings dict of arrays, in the order in which exported functions take them."""

OPTION_NAMES = (*SETTING_NAMES, "logit_bias", "allowed_tokens")
"""The keys of one row of options."""

Settings: TypeAlias = dict[str, mx.array]
Row: TypeAlias = dict[str, Any]

_FLOAT32_TINY = 2.0**-126  # the smallest normal float32: smaller ones may be flushed to 0
_HEAVIEST = 1e30  # bias; with penalties of at most 1e6 nothing overflows float32


class _Range(NamedTuple):
    """What one number of a row may be."""

    default: float
    kind: type[Any]
    low: float
    high: float
    wanted: str


_PENALTY = _Range(0.0, Real, -1e6, 1e6, "a number from -1e6 to 1e6 (0 is off)")
_RANGES = {
    "temperature": _Range(0.0, Real, 0, 3.4e38, "a finite number of at least 0 (0: greedy)"),
    "top_k": _Range(0, Integral, 0, 2**31 - 1, "a whole number from 0 (off) to 2**31 - 1"),
    "top_p": _Range(1.0, Real, math.ulp(0.0), 1, "a number above 0 and at most 1 (1 is off)"),
    "min_p": _Range(0.0, Real, 0, 1, "a number from 0 (off) to 1"),
    "seed": _Range(0, Integral, 0, 2**32 - 1, "a whole number from 0 to 2**32 - 1"),
    "repetition_penalty": _Range(1.0, Real, 1e-6, 1e6, "a number from 1e-6 to 1e6 (1 is off)"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}
_DTYPES = {"top_k": mx.int32, "seed": mx.uint32}  # the others are float32


class History(NamedTuple):
    """What a row has seen: the ids of its prompt and those generated since."""

    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()


# --- one row -------------------------------------------------------------------------------------


def check_settings(vocab_size: int, **options: Any) -> Row:
    """Check the options of one row.

    Args:
        vocab_size: V.
        **options: any of `OPTION_NAMES`; None and what is left out take the default.

    Returns:
        Plain values under every one of `OPTION_NAMES`: numbers, `logit_bias` as `{id: float}`,
        `allowed_tokens` as a tuple of distinct ids or None.

    Raises:
        InputError: an unknown option; a value of a wrong type or out of range, NaN; an id outside
            the vocabulary; an empty list of allowed tokens; no token that could ever be chosen.
    """
    if unknown := sorted(options.keys() - set(OPTION_NAMES)):
        raise InputError(f"unknown option {unknown[0]!r}; known: {', '.join(OPTION_NAMES)}")
    row: Row = {name: _check_number(name, options.get(name)) for name in SETTING_NAMES}
    row["logit_bias"] = _check_bias(options.get("logit_bias"), vocab_size)
    row["allowed_tokens"] = _check_allowed(options.get("allowed_tokens"), vocab_size)
    never = {token for token, bias in row["logit_bias"].items() if bias == -math.inf}
    allowed = row["allowed_tokens"]
    if len(never) == vocab_size or (allowed is not None and never.issuperset(allowed)):
        raise InputError("logit_bias is -inf for every allowed token: leave one to choose")
    return row


def split_settings(count: int, vocab_size: int, **options: Any) -> list[Row]:
    """`count` checked rows, from options that are one value for all or an iterable of one per row.

    One mapping is a `logit_bias` for all, one list of ids are `allowed_tokens` for all.

    Raises:
        InputError: as `check_settings`, and for a wrong number of values.
    """
    columns = {name: _spread(name, value, count) for name, value in options.items()}
    checked: dict[tuple[int, ...], Row] = {}  # by identity: equal rows are checked once
    rows = []
    for i in range(count):
        given = {name: column[i] for name, column in columns.items()}
        key = tuple(map(id, given.values()))
        if key not in checked:
            checked[key] = check_settings(vocab_size, **given)
        rows.append(dict(checked[key]))
    return rows


def uses_history(row: Row) -> bool:
    """Whether a checked row looks at what was said before: any of the three penalties is on."""
    added = row["presence_penalty"] or row["frequency_penalty"]
    return bool(added) or row["repetition_penalty"] != 1


def is_plain_greedy(row: Row) -> bool:
    """Whether `sampling.greedy` of the raw logits chooses what a checked row asks for."""
    has_bias = row["logit_bias"] or row["allowed_tokens"] is not None
    return not has_bias and not uses_history(row) and row["temperature"] == 0


# --- arrays of a batch ---------------------------------------------------------------------------


def make_settings(
    batch: int,
    vocab_size: int,
    *,
    history: History | Sequence[History | None] | mx.array | None = None,
    **options: Any,
) -> Settings:
    """Check options and build the arrays of `batch` rows; without any they are greedy.

    Args:
        batch: B.
        vocab_size: V.
        history: one for all rows, one per row, or an array int32 `[B, V]` as a call returned it.
        **options: as of `split_settings`.

    Returns:
        An array under each of `SETTING_INPUTS`, as `stack_settings`.

    Raises:
        InputError: as `split_settings`; a history of another shape or of ids out of range.
    """
    rows = split_settings(batch, vocab_size, **options)
    if isinstance(history, mx.array):
        if history.shape != (batch, vocab_size) or history.dtype != mx.int32:
            raise InputError(
                f"history: expected int32 [{batch}, {vocab_size}], "
                f"got {history.dtype} {list(history.shape)}"
            )
        return {**stack_settings(rows, vocab_size), "history": history}
    histories = [history] * batch if isinstance(history, History) else history
    return stack_settings(rows, vocab_size, histories)


def stack_settings(
    rows: Sequence[Row], vocab_size: int, histories: Sequence[History | None] | None = None
) -> Settings:
    """Build the arrays of a batch from checked rows.

    Args:
        rows: as `check_settings` returned them.
        vocab_size: V.
        histories: per row what it has seen, or None for nothing.

    Returns:
        `[B]` under each of `SETTING_NAMES`: top_k int32, seed uint32, the others float32; `bias`
        float32 `[B, V]`, to be added to the logits; `history` int32 `[B, V]`: bit 0 says that a
        token stands in the prompt, the bits above it count how often it was generated.

    Raises:
        InputError: another number of histories than of rows; ids of one that are out of range.
    """
    numbers = {name: _stack(name, [row[name] for row in rows]) for name in SETTING_NAMES}
    history = make_history(histories or [None] * len(rows), vocab_size)
    if history.shape[0] != len(rows):
        raise InputError(f"history: expected {len(rows)} rows, got {history.shape[0]}")
    return {**numbers, "bias": _make_bias(rows, vocab_size), "history": history}


def make_history(histories: Sequence[History | None], vocab_size: int) -> mx.array:
    """What each row has seen, int32 `[B, V]` as in `stack_settings`.

    Raises InputError for ids outside the vocabulary.
    """
    places: list[tuple[int, int]] = []
    values: list[int] = []
    for row, history in enumerate(histories):
        if history is None:
            continue
        prompt, counts = set(history.prompt), Counter(history.generated)
        for token in counts.keys() | prompt:
            places.append((row, _check_id("history", token, vocab_size)))
            values.append(2 * counts[token] + (token in prompt))
    seen = mx.zeros((len(histories), vocab_size), dtype=mx.int32)
    if not places:
        return seen
    where = mx.array(places, dtype=mx.int32)
    return seen.at[where[:, 0], where[:, 1]].add(mx.array(values, dtype=mx.int32))


def _make_bias(rows: Sequence[Row], vocab_size: int) -> mx.array:
    limited = [row["allowed_tokens"] is not None for row in rows]
    bias = mx.zeros((len(rows), vocab_size))
    if any(limited):
        allowed = [(i, t) for i, row in enumerate(rows) for t in row["allowed_tokens"] or ()]
        where = mx.array(allowed, dtype=mx.int32)
        bias = mx.where(mx.array(limited)[:, None], -mx.inf, bias)
        bias[where[:, 0], where[:, 1]] = 0.0
    added = [(i, t, value) for i, row in enumerate(rows) for t, value in row["logit_bias"].items()]
    if added:
        where = mx.array([(i, t) for i, t, _ in added], dtype=mx.int32)
        values = mx.array([value for _, _, value in added])
        bias = bias.at[where[:, 0], where[:, 1]].add(values)
    return bias


def _stack(name: str, values: list[Any]) -> mx.array:
    if name in ("temperature", "top_p", "min_p"):  # what was not 0 must not become 0
        values = [max(value, _FLOAT32_TINY) if value > 0 else 0.0 for value in values]
    return mx.array(values, dtype=_DTYPES.get(name, mx.float32))


# --- checks --------------------------------------------------------------------------------------


def _check_number(name: str, value: Any) -> Any:
    allowed = _RANGES[name]
    if value is None:
        value = allowed.default
    is_number = isinstance(value, allowed.kind) and not isinstance(value, bool)
    if not is_number or not allowed.low <= value <= allowed.high:
        raise InputError(f"{name} must be {allowed.wanted}, got {value!r}: correct that value")
    return int(value) if allowed.kind is Integral else float(value)


def _check_bias(value: Any, vocab_size: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias: expected a mapping of ids to numbers, got {value!r}")
    for bias in value.values():
        is_number = isinstance(bias, Real) and not isinstance(bias, bool)
        if not is_number or not (bias == -math.inf or abs(bias) <= _HEAVIEST):
            raise InputError(
                f"logit_bias must be numbers from -1e30 to 1e30, or -inf for never, got {bias!r}"
            )
    return {_check_id("logit_bias", key, vocab_size): float(bias) for key, bias in value.items()}


def _check_allowed(value: Any, vocab_size: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise InputError(f"allowed_tokens: expected a list of token ids, got {value!r}")
    tokens = tuple(dict.fromkeys(_check_id("allowed_tokens", t, vocab_size) for t in value))
    if not tokens:
        raise InputError("allowed_tokens is empty: list at least one id, or leave it out")
    return tokens


def _check_id(name: str, token: Any, vocab_size: int) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise InputError(f"{name}: expected token ids, whole numbers, got {token!r}")
    if not 0 <= int(token) < vocab_size:
        raise InputError(
            f"{name}: token id {token} is outside the vocabulary (0 to {vocab_size - 1})"
        )
    return int(token)


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for every row: `value` itself, or its items."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        return [value] * count
    items = list(value)
    if name == "allowed_tokens" and not any(i is None or isinstance(i, Iterable) for i in items):
        return [items] * count
    if len(items) != count:
        raise InputError(
            f"{name}: expected one value or {count}, one per row, got {len(items)}: "
            "pass as many values as there are rows"
        )
    return items
