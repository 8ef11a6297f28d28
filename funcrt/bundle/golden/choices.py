"""Golden calls that choose tokens: settings that differ by row, seeds whose draws survive small
errors of the logits, and what has to come out.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from funcrt import guesses, sampling
from funcrt.bundle.golden.calls import VERIFYING, Call, Spot
from funcrt.bundle.golden.reference import Reference
from funcrt.bundle.golden.replay import LOGPROB, spread_settings
from funcrt.sampling import History
from funcrt.settings import Row
from funcrt.steps import STEPS

import mlx.core as mx

Arrays = dict[str, mx.array]

# By row, in turns; the third is greedy.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2,
     "presence_penalty": 0.1, "frequency_penalty": 0.1},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.4, "frequency_penalty": -0.2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"temperature": 1.3, "top_k": 5, "min_p": 0.05, "repetition_penalty": 0.9},
)  # fmt: skip
_ALLOWED = 32  # ids that every fourth row may choose
_SEEDS_TRIED = 16
_DISTURBANCES = 4


class _Choices(NamedTuple):
    """The places of one row that are compared, in order: P of them."""

    spots: list[Spot]
    logits: mx.array  # float32 [P, V]
    positions: mx.array  # int32 [P]
    guess: int | None  # the token after the first place


def expect_choice(
    call: Call,
    ids: list[list[int]],
    found: Sequence[Reference],
    disturbance: float,
    dtype: mx.Dtype,
) -> tuple[Arrays, Arrays]:
    """Inputs of a call that chooses tokens, beside its ids, and what has to come out.

    Args:
        call: of a function that gives tokens.
        ids: `[B][T]`, those of the call.
        found: the reference of each spot.
        disturbance: how far logits may be off without changing a token that is compared.
        dtype: of the logits that `sample` takes.
    """
    vocab = next(iter(found[0].logits.values())).size
    by_row = _gather(call, ids, found, dtype if call.function == "sample" else mx.float32)
    inputs: Arrays = {}
    if call.function == "sample":
        inputs["logits"] = mx.stack(
            [by_row[row].logits[0] if row in by_row else mx.zeros((vocab,)) for row in _rows(call)]
        ).astype(dtype)
    if "bias" not in STEPS[call.function].inputs:
        return inputs, _expect(call, found, by_row, {}, disturbance)

    first = {spot_row: choices.spots[0] for spot_row, choices in by_row.items()}
    best = {row: found[call.spots.index(spot)].probes[spot.index] for row, spot in first.items()}
    rows = [_make_row(row, best.get(row), vocab) for row in _rows(call)]
    histories = [
        History([s.token for s in first[row].row.steps[: first[row].index]], best[row][:1] * 2)
        if row in first
        else History()
        for row in _rows(call)
    ]
    sparse = make_sparse(rows, histories)
    spread = spread_settings(sparse, vocab)
    valid = mx.array(call.valid)
    at_places = {row: _at_places(call, ids, valid, spread["history"], row) for row in by_row}
    settings: dict[int, Arrays] = {}
    for row, choices in by_row.items():
        plain = sampling.stack_settings([{**rows[row], "logit_bias": {}}], vocab)
        own = {**plain, "bias": spread["bias"][row : row + 1], "history": at_places[row]}
        seed = _choose_seed(row, len(call.ids), choices, own, disturbance)
        rows[row]["seed"] = seed
        settings[row] = _with_seed(own, seed)
    numbers = sampling.stack_settings(rows, vocab)
    inputs |= {name: numbers[name] for name in sampling.SETTING_NAMES} | sparse
    return inputs, _expect(call, found, by_row, settings, disturbance)


def expect_top(logits: mx.array) -> Arrays:
    """What the most likely tokens of logits `[B, V]` are, found without MLX's sorting."""
    logits = logits.astype(mx.float32)
    count = min(sampling.ALTERNATIVES, logits.shape[1])
    listed: Any = logits.tolist()
    ids = [heapq.nlargest(count, range(len(row)), key=row.__getitem__) for row in listed]
    best = mx.array(ids, dtype=mx.int32)
    logprobs = mx.take_along_axis(logits, best, axis=1) - mx.logsumexp(
        logits, axis=1, keepdims=True
    )
    probes = [[row, column] for row in range(len(ids)) for column in range(count)]
    return {
        "probes": mx.array(probes, dtype=mx.int32),
        "reference": logprobs.reshape(-1),
        "expected_tokens": best.reshape(-1),
        "gaps": mx.full((best.size,), mx.inf),
    }


def make_sparse(rows: Sequence[Row], histories: Sequence[History]) -> Arrays:
    """The bias and history of checked rows in the form that `spread_settings` reads."""
    fill = [0.0 if row["allowed_tokens"] is None else float("-inf") for row in rows]
    bias: dict[tuple[int, int], float] = {}
    seen: dict[tuple[int, int], int] = {}
    for index, (row, history) in enumerate(zip(rows, histories, strict=True)):
        added, allowed = row["logit_bias"], row["allowed_tokens"]
        for token in added if allowed is None else allowed:
            bias[index, token] = added.get(token, 0.0)
        generated = Counter(history.generated)
        for token in generated.keys() | set(history.prompt):
            seen[index, token] = 2 * generated[token] + (token in history.prompt)
    return {
        "bias.fill": mx.array(fill),
        "bias.places": mx.array(list(bias), dtype=mx.int32).reshape(-1, 2),
        "bias.values": mx.array(list(bias.values()), dtype=mx.float32),
        "history.places": mx.array(list(seen), dtype=mx.int32).reshape(-1, 2),
        "history.values": mx.array(list(seen.values()), dtype=mx.int32),
    }


def _rows(call: Call) -> range:
    return range(len(call.ids))


def _place(call: Call, spot: Spot) -> tuple[int, int]:
    """Row and place within the call of a spot."""
    return divmod(spot.output, call.tokens if call.function in VERIFYING else 1)


def _gather(
    call: Call, ids: list[list[int]], found: Sequence[Reference], dtype: mx.Dtype
) -> dict[int, _Choices]:
    """The places to compare by row, with the reference's logits, rounded to `dtype`."""
    pairs: dict[int, list[tuple[Spot, Reference]]] = {}
    for spot, reference in zip(call.spots, found, strict=True):
        pairs.setdefault(_place(call, spot)[0], []).append((spot, reference))
    by_row = {}
    for row, own in pairs.items():
        spots = [spot for spot, _ in own]
        logits = mx.stack([reference.logits[spot.index] for spot, reference in own])
        guess = ids[row][_place(call, spots[1])[1]] if len(spots) > 1 else None
        positions = mx.array([spot.index + 1 for spot in spots], dtype=mx.int32)
        by_row[row] = _Choices(spots, logits.astype(dtype).astype(mx.float32), positions, guess)
    return by_row


def _make_row(row: int, best: list[int] | None, vocab: int) -> Row:
    """Options of one row, around the tokens that it is likely to choose; defaults if it is idle."""
    if best is None:
        return sampling.check_settings(vocab)
    options, random = dict(_OPTIONS[row % len(_OPTIONS)]), Random(row)
    if row % 2 == 0:
        options["logit_bias"] = {
            random.randrange(vocab): float("-inf"),
            best[-1]: -0.5,
            best[min(1, len(best) - 1)]: 0.5,
        }
    if row % 4 == 3:
        others = [random.randrange(vocab) for _ in range(_ALLOWED - len(best))]
        options["allowed_tokens"] = [*best, *others]
    return sampling.check_settings(vocab, **options)


def _at_places(
    call: Call, ids: list[list[int]], valid: mx.array, history: mx.array, row: int
) -> mx.array:
    """The history of one row at each of its spots, int32 `[P, V]` (`[1, V]` without guesses)."""
    if call.function not in VERIFYING:
        return history[row : row + 1]
    tokens = mx.array(ids[row : row + 1], dtype=mx.int32)
    followed = guesses.follow(history[row : row + 1], tokens, valid[row : row + 1])[0]
    own = [place for b, place in (_place(call, spot) for spot in call.spots) if b == row]
    return followed[mx.array(own)]


def _choose_seed(
    row: int, batch: int, choices: _Choices, settings: Arrays, disturbance: float
) -> int:
    """Of a few seeds the one with the steadiest draws, if possible the guess as the first."""
    steadiest, most = row, -1
    first = choices._replace(logits=choices.logits[:1], positions=choices.positions[:1])
    for attempt in range(_SEEDS_TRIED):
        seed = row + batch * attempt
        own = _with_seed(settings, seed)
        if choices.guess is not None:
            alone = {**own, "history": own["history"][:1]}
            if _choose(first, alone, first.logits).tokens.item() != choices.guess:
                continue
        steady: Any = _is_steady(choices, own, disturbance).tolist()
        if all(steady):
            return seed
        if (count := [*steady, False].index(False)) > most:
            steadiest, most = seed, count
    return steadiest


def _with_seed(settings: Arrays, seed: int) -> Arrays:
    return {**settings, "seed": mx.array([seed], dtype=mx.uint32)}


def _choose(choices: _Choices, settings: Arrays, logits: mx.array) -> sampling.Sampled:
    if not settings:
        return sampling.greedy(logits)
    return sampling.choose(logits, settings, choices.positions)


def _is_steady(choices: _Choices, settings: Arrays, disturbance: float) -> mx.array:
    """Whether each place chooses the same token from slightly different logits: bool `[P]`."""
    exact = _choose(choices, settings, choices.logits).tokens
    same = mx.ones(exact.shape) != 0
    for number in range(_DISTURBANCES):
        noise = mx.random.uniform(-1, 1, choices.logits.shape, key=mx.random.key(number))
        disturbed = _choose(choices, settings, choices.logits + disturbance * noise)
        same = same & (disturbed.tokens == exact)
    return same


def _expect(
    call: Call,
    found: Sequence[Reference],
    by_row: dict[int, _Choices],
    settings: dict[int, Arrays],
    disturbance: float,
) -> Arrays:
    """The tokens and log-probabilities of steady places, and logits of all that are compared."""
    outputs = len(call.ids) * (call.tokens if call.function in VERIFYING else 1)
    tokens, probes, values = [-1] * outputs, [], []
    for row, choices in by_row.items():
        own = settings.get(row, {})
        chosen = _choose(choices, own, choices.logits)
        steady: Any = _is_steady(choices, own, disturbance).tolist()
        listed: Any = [chosen.tokens.tolist(), chosen.logprobs.tolist()]
        for spot, is_steady, token, logprob in zip(choices.spots, steady, *listed, strict=True):
            if is_steady:
                tokens[spot.output] = token
                probes.append([spot.output, LOGPROB])
                values.append(logprob)
    if "logits" in STEPS[call.function].outputs:
        for spot, reference in zip(call.spots, found, strict=True):
            probes += [[spot.output, id_] for id_ in reference.probes[spot.index]]
            values += reference.values[spot.index]
    return {
        "probes": mx.array(probes, dtype=mx.int32).reshape(-1, 2),
        "reference": mx.array(values, dtype=mx.float32),
        "expected_tokens": mx.array(tokens, dtype=mx.int32),
        "gaps": mx.full((outputs,), mx.inf),
    }
