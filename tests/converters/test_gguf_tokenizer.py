from __future__ import annotations

import json
from pathlib import Path

import converters
from converters import smollm2
from converters.gguf import tokenizer as gguf_tokenizer
from converters.gguf.file import read_header
from converters.gguf.pre_tokenizers import PRE_TOKENIZERS
from funcrt.errors import SourceError, TextError

import mlx.core as mx
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

GOLDEN = Path(__file__).parents[1] / "reference" / "smollm2.json"
TEXT = (
    "The year 2024 wasn't dull: 31 shops, 7 inns.\n\n  Günther's café sold 1200 crêpes; 東京 😀\t"
    "def f(x):\n    return x ** 2  # squares\r\n<|im_end|> they'll END"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def original():
    """A byte-level BPE tokenizer trained on TEXT, special tokens first, one user-defined last."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


@pytest.fixture
def metadata(original):
    """What a GGUF file holds of `original`."""
    tokens = [original.id_to_token(i) for i in range(original.get_vocab_size())]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in tokens
        ],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in json.loads(original.to_str())["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def encode(metadata, text: str) -> list[int]:
    return list(gguf_tokenizer.build(metadata).encode(text))


def test_ids_are_those_of_the_tokenizer_in_the_file(original, metadata):
    for text in (
        TEXT,
        "",
        " ",
        "1234567",
        "<|im_start|>user\nhi<tool>",
        "\x00\x7f naïve ﬁ e\u0301",
    ):
        assert encode(metadata, text) == original.encode(text).ids


def test_decoding_gives_the_text_back(metadata):
    tokenizer = gguf_tokenizer.build(metadata)
    text = TEXT.replace("<|im_end|>", "")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_special_and_user_defined_ones_are_not(metadata):
    tokenizer = gguf_tokenizer.build(metadata)
    ids = tokenizer.encode("<|im_start|>a<tool>b<|im_end|><|endoftext|>")
    assert [i for i in ids if i < 3] == [1, 2, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_bos_and_eos_are_added_where_the_file_says_so(metadata, bos, eos):
    plain = encode(metadata, "the")
    metadata["tokenizer.ggml.add_bos_token"] = bos
    metadata["tokenizer.ggml.add_eos_token"] = eos
    assert encode(metadata, "the") == [1] * bos + plain + [2] * eos


def test_a_missing_add_bos_token_means_what_the_pre_tokenizer_says(metadata):
    assert encode(metadata, "the")[0] != 1
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert encode(metadata, "the")[0] == 1
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert encode(metadata, "the")[0] != 1


def test_stops_template_and_named_tokens(metadata):
    metadata["tokenizer.ggml.eot_token_id"] = 0
    metadata["tokenizer.ggml.eom_token_id"] = 2
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    tokenizer = gguf_tokenizer.build(metadata)
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert tokenizer.config["bos_token"] == "<|im_start|>"
    assert tokenizer.config["eos_token"] == "<|im_end|>"
    assert tokenizer.config["unk_token"] == "<|endoftext|>"


def test_no_tokenizer_in_the_file():
    assert gguf_tokenizer.build({}) is None


# --- pre-tokenizers ------------------------------------------------------------------------------

# Of "it's 12024,  I'LL getHTTP /a\n\nx".
SPLITS = {
    "gpt-2": "it 's Ġ12024 , Ġ ĠI ' LL ĠgetHTTP Ġ/ a Ċ Ċ x",
    "smollm": "it 's Ġ 1 2 0 2 4 , Ġ ĠI ' LL ĠgetHTTP Ġ/ a Ċ Ċ x",
    "llama-bpe": "it 's Ġ 120 24 , Ġ ĠI 'LL ĠgetHTTP Ġ/ a ĊĊ x",
    "qwen2": "it 's Ġ 1 2 0 2 4 , Ġ ĠI 'LL ĠgetHTTP Ġ/ a ĊĊ x",
    "gpt-4o": "it's Ġ 120 24 , Ġ ĠI'LL Ġget HTTP Ġ/ a ĊĊ x",
    "tekken": "it 's Ġ 1 2 0 2 4 , Ġ ĠI 'LL Ġget HTTP Ġ/ a ĊĊ x",
    "deepseek-llm": "it ' s Ġ 12024 , Ġ ĠI ' LL ĠgetHTTP Ġ/ a Ċ Ċ x",
    "deepseek-coder": "it ' s Ġ 1 2 0 2 4 , Ġ ĠI ' LL ĠgetHTTP Ġ/ a Ċ Ċ x",
    "deepseek-v3": "it 's Ġ 120 24 , Ġ ĠI 'LL ĠgetHTTP Ġ/ a ĊĊ x",
    "falcon": "it ' s Ġ 120 24 , Ġ ĠI ' LL ĠgetHTTP Ġ / a Ċ Ċ x",
    "kimi-k2": "it's Ġ 120 24 , Ġ ĠI'LL Ġget HTTP Ġ/ a ĊĊ x",
    "tiny_aya": "it's Ġ 12 024 , Ġ ĠI'LL Ġget HTTP Ġ/ a ĊĊ x",
}


@pytest.mark.parametrize("name", SPLITS)
def test_pieces(name):
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str("it's 12024,  I'LL getHTTP /a\n\nx")
    assert [piece for piece, _ in pieces] == SPLITS[name].split()


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pieces_cover_the_text(name):
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str(TEXT)
    assert decoders.ByteLevel().decode([piece for piece, _ in pieces]) == TEXT


def test_a_piece_that_is_a_token_needs_no_merges(metadata):
    """llama-bpe vocabularies have tokens that their merges never reach."""
    metadata["tokenizer.ggml.tokens"].append("Ġxyzzy")
    metadata["tokenizer.ggml.token_type"].append(1)
    metadata["tokenizer.ggml.add_bos_token"] = False
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert len(encode(metadata, " xyzzy")) > 1
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert encode(metadata, " xyzzy") == [last]


def test_qwen2_composes_characters_first(metadata):
    assert encode(metadata, "e\u0301") != encode(metadata, "é")
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert encode(metadata, "e\u0301") == encode(metadata, "é")


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"model": "bert"},
            "tokenizer 'bert' is not supported; known: gpt2, llama, .*pass ignore=",
        ),
        ({"model": "llama"}, "scores: expected [0-9]+ entries, got none"),
        ({"pre": "zork"}, "pre-tokenizer 'zork' is not known; known: gpt-2, .*smollm"),
        ({"pre": None}, "pre-tokenizer 'default' is not known"),
        ({"tokens": None}, "tokens: expected a list of strings, got NoneType"),
        ({"tokens": [1, 2]}, "tokens: expected a list of strings"),
        ({"merges": None}, "merges: expected a list of strings"),
        ({"merges": ["zz qq"]}, "joins 'zz qq', which tokens do not cover"),
        ({"merges": ["nospace"]}, "joins 'nospace'"),
        ({"token_type": [1]}, "token_type: expected [0-9]+ entries, got 1 entries"),
        ({"token_type": None}, "token_type: expected [0-9]+ entries, got none"),
        ({"eos_token_id": 5000}, "eos_token_id: expected an id below [0-9]+, got 5000"),
        ({"eos_token_id": "2"}, "eos_token_id: expected an id below [0-9]+, got '2'"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_metadata_that_does_not_fit(metadata, change, match):
    for key, value in change.items():
        metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(TextError, match=match):
        gguf_tokenizer.build(metadata)


def test_tokens_listed_twice(metadata):
    metadata["tokenizer.ggml.tokens"][-1] = metadata["tokenizer.ggml.tokens"][5]
    with pytest.raises(TextError, match="lists tokens twice"):
        gguf_tokenizer.build(metadata)


def test_chat_template_that_is_no_text(metadata):
    metadata["tokenizer.chat_template"] = ["a"]
    with pytest.raises(TextError, match="chat_template: expected text, got list"):
        gguf_tokenizer.build(metadata)


# --- the real one --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path():
    try:
        return smollm2.fetch()
    except SourceError as error:
        pytest.skip(str(error))


def test_smollm2_prompts(path):
    """Ids of an independent tokenizer for four prompts, one of 760 tokens."""
    tokenizer = gguf_tokenizer.build(read_header(path).metadata)
    prompts = json.loads(GOLDEN.read_text())["prompts"]
    assert len(prompts) == 4
    for prompt, golden in prompts.items():
        assert list(tokenizer.encode(golden.get("prompt_text", prompt))) == golden["prompt_ids"]
    assert tokenizer.eos_token_ids == (2,)
    assert "<|im_start|>" in tokenizer.chat_template


def test_smollm2_logits(path):
    """PyTorch's logits: with q and k rows in GGUF's order they would be far off."""
    model = converters.load(path, dtype="float32")
    prompt, golden = next(iter(json.loads(GOLDEN.read_text())["prompts"].items()))
    logits, _ = model(mx.array([model.tokenizer.encode(prompt)]))
    for token, _, expected in golden["top5_first"]:
        assert logits[0, -1, token].item() == pytest.approx(expected, abs=2e-3)
