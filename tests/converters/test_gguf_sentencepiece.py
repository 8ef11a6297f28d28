"""Tokenizers with scores, and Gemma's: compared with `tokenizers` in the form of tokenizer.json."""

from __future__ import annotations

import json
from typing import Any

import converters  # noqa: F401  (before anything loads mlx)
from converters.gguf import tokenizer as gguf_tokenizer
from converters.gguf.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, make_merges
from funcrt.errors import TextError

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, trainers

TEXT = (
    "The year 2024 wasn't dull: 31 shops, 7 inns.\n\n  Günther's café sold 1200 crêpes; the inns\t"
    "def f(x):\n    return x ** 2  # the squares of the years\r\nthey'll END there"
)
TEXTS = (
    TEXT, "", " ", "  two  spaces ", "the", " the", "naïve ﬁ e\u0301 東京 😀", "\x00\x7f\n\n\n",
    "▁", "a▁b", "<unk>", "2024",
)  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def train(prefix: bool) -> tokenizers.Tokenizer:
    """A tokenizer as transformers writes it for Llama 2 (with a prefix) and Gemma (without)."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*SPECIAL, *BYTES], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    text = json.loads(tokenizer.to_str())
    # Bytes are special for the trainer only.
    text["added_tokens"] = [t for t in text["added_tokens"] if t["content"] in SPECIAL]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(text))
    end = [decoders.Strip(" ", 1, 0)] * prefix
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return tokenizer


def merges_of(tokenizer: tokenizers.Tokenizer) -> list[list[str]]:
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in found]


def describe(tokenizer: tokenizers.Tokenizer, prefix: bool) -> dict[str, Any]:
    """What a GGUF file holds of it: tokens score by the order in which they were made."""
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    order = {"".join(pair): -float(i + 1) for i, pair in enumerate(merges_of(tokenizer))}
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(BYTES, BYTE)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [order.get(token, -1e6) for token in tokens],
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.fixture(scope="module", params=[True, False], ids=["llama", "gemma"])
def case(request):
    original = train(request.param)
    return original, describe(original, request.param)


def build(metadata: dict[str, Any], **changes: Any):
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {k: v for k, v in {**metadata, **changed}.items() if v is not None}
    return gguf_tokenizer.build(metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_the_original(case, text):
    original, metadata = case
    tokenizer = build(metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == original.encode(text).ids
    assert tokenizer.decode(ids) == original.decode(ids, skip_special_tokens=False)


def test_bos_is_added_unless_the_file_says_otherwise(case):
    _, metadata = case
    plain = build(metadata, add_bos_token=False).encode("the")
    assert build(metadata).encode("the") == [1, *plain]
    assert build(metadata, add_eos_token=True).encode("the") == [1, *plain, 2]
    assert build(metadata).eos_token_ids == (2,)


def test_a_space_prefix_is_meant_unless_the_file_says_otherwise():
    original = train(prefix=True)
    tokenizer = build(describe(original, True), add_space_prefix=None)
    assert tokenizer.encode("the", add_special_tokens=False) == original.encode("the").ids
    assert tokenizer.decode(tokenizer.encode("the inns"), skip_special_tokens=True) == "the inns"


def test_control_tokens_are_found_in_text_and_users_tokens_are_kept(case):
    _, metadata = case
    tokens = [*metadata["tokenizer.ggml.tokens"], "<tool>", "▁▁▁"]
    tokenizer = build(
        metadata,
        tokens=tokens,
        token_type=[*metadata["tokenizer.ggml.token_type"], USER_DEFINED, USER_DEFINED],
        scores=[*metadata["tokenizer.ggml.scores"], -1e6, -1e6],
    )
    tool = len(tokens) - 2
    ids = tokenizer.encode("the<tool>inns</s>", add_special_tokens=False)
    assert tool in ids
    assert ids[-1] == 2
    assert "<tool>" in tokenizer.decode(ids, skip_special_tokens=True)
    assert "</s>" not in tokenizer.decode(ids, skip_special_tokens=True)
    if not metadata["tokenizer.ggml.add_space_prefix"]:
        assert tokenizer.encode("the   inns", add_special_tokens=False).count(tool + 1) == 1


def test_the_better_score_is_joined_first():
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5, "x": 6}
    types = [NORMAL] * 6 + [CONTROL]
    assert make_merges(vocab, [0, 0, 0, -5.0, -2.0, -9.0, 0], types) == [
        ("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc"),
    ]  # fmt: skip
    assert make_merges(vocab, [0, 0, 0, -2.0, -5.0, -9.0, 0], types)[0] == ("a", "b")


def test_control_tokens_are_never_made_of_text():
    assert make_merges({"a": 0, "b": 1, "ab": 2}, [0, 0, 0], [NORMAL, NORMAL, CONTROL]) == []


def test_gemma_4_has_merges_and_no_scores():
    original = train(prefix=False)
    metadata = describe(original, False)
    merges = [" ".join(pair) for pair in merges_of(original)]
    tokenizer = build(metadata, model="gemma4", scores=None, merges=merges, add_space_prefix=None)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == original.encode(text).ids


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scores": None}, r"scores: expected \d+ entries, got none"),
        ({"scores": [0.0]}, r"scores: expected \d+ entries, got 1 entries"),
        ({"token_type": [1]}, r"token_type: expected \d+ entries, got 1 entries"),
        ({"token_type": None}, r"token_type: expected \d+ entries, got none"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is not supported"),
        ({"eos_token_id": 9999}, "eos_token_id: expected an id below"),
    ],
)
def test_metadata_that_does_not_fit(case, changes, match):
    with pytest.raises(TextError, match=match):
        build(case[1], **changes)


def test_bytes_that_are_missing(case):
    tokens = [t if t != "<0x41>" else "<other>" for t in case[1]["tokenizer.ggml.tokens"]]
    with pytest.raises(TextError, match="lacks tokens of bytes: <0x41>"):
        build(case[1], tokens=tokens)
