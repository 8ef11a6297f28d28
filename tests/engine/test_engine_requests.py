"""What an engine takes and refuses, and what it makes of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from funcrt import Engine
from funcrt.errors import CapacityError, FuncrtError, InputError, TextError
from funcrt.model import Model
from tests.engine.harness import EOS, PLAN, make_tokenizer, write
from tests.helpers import TINY, generate_plain, make_model, random_tokens

import mlx.core as mx
import pytest

PROMPTS = [random_tokens(count, count) for count in (5, 1, 19, 8, 30)]
MODEL = make_model()
alone = partial(generate_plain, MODEL)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, PLAN) as made:
        yield made


@cache
def text_engine(*ends: int) -> Engine:
    model = Model(TINY, MODEL.params, make_tokenizer(*ends))
    return Engine(model, PLAN)


def test_prompts_may_be_text():
    engine = text_engine(EOS)
    text = "a b~c"
    tokens = [ord(letter) - 32 for letter in text]
    expected = alone(tokens, 6)
    for prompts in (text, [text], [tokens], tokens):
        (completion,) = engine.generate(prompts, max_tokens=6)
        assert completion.tokens == expected
        assert completion.text == write(expected)
        assert completion.prompt_tokens == 5
    both = engine.generate([text, [1, 2]], max_tokens=6)
    assert both[0].text == write(expected)
    chunks = list(engine.stream(text, max_tokens=6))
    assert "".join(chunk.text for chunk in chunks) == write(expected)


def test_stop_tokens_end_a_text():
    prompts = PROMPTS
    expected = [alone(prompt, 8) for prompt in prompts]
    ends = (expected[0][3], expected[2][0])
    completions = text_engine(*ends).generate(prompts, max_tokens=8)
    stopped = 0
    for tokens, completion in zip(expected, completions, strict=True):
        where = min((tokens.index(end) for end in ends if end in tokens), default=None)
        kept = tokens if where is None else tokens[: where + 1]
        assert completion.tokens == kept
        assert completion.finish_reason == ("length" if where is None else "stop")
        assert completion.text == write(kept if where is None else kept[:-1])
        stopped += where is not None
    assert stopped > 0
    # An end at the very limit is still an end.
    (last,) = text_engine(*ends).generate(prompts[2], max_tokens=1)
    assert last.finish_reason == "stop"


def test_stop_strings_end_a_text():
    prompts = PROMPTS
    expected = [alone(prompt, 9) for prompt in prompts]
    texts = [write(tokens) for tokens in expected]
    assert not any(EOS in tokens for tokens in expected)
    stops = [texts[0][3:6], texts[2][5:7]]
    completions = text_engine(EOS).generate(prompts, max_tokens=9, stop=stops)
    for text, tokens, completion in zip(texts, expected, completions, strict=True):
        ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        if ends:
            end, begin = min(ends)
            assert completion.text == text[:begin]
            assert completion.tokens == tokens[:end]
            assert completion.finish_reason == "stop"
        else:
            assert completion.text == text
            assert completion.tokens == tokens
            assert completion.finish_reason == "length"
    assert completions[0].text == texts[0][:3]
    chunks = list(text_engine(EOS).stream(prompts[0], max_tokens=9, stop=stops[0]))
    assert "".join(chunk.text for chunk in chunks) == texts[0][:3]
    assert chunks[-1].finish_reason == "stop"
    # What only begins a stop string is handed out in the end.
    (whole,) = text_engine(EOS).generate(prompts[0], max_tokens=9, stop=texts[0][7:] + "~~")
    assert whole.text == texts[0]


# --- refusals -------------------------------------------------------------------------------------

BAD: list[tuple[Any, dict[str, Any], type[FuncrtError], str]] = [
    ([[]], {}, InputError, "prompt 0 is empty"),
    ([[1], []], {}, InputError, "prompt 1 is empty"),
    ([96], {}, InputError, r"prompt 0: token id 96 is outside the vocabulary \(0 to 95\)"),
    ([[1], [2, -1]], {}, InputError, "prompt 1: token id -1"),
    ([2**70], {}, InputError, "token id"),
    ([[True, False]], {}, InputError, "integer ids, got True"),
    ([True], {}, InputError, "integer ids, got True"),
    ([[1.0]], {}, InputError, "integer ids, got 1.0"),
    ([1.0], {}, InputError, "integer ids, got 1.0"),
    ([[None]], {}, InputError, "got None"),
    ([[1], 2], {}, InputError, "prompt 1"),
    ([1, [2]], {}, InputError, "prompt 0"),
    ([[[1]]], {}, InputError, "prompt 0"),
    ([["a"]], {}, InputError, "got 'a'"),
    ("text", {}, TextError, "needs a tokenizer"),
    (["text"], {}, TextError, "needs a tokenizer"),
    ([1], {"stop": "x"}, TextError, "stop strings need a tokenizer"),
    ([1], {"max_tokens": [1, 2]}, InputError, "max_tokens: expected one value or 1, got 2"),
    ([[1], [2]], {"max_tokens": [1]}, InputError, "expected one value or 2, got 1"),
    ([[1], [2]], {"temperature": [1.0]}, InputError, "temperature: expected one value or 2"),
    ([[1], [2]], {"seed": [1, 2, 3]}, InputError, "seed: expected one value or 2"),
    ([b"abc"], {}, InputError, "got bytes"),
    (None, {}, InputError, "expected strings or lists of ids, got NoneType"),
    (5, {}, InputError, "expected strings or lists of ids, got int"),
    (mx.array([1]), {}, InputError, "expected strings or lists of ids, got array"),
    ([0] * 48, {}, CapacityError, r"^prompt has 48 tokens, largest capacity is 47: export a "
     r"larger one \(--capacity 64\)$"),
    ([[1], [0] * 5012], {}, CapacityError, r"prompt has 5012 tokens.*--capacity 8192"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("prompts", "options", "error", "match"),
    BAD,
    ids=[f"{i}-{b[3][:24]}" for i, b in enumerate(BAD)],
)
def test_requests_that_cannot_be_served(engine, prompts, options, error, match):
    calls: list[Callable[..., object]] = [engine.generate, engine.stream]
    for call in calls:  # a stream says so at once, not at its first token
        with pytest.raises(error, match=match):
            call(prompts, **options)


BAD_OPTIONS: list[tuple[dict[str, Any], Any, str]] = [
    ({"max_tokens": 0}, InputError, "max_tokens: expected an integer >= 1, got 0"),
    ({"max_tokens": True}, InputError, "max_tokens"),
    ({"max_tokens": "5"}, InputError, "max_tokens"),
    ({"max_tokens": -1}, InputError, "max_tokens"),
    ({"max_tokens": None}, InputError, "max_tokens"),
    ({"max_tokens": 1.5}, InputError, "max_tokens"),
    ({"temperature": -1.0}, InputError, "temperature"),
    ({"temperature": float("nan")}, InputError, "temperature"),
    ({"temperature": "hot"}, InputError, "temperature"),
    ({"temperature": float("inf")}, InputError, "temperature"),
    ({"top_k": 1.5}, InputError, "top_k"),
    ({"top_k": -1}, InputError, "top_k"),
    ({"top_p": 0}, InputError, "top_p"),
    ({"top_p": 1.1}, InputError, "top_p"),
    ({"min_p": 2}, InputError, "min_p"),
    ({"min_p": -0.1}, InputError, "min_p"),
    ({"seed": -1}, InputError, "seed"),
    ({"seed": 2**32}, InputError, "seed"),
    ({"seed": 1.5}, InputError, "seed"),
    ({"repetition_penalty": 0}, InputError, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, InputError, "repetition_penalty"),
    ({"presence_penalty": float("nan")}, InputError, "presence_penalty"),
    ({"frequency_penalty": "x"}, InputError, "frequency_penalty"),
    ({"logit_bias": {96: 1.0}}, InputError, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, InputError, "logit_bias"),
    ({"logit_bias": {1: float("nan")}}, InputError, "logit_bias"),
    ({"logit_bias": {"1": 1.0}}, InputError, "logit_bias"),
    ({"logit_bias": 3}, InputError, "logit_bias"),
    ({"allowed_tokens": []}, InputError, "allowed_tokens"),
    ({"allowed_tokens": [96]}, InputError, "allowed_tokens"),
    ({"allowed_tokens": "ab"}, InputError, "allowed_tokens"),
    ({"allowed_tokens": [1], "logit_bias": {1: -float("inf")}}, InputError, "leave one"),
    ({"top_logprobs": 21}, InputError, "top_logprobs"),
    ({"top_logprobs": -1}, InputError, "top_logprobs"),
    ({"top_logprobs": True}, InputError, "top_logprobs"),
    ({"speculate": "grams"}, InputError, "speculate"),
    ({"speculate": 3}, InputError, "speculate"),
    ({"speculate": True}, InputError, "speculate"),
    ({"stop": 3}, InputError, "stop: expected a string or several, got 3"),
    ({"stop": [3]}, (InputError, TextError), "stop"),
    ({"stop": ""}, (InputError, TextError), "stop"),
    ({"stop": [""]}, (InputError, TextError), "stop"),
    ({"stop": b"x"}, (InputError, TextError), "stop"),
    ({"temp": 0.5}, InputError, "unknown option 'temp'; known: stop, max_tokens, temperature"),
    ({"temperature": True}, InputError, "temperature must be"),
    ({"top_p": True}, InputError, "top_p must be"),
    ({"top_k": True}, InputError, "top_k must be"),
]


@pytest.mark.parametrize(
    ("options", "error", "match"), BAD_OPTIONS, ids=[str(b[0])[:40] for b in BAD_OPTIONS]
)
def test_bad_options_are_refused_before_anything_runs(options, error, match):
    engine = text_engine(EOS)
    before = engine.stats
    with pytest.raises(error, match=match):
        engine.submit(PROMPTS[0], **options)
    for call in (engine.generate, engine.stream):
        with pytest.raises(error, match=match):
            call([PROMPTS[0], PROMPTS[1]], **options)
    assert engine.stats == before


@pytest.mark.parametrize(
    "prompt", [[], "", [EOS + 1], [-1], [1.0], [[1]], None, {}, b"ab", {1: 2}, 5, 5.0, True]
)
def test_bad_prompts_are_refused(prompt):
    with pytest.raises(FuncrtError):
        text_engine(EOS).submit(prompt)


def test_an_engine_works_after_a_refusal(engine):
    with pytest.raises(InputError):
        engine.generate([PROMPTS[0], [999]])
    assert engine.generate(PROMPTS[0], max_tokens=3)[0].tokens == alone(PROMPTS[0], 3)


def test_ids_and_options_may_be_any_sequence(engine):
    expected = alone([3, 4, 5], 3)
    assert engine.generate(range(3, 6), max_tokens=3)[0].tokens == expected
    assert engine.generate([range(3, 6)], max_tokens=3)[0].tokens == expected
    assert engine.generate([[3, 4, 5]] * 2, max_tokens=range(2, 4))[1].tokens == expected
