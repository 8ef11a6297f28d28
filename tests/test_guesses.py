"""Verified guesses: whatever is guessed, the text is the one that plain decoding makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from funcrt import Bucket, BucketPlan, sampling
from funcrt.cache import FULL, CacheState, init_cache
from funcrt.compiled import Compiled
from funcrt.errors import CapacityError, InputError
from funcrt.guesses import follow, judge, judge_greedy
from funcrt.model import Model
from funcrt.sampling import History, Sampled
from tests import toy_families
from tests.cache_kinds import CACHES, TOKENS, model_of
from tests.helpers import TINY, TOLERANCE, make_model, random_tokens, relative_error
from tests.toy_families import make_toy, registered

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SAMPLED: dict[str, Any] = {
    "temperature": [0.9, 1.3, 0.0, 0.7],
    "top_p": 0.95,
    "top_k": [0, 12, 0, 30],
    "seed": [3, 1, 4, 1],
    "repetition_penalty": [1.2, 1.0, 1.3, 1.1],
    "presence_penalty": [0.0, 0.3, 0.2, 0.0],
    "frequency_penalty": [0.2, 0.1, 0.0, 0.4],
    "logit_bias": {7: 1.0, 9: -1.0},
}
PLAN = BucketPlan(batch=4, tokens=(TOKENS,), capacity=48)
Rows = list[list[int]]


def ints(rows: Any) -> mx.array:
    return mx.array(rows, dtype=mx.int32)


# --- judging logits ------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Logits, settings and guesses that are right about half the time, with padding anywhere."""
    B, T, V = draw(st.integers(1, 3)), draw(st.integers(2, 6)), draw(st.integers(2, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    logits = rng.normal(0, 2, (B, T, V)).astype(np.float32)
    if draw(st.booleans()):
        logits[rng.random((B, T)) < 0.2] = np.nan
    valid = rng.random((B, T)) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    lengths = rng.integers(0, 50, B)
    options = {
        "temperature": rng.choice([0.0, 0.8, 1.5], B).tolist(),
        "seed": rng.integers(0, 99, B).tolist(),
        "repetition_penalty": rng.choice([1.0, 1.4], B).tolist(),
        "frequency_penalty": rng.choice([0.0, 0.7], B).tolist(),
    }
    histories = [History(rng.integers(0, V, 2).tolist(), rng.integers(0, V, 2).tolist())] * B
    return logits, valid, lengths, options, histories, rng


def judge_by_hand(
    logits: np.ndarray, valid: np.ndarray, length: int, row: dict[str, Any], history: History,
    tokens: list[int], rng: np.random.Generator | None = None,
) -> tuple[dict[int, tuple[int, bool]], int, History]:  # fmt: skip
    """One row, one place after the other; with `rng`, guesses are filled in on the way."""
    V = logits.shape[1]
    chosen: dict[int, tuple[int, bool]] = {}
    said, emitted, accepted, going = list(history.generated), list(history.generated), -1, True
    before = None
    for place in np.flatnonzero(valid).tolist():
        if before is not None:
            if rng is not None:
                tokens[place] = chosen[before][0] if rng.random() < 0.6 else int(rng.integers(V))
            said.append(tokens[place])
            going = going and chosen[before] == (tokens[place], True)
        length += 1
        one = sampling.make_settings(1, V, history=History(history.prompt, said), **row)
        result = sampling.sample(mx.array(logits[None, place]), one, ints([length]))
        chosen[place] = (result.tokens.item(), result.finite.item())
        if going:
            accepted += 1
            emitted += [chosen[place][0]] if chosen[place][1] else []
        before = place
    return chosen, max(accepted, 0), History(history.prompt, emitted)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls())
def test_every_place_is_what_one_step_would_choose(call: tuple[Any, ...]) -> None:
    logits, valid, lengths, options, histories, rng = call
    B, T, V = logits.shape
    tokens: Rows = rng.integers(0, V, (B, T)).tolist()
    expected = []
    for b in range(B):
        row = {name: values[b] for name, values in options.items()}
        place = (logits[b], valid[b], int(lengths[b]), row, histories[b], tokens[b])
        expected.append(judge_by_hand(*place, rng))
    chosen = sampling.make_settings(B, V, history=histories, **options)
    inputs = [mx.array(logits), ints(tokens), mx.array(valid)]
    seen, emitted = judge(*inputs, chosen, ints(lengths))
    assert (seen.tokens.dtype, seen.accepted.dtype, seen.history.dtype) == (mx.int32,) * 3
    for b, (places, accepted, history) in enumerate(expected):
        for place, (token, finite) in places.items():
            assert (seen.tokens[b, place].item(), seen.finite[b, place].item()) == (token, finite)
        assert seen.accepted[b].item() == accepted
        real = np.flatnonzero(valid[b]).tolist()
        assert np.flatnonzero(np.array(emitted[b])).tolist() == real[: accepted + 1]
        assert seen.history[b].tolist() == sampling.make_history([history], V)[0].tolist()
    greedy, _ = judge_greedy(*inputs)
    same, _ = judge(*inputs, sampling.make_settings(B, V), ints(lengths))
    for name in ("tokens", "finite", "accepted"):
        assert mx.array_equal(getattr(greedy, name), getattr(same, name)).item()
    assert mx.array_equal(greedy.logprobs, same.logprobs, equal_nan=True).item()


def test_what_stands_at_padding_does_not_matter() -> None:
    logits = mx.array(np.random.default_rng(5).normal(0, 2, (2, 4, 8)).astype(np.float32))
    valid = mx.array([[True, False, True, False], [False, True, True, True]])
    chosen = sampling.make_settings(2, 8, frequency_penalty=1.0, temperature=1.0)
    results = []
    for odd in (0, -9, 2**30):
        tokens = mx.where(valid, ints([[1, 2, 3, 4], [5, 6, 7, 0]]), odd)
        seen, emitted = judge(logits, tokens, valid, chosen, ints([3, 4]))
        real = mx.where(valid, seen.tokens, -1)
        results.append([a.tolist() for a in (real, seen.accepted, seen.history, emitted)])
        history = follow(chosen["history"], tokens, valid)[1]
        assert mx.sum(history, axis=1).tolist() == [0, 0, 2, 4]  # the first is no guess
    assert results[0] == results[1] == results[2]


def test_pairs_of_tokens_follow_their_distribution() -> None:
    """Two tokens of a Markov chain, by one call with a guess and a step for those that need it."""
    V, B = 4, 20_000
    table = np.random.default_rng(2).normal(0, 1, (V, V)).astype(np.float32)
    share = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
    chain, start, guess = mx.array(table), 1, 2
    chosen = sampling.make_settings(B, V, temperature=1.0, seed=range(B))
    tokens = mx.broadcast_to(ints([start, guess]), (B, 2))
    seen, _ = judge(chain[tokens], tokens, mx.ones((B, 2)) != 0, chosen, mx.full((B,), 9, mx.int32))
    first = seen.tokens[:, 0]
    step = sampling.sample(chain[first], chosen, mx.full((B,), 11, mx.int32))
    second = mx.where(seen.accepted == 1, seen.tokens[:, 1], step.tokens)
    pairs = np.bincount(np.array(first * V + second), minlength=V * V)
    expected = B * (share[start][:, None] * share).reshape(-1)
    # 44.3 is the 0.9999 quantile of chi-square with 15 degrees of freedom.
    assert ((pairs - expected) ** 2 / expected).sum() < 44.3
    accepted = seen.accepted.tolist()
    assert np.mean(accepted) == pytest.approx(share[start, guess], abs=0.02)
    assert mx.array_equal(second, step.tokens).item()  # the same draw either way


# --- the step functions --------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def toys() -> Iterator[None]:
    with registered():
        yield


def compile_kind(kind: str, eager: bool) -> Compiled:
    if kind in toy_families.LAYERS:
        return make_toy(kind).compiled(PLAN, eager=eager)
    if kind not in CACHES:
        return make_model(kind).compiled(PLAN, eager=eager)
    layout = CACHES[kind].layout
    if kind == "window":  # a capacity at which rings would not be smaller
        return model_of(kind).compiled(
            BucketPlan(batch=4, tokens=(TOKENS,), capacity=11), None, eager
        )
    return model_of(kind).compiled(PLAN, layout.get("kv_bits"), eager)


def pick(count: int, seed: int, compiled: Compiled) -> list[int]:
    return [token % compiled.vocab_size for token in random_tokens(count, seed)]


class Run:
    """Rows of one batch: their texts so far, state and settings."""

    def __init__(self, compiled: Compiled, options: dict[str, Any] | None) -> None:
        self.compiled = compiled
        self.options = options
        prompts = [pick(n, n, compiled) for n in (3, 5, 1, 4)]
        ids = ints([p + [0] * (TOKENS - len(p)) for p in prompts])
        valid = mx.array([[i < len(p) for i in range(TOKENS)] for p in prompts])
        capacity = compiled.plan.capacity[0]
        logits, self.state = compiled.prefill(ids, valid, compiled.init_cache(4, capacity))
        histories = [History(p) for p in prompts]
        vocab = compiled.vocab_size
        self.settings = sampling.make_settings(4, vocab, history=histories, **(options or {}))
        if options is None:
            tokens = sampling.greedy(logits).tokens
        else:
            first = compiled.sample(logits, self.state["lengths"] + 0, self.settings)
            tokens = self._keep(first).tokens
        self.texts: Rows = [[token] for token in tokens.tolist()]
        self.logits: list[list[mx.array]] = [[] for _ in prompts]

    def _keep(self, chosen: Sampled) -> Sampled:
        if chosen.history is not None:
            self.settings = {**self.settings, "history": chosen.history}
        return chosen

    def decode(self, active: list[bool]) -> None:
        inputs = [ints([text[-1] for text in self.texts]), mx.array(active)]
        if self.options is None:
            chosen, self.state = self.compiled.decode_greedy(*inputs, self.state)
        else:
            chosen, self.state = self.compiled.decode(*inputs, self.settings, self.state)
        self._keep(chosen)
        for row, is_active in enumerate(active):
            if is_active:
                self.texts[row].append(chosen.tokens[row].item())
                self.logits[row].append(chosen.logits[row])

    def verify(self, guesses: list[list[int] | None], places: list[list[int]]) -> Sampled:
        """None is an idle row; real tokens stand at the row's first places of `places`."""
        ids, valid = np.full((4, TOKENS), 1), np.zeros((4, TOKENS), bool)
        real: Rows = [[] for _ in guesses]
        for row, guess in enumerate(guesses):
            if guess is not None:
                real[row] = sorted(places[row][: 1 + len(guess)])
                ids[row, real[row]] = [self.texts[row][-1], *guess]
                valid[row, real[row]] = True
        inputs = [ints(ids), mx.array(valid)]
        if self.options is None:
            chosen, self.state = self.compiled.verify_greedy(*inputs, self.state)
        else:
            chosen, self.state = self.compiled.verify(*inputs, self.settings, self.state)
        self._keep(chosen)
        for row, accepted in enumerate(chosen.accepted.tolist()):
            for place in real[row][: accepted + 1]:
                self.texts[row].append(chosen.tokens[row, place].item())
                self.logits[row].append(chosen.logits[row, place])
        return chosen


KINDS = [*CACHES, *toy_families.LAYERS]


@pytest.mark.parametrize("options", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_with_guesses_is_the_text_without(kind: str, options: dict[str, Any] | None) -> None:
    compiled = compile_kind(kind, eager=True)
    plain, guessed = Run(compiled, options), Run(compiled, options)
    count = 5 if kind == "window" else 24  # a ring of ten slots goes round
    for _ in range(count):
        plain.decode([True] * 4)
    rng = np.random.default_rng(0)
    seen = set()
    for turn in range(200):
        if min(map(len, guessed.texts)) > count:
            break
        guesses: list[list[int] | None] = []
        for row, text in enumerate(guessed.texts):
            room = min(TOKENS - 1, count + 1 - len(text) - 1)
            right = plain.texts[row][len(text) : len(text) + max(room, 0)]
            case = (turn + row) % 5
            if case == 0 or room < 0:
                guesses.append(None)
            elif case == 1:
                guesses.append([])
            elif case == 2:
                guesses.append(right)
            else:
                wrong = int(rng.integers(0, len(right))) if right else 0
                first = 0 if case == 3 else wrong
                guess = list(right)
                guess[first : first + 1] = (
                    [(guess[first] + 1) % compiled.vocab_size] if guess else []
                )
                guesses.append(guess)
        before = [
            None if g is None else len(t) for g, t in zip(guesses, guessed.texts, strict=True)
        ]
        lengths = guessed.state["lengths"].tolist()
        places = [rng.permutation(TOKENS).tolist() for _ in range(4)]
        chosen = guessed.verify(guesses, places)
        for row, guess in enumerate(guesses):
            text, start = guessed.texts[row], before[row]
            accepted = chosen.accepted[row].item()
            new = 0 if guess is None else accepted + 1
            assert guessed.state["lengths"][row].item() == lengths[row] + new
            assert text == plain.texts[row][: len(text)]
            if guess is None:
                assert accepted == 0
            else:
                right = plain.texts[row][start : start + len(guess)]
                agree = [a == b for a, b in zip(guess, right, strict=True)]
                assert accepted == (agree.index(False) if False in agree else len(guess))
                seen.add((len(guess), accepted))
    assert {(0, 0), (4, 4), (4, 0)} <= seen or kind == "window"
    for row in range(4):
        assert guessed.texts[row] == plain.texts[row]
        for ours, theirs in zip(guessed.logits[row], plain.logits[row], strict=True):
            assert relative_error(ours, theirs) <= TOLERANCE
    assert guessed.state["lengths"].tolist() == plain.state["lengths"].tolist()
    if options is not None:
        assert mx.array_equal(guessed.settings["history"], plain.settings["history"]).item()
    if kind == "window":
        return
    for run in (plain, guessed):  # what follows a rolled back state
        for _ in range(2):
            run.decode([True, False, True, True])
    assert guessed.texts == plain.texts


COMPILED = ["full", "ring", "kv8", "kv4", "bfloat16", "float16", *toy_families.LAYERS]


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_calls_equal_eager_ones_and_trace_once(kind: str) -> None:
    eager, compiled = compile_kind(kind, True), compile_kind(kind, False)
    for options in (None, SAMPLED):
        runs = [Run(eager, options), Run(compiled, options)]
        for turn in range(3):
            for run in runs:
                seed = 10 * turn
                guesses = [pick(n, seed + n, run.compiled) for n in (4, 0, 2)]
                run.verify([*guesses, None], [list(range(TOKENS))] * 4)
                run.decode([turn > 0, True, True, False])
        assert runs[0].texts == runs[1].texts
        for ours, theirs in zip(*(run.state.values() for run in runs), strict=True):
            assert_close(ours, theirs)
    assert set(compiled.traces.values()) == {1}
    slots = 1 if kind == "toy_recurrent" else 48
    names = {f"{name}_b4_t{TOKENS}_s{slots}" for name in ("verify", "verify_greedy")}
    assert names <= set(compiled.traces)


def assert_close(ours: mx.array, theirs: mx.array) -> None:
    """In 16 bits the last of them may be rounded differently where operations are fused."""
    if not mx.issubdtype(theirs.dtype, mx.floating):
        assert mx.array_equal(ours, theirs).item()
    else:
        share = TOLERANCE if theirs.dtype == mx.float32 else mx.finfo(theirs.dtype).eps
        assert mx.max(mx.abs(ours - theirs)).item() <= share * mx.max(mx.abs(theirs)).item()


@pytest.mark.parametrize("name", ["decode", "verify", "verify_greedy"])
@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "float16", "kv8", "ring", *toy_families.LAYERS]
)
def test_imported_functions_equal_eager_ones(tmp_path: Path, kind: str, name: str) -> None:
    model: Model
    if kind in toy_families.LAYERS:
        model, layout = make_toy(kind), FULL
    elif kind == "ring":
        model, layout = model_of(kind), FULL._replace(max_tokens=3)
    elif kind == "kv8":
        model, layout = model_of(kind), FULL._replace(kv_bits=8)
    else:
        model, layout = make_model(kind), FULL
    function = model.flat_step(name, Bucket(2, 1 if name == "decode" else 3, 16), layout)
    spec = model.cache_spec(layout)
    assert kind != "ring" or {entry.kind for entry in spec} >= {"ring"}
    state = init_cache(spec, 2, 16)
    V = model.vocab_size
    chosen = sampling.make_settings(
        2, V, temperature=[1.0, 0.0], repetition_penalty=1.2, history=History([1], [2, 2])
    )
    tokens, valid = ints([[3, 4, 5], [6, 7, 8]]), mx.array([[True] * 3, [False, True, True]])
    inputs = {
        "decode": [tokens[:, 0], valid[:, 0], *chosen.values()],
        "verify": [tokens, valid, *chosen.values()],
        "verify_greedy": [tokens, valid],
    }[name]
    arrays = [*model.prepared.values(), *inputs, *state.values()]
    mx.export_function(str(tmp_path / "f.mlxfn"), function, *arrays)
    imported = mx.import_function(str(tmp_path / "f.mlxfn"))
    for ours, theirs in zip(imported(*arrays), function(*arrays), strict=True):
        assert mx.array_equal(ours, theirs, equal_nan=ours.dtype != mx.uint32).item()


def test_guesses_are_written_in_place() -> None:
    """As a prefill, which holds one state (see the buckets' tests), and not another one."""
    compiled = make_model("float32").compiled(BucketPlan(batch=3, tokens=8, capacity=16384))
    chosen = sampling.make_settings(3, TINY.vocab_size, temperature=[0.0, 0.5, 1.0])
    tokens, valid = ints([random_tokens(8, row) for row in range(3)]), mx.ones((3, 8))

    def measure(name: str, *inputs: Any) -> int:
        state: CacheState = compiled.init_cache(3, 16384)
        for n in range(4):
            seen, state = getattr(compiled, name)(tokens, valid, *inputs, state)
            mx.eval([array for array in seen if array is not None], state)
            if n == 1:
                mx.reset_peak_memory()
                level = mx.get_active_memory()
        return mx.get_peak_memory() - level

    size = sum(array.nbytes for array in compiled.init_cache(3, 16384).values())
    plain = measure("prefill")
    assert plain < 0.6 * size  # the scores of attention
    assert measure("verify", chosen) < plain + 0.1 * size
    assert measure("verify_greedy") < plain + 0.1 * size


def test_sizes_and_shapes_that_do_not_exist_are_refused() -> None:
    plan = BucketPlan(batch=2, tokens=(1, 4, 32), capacity=64)
    compiled = make_model("float32").compiled(plan)
    state = compiled.init_cache(2, 64)
    chosen = sampling.make_settings(2, TINY.vocab_size)

    def call(size: int, **changes: Any) -> None:
        tokens, valid = mx.zeros((2, size), mx.int32), mx.ones((2, size))
        compiled.verify(
            changes.get("tokens", tokens), changes.get("valid", valid),
            changes.get("settings", chosen), state,
        )  # fmt: skip

    for size in (1, 3, 32):
        with pytest.raises(CapacityError, match=rf"verify of {size} tokens .*; declared: 4$"):
            call(size)
    other = make_model("float32").compiled(BucketPlan(batch=2, tokens=32, capacity=64))
    with pytest.raises(CapacityError, match=r"verify_greedy of 32 tokens .* none of the sizes"):
        other.verify_greedy(mx.zeros((2, 32), mx.int32), mx.ones((2, 32)), state)
    with pytest.raises(InputError, match="verify valid: expected"):
        call(4, valid=mx.ones((2, 3)))
    with pytest.raises(InputError, match=r"verify tokens: expected mlx\.core\.int32"):
        call(4, tokens=mx.zeros((2, 4)))
    with pytest.raises(InputError, match=r"tokens: expected int32 \[B, T\]"):
        call(4, tokens=mx.zeros((2,), mx.int32))
    with pytest.raises(InputError, match="settings: frequency_penalty is missing"):
        call(4, settings={n: a for n, a in chosen.items() if n != "frequency_penalty"})
    with pytest.raises(InputError, match="verify bias: expected"):
        call(4, settings={**chosen, "bias": mx.zeros((2, 3))})
    with pytest.raises(InputError, match="verify history: expected"):
        call(4, settings={**chosen, "history": mx.zeros((2, TINY.vocab_size))})
    for wrong in (mx.zeros((2, 3)), mx.zeros((TINY.vocab_size,)), mx.array(1.0)):
        with pytest.raises(InputError, match="top logits: expected"):
            compiled.top(wrong)
    with pytest.raises(CapacityError):
        compiled.top(mx.zeros((3, TINY.vocab_size)))
    assert not compiled.traces


def test_alternatives_and_raw_logits_of_a_step() -> None:
    compiled = compile_kind("full", eager=False)
    for options in (None, SAMPLED):
        run = Run(compiled, options)
        run.decode([True] * 4)
        logits = mx.stack([row[-1] for row in run.logits])
        ids, logprobs = compiled.top(logits)
        order = np.argsort(-np.array(logits), axis=-1, kind="stable")[:, :20]
        np.testing.assert_array_equal(np.array(ids), order)
        wide = np.array(logits, np.float64)
        expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
        expected = np.take_along_axis(expected, order, -1)
        np.testing.assert_allclose(np.array(logprobs), expected, atol=2e-5)
        if options is None:
            assert ids[:, 0].tolist() == [text[-1] for text in run.texts]
    assert compiled.traces["top_b4_t1_s0"] == 1
