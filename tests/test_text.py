"""Tokenizer files, chat templates and streaming, on small tokenizers made here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from funcrt.detokenize import Speller, TextStream
from funcrt.errors import TextError
from funcrt.text import Tokenizer

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

FAMILY = "👩\u200d👩\u200d👧"  # five characters that show as one
LINES = [
    "The quick brown fox jumps over the lazy dog.  Twice, even!",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "東京は日本の首都です。你好世界",
    "café cafe\u0301 nai\u0308ve Zu\u0308rich",
    f"{FAMILY} 👍🏽 🇫🇷 emoji 🎉🎉",
    "ab abab aab stop STOP </b> end of turn",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
property_test = settings(max_examples=100, deadline=None, derandomize=True)


@cache
def byte_level() -> Tokenizer:
    """GPT-2 style: every byte is a letter; BOS added; one added token that is not special."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    raw.add_tokens([AddedToken("<tool é>", special=False)])
    raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(raw, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, None, (2,))


@cache
def sentence_piece() -> Tokenizer:
    """Llama-2 style: spaces as U+2581, unknown characters as byte tokens, one space stripped."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    latin = [line for line in LINES if line.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    trained.train_from_iterator(latin, trainer)
    model = json.loads(trained.to_str())["model"]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", *model["vocab"]]
    raw = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(dict.fromkeys(words))},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(SPECIAL)
    return Tokenizer(raw, {}, None, (2,))


def word_tokenizer(words: list[str], decoder: Any) -> Tokenizer:
    vocab = {word: index for index, word in enumerate(words)}
    raw = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=words[0]))
    if decoder is not None:
        raw.decoder = decoder
    return Tokenizer(raw, {})


def stream_all(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.finish()]


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte of `text`."""
    entries = [f"<0x{byte:02X}>" for byte in text.encode()]
    if tokenizer is byte_level():
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        entries = [letter for piece, _ in letters.pre_tokenize_str(text) for letter in piece]
    return [tokenizer._tokenizer.token_to_id(entry) for entry in entries]


def lists_of_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, some outside the vocabulary, between whole and broken characters."""
    one = st.integers(0, tokenizer.vocab_size + 3).map(lambda token: [token])
    character = st.sampled_from(["é", "日", "🎉", " "]).map(lambda c: byte_ids(tokenizer, c))
    broken = st.tuples(character, st.integers(1, 3)).map(lambda pair: pair[0][: pair[1]])
    return st.lists(one | character | broken, max_size=20).map(lambda parts: [*chain(*parts)])


texts = st.text(max_size=40) | st.lists(
    st.sampled_from([FAMILY, "e\u0301", "日", " ", "  ", "ab", "\n", "🎉", "\ufffd", "\u0301"])
).map("".join)


# Streaming: characters


@property_test
@given(st.data())
def test_byte_level_pieces_add_up_to_decode_for_any_ids(data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = data.draw(lists_of_ids(tokenizer))
    for skip in (True, False):
        stream = tokenizer.stream(skip_special_tokens=skip)
        seen = ""
        for count, token in enumerate(ids, start=1):
            seen += stream.push(token)
            whole = tokenizer.decode(ids[:count], skip_special_tokens=skip)
            # At most one character is held back: one that lacks bytes.
            assert whole in (seen, seen + "\ufffd")
            assert stream.text == seen
        assert seen + stream.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@property_test
@given(texts)
@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_text_streams_back_as_decoded_and_each_character_at_once(make: Any, text: str) -> None:
    tokenizer: Tokenizer = make()
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole == text or tokenizer is not byte_level()
    stream = tokenizer.stream()
    seen = ""
    for count, token in enumerate(ids, start=1):
        seen += stream.push(token)
        assert whole.startswith(seen)
        so_far = tokenizer.decode(ids[:count], skip_special_tokens=True)
        if "\ufffd" not in so_far:
            assert seen == so_far
    assert seen == whole
    assert stream.finish() == ""


def replace_by_hand(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What sentence_piece should stream: only the broken bytes of a run are replaced."""
    data = b""
    for token in ids:
        entry = tokenizer._tokenizer.id_to_token(token)
        if entry is None or entry in SPECIAL:
            continue
        byte = re.fullmatch("<0x(..)>", entry)
        data += bytes.fromhex(byte[1]) if byte else entry.replace("▁", " ").encode()
    return data.decode(errors="replace").removeprefix(" ")


@property_test
@given(st.data())
def test_sentence_piece_streams_any_ids(data: st.DataObject) -> None:
    tokenizer = sentence_piece()
    ids = data.draw(lists_of_ids(tokenizer))
    streamed = "".join(stream_all(tokenizer.stream(), ids))
    assert streamed == replace_by_hand(tokenizer, ids)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in decoded:
        assert streamed == decoded


@pytest.mark.parametrize(
    ("words", "decoder"),
    [
        (["[U]", "play", "##ing", "un", ".", "##s", "n't"], decoders.WordPiece()),
        (["<u>", "▁Hello", "▁", "world", "▁▁\ufffdx", "!"], decoders.Metaspace()),
        (["<u>", "Hello", "big", "world"], None),
    ],
    ids=["WordPiece", "Metaspace", "none"],
)
@property_test
@given(ids=st.lists(st.integers(0, 6), max_size=12))
def test_other_decoders_stream_what_they_decode(words: list[str], decoder: Any, ids: Any) -> None:
    tokenizer = word_tokenizer(words, decoder)
    assert "".join(stream_all(tokenizer.stream(), ids)) == tokenizer.decode(ids)


def test_half_a_character_is_held_and_then_whole() -> None:
    tokenizer = byte_level()
    ids = byte_ids(tokenizer, "😀")
    assert stream_all(tokenizer.stream(), ids) == ["", "", "", "😀", ""]
    assert stream_all(tokenizer.stream(), ids[:3]) == ["", "", "", "\ufffd"]
    assert stream_all(tokenizer.stream(), [*ids[:3], ids[0]]) == ["", "", "", "\ufffd", "\ufffd"]


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    tokenizer = byte_level()
    ids = [1, *tokenizer.encode("a<tool é>b", add_special_tokens=False), 2]
    assert "".join(stream_all(tokenizer.stream(), ids)) == "a<tool é>b"
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join(stream_all(stream, ids)) == "<s>a<tool é>b</s>"


def test_decoders_that_need_later_tokens_are_refused() -> None:
    for decoder in (decoders.BPEDecoder(), decoders.CTC()):
        with pytest.raises(TextError, match="cannot stream"):
            word_tokenizer(["a", "b</w>"], decoder).stream()


class CountingTokenizer:
    """Passes everything on, and counts the ids that are decoded."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self.raw = raw
        self.decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_a_long_stream_costs_work_in_proportion(make: Any) -> None:
    tokenizer: Tokenizer = make()
    counting = CountingTokenizer(tokenizer._tokenizer)
    speller = Speller(counting)  # type: ignore[arg-type]
    first = counting.decoded
    ids = (tokenizer.encode("\n".join(LINES)) * 200)[:20_000]
    broken = [tokenizer.vocab_size // 2, 255] * 10_000  # never anything but halves of characters
    assert len(ids) == 20_000
    for tokens in (ids, broken):
        stream = TextStream(speller, ("never found",), skip_special_tokens=True)
        stream_all(stream, tokens)
        assert len(stream._held) < 20
    # Each id of the vocabulary is decoded once behind another, which is decoded too.
    assert counting.decoded - first <= 3 * tokenizer.vocab_size


# Streaming: stop strings


def stop_by_hand(text: str, stops: Sequence[str]) -> str | None:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))]
    return None


few_letters = st.text("ab é", min_size=1, max_size=5)


@settings(property_test, max_examples=300)
@given(st.text("ab é👍", max_size=30), st.lists(few_letters, max_size=3), st.booleans())
def test_the_first_stop_string_ends_the_text(text: str, stops: list[str], bytewise: bool) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    if bytewise:  # every stop string spans tokens
        ids = byte_ids(tokenizer, text)
    stream = tokenizer.stream(stops)
    seen = ""
    for count, token in enumerate(ids, start=1):
        seen += stream.push(token)
        so_far = tokenizer.decode(ids[:count]).removesuffix("\ufffd")
        cut = stop_by_hand(so_far, stops)
        assert stream.stopped == (cut is not None)
        if cut is not None:
            assert seen == cut
            assert stream.push(ids[-1]) == ""
            break
        begun = [n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])]
        assert seen == so_far[: len(so_far) - max(begun, default=0)]
    else:
        assert stop_by_hand(text, stops) is None
    seen += stream.finish()
    expected = stop_by_hand(text, stops)
    assert seen == stream.text == (text if expected is None else expected)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one stop two", "stop", "one "),
        ("one stop two", ["two", "stop"], "one "),
        ("abcd", ["bcd", "c"], "ab"),  # c is complete before bcd
        ("abcd", ["cd", "bcd", "d"], "a"),  # complete at once: the longest
        ("aab", ["ab"], "a"),  # the first a looked like the beginning
        ("ababab!", ["abab!"], "ab"),
        ("stop", ["stop"], ""),
        ("sto", ["stop"], "sto"),
        ("cafe\u0301!", ["\u0301"], "cafe"),
        ("a🎉b", ["🎉"], "a"),
        ("say </b> aloud", ["</b>"], "say "),
    ],
)
@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_stop_strings(make: Any, text: str, stops: Any, expected: str) -> None:
    tokenizer: Tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream(stops)
    assert "".join(stream_all(stream, ids)) == stream.text == expected
    assert stream.stopped == (expected != text)


def test_what_a_token_holds_behind_a_stop_string_is_dropped() -> None:
    tokenizer = word_tokenizer(["<u>", "▁one", "▁two.▁Three", "▁four"], decoders.Metaspace())
    assert stream_all(tokenizer.stream("."), [1, 2, 3]) == ["one", " two", "", ""]


@pytest.mark.parametrize("stop", ["", ["a", ""], [3], [None]])
def test_unusable_stop_strings_are_refused(stop: Any) -> None:
    with pytest.raises(TextError, match="a stop string must be text and not empty"):
        byte_level().stream(stop)


def test_a_finished_stream_takes_no_more() -> None:
    stream = byte_level().stream(["ab"])
    stream.push(byte_level().encode("a", add_special_tokens=False)[0])
    assert (stream.finish(), stream.finish(), stream.text) == ("a", "", "a")
    with pytest.raises(TextError, match="push after finish"):
        stream.push(3)


# Files


def write_folder(folder: Path, **files: Any) -> Path:
    """The byte-level tokenizer's files, with those of `files` (dots as __) instead or besides."""
    byte_level().save(folder)
    (folder / "generation_config.json").unlink()
    for name, content in files.items():
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else json.dumps(content)).encode()
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def test_saved_files_read_back_the_same(tmp_path: Path) -> None:
    template = "{% for m in messages %}\r\n{{ m.content }} é\n{% endfor %}"
    config = {"bos_token": "<s>", "chat_template": "not this one", "model_max_length": 8}
    ours = Tokenizer(byte_level()._tokenizer, config, template, (2, 7))
    ours.save(tmp_path / "new" / "folder")
    theirs = Tokenizer.from_folder(tmp_path / "new" / "folder")
    assert theirs.config == {"bos_token": "<s>", "model_max_length": 8}
    assert theirs.chat_template == template
    assert theirs.eos_token_ids == (2, 7)
    assert theirs.vocab_size == ours.vocab_size
    ids = ours.encode("\n".join(LINES))
    assert theirs.encode("\n".join(LINES)) == ids
    assert theirs.decode(ids, skip_special_tokens=True) == "\n".join(LINES)
    Tokenizer(byte_level()._tokenizer, {}).save(tmp_path / "new" / "folder")
    bare = Tokenizer.from_folder(tmp_path / "new" / "folder")
    assert (bare.has_chat_template, bare.eos_token_ids, bare.config) == (False, (), {})


OTHER = {"config__json": {"eos_token_id": 7}}


def test_special_tokens_are_added_only_when_asked() -> None:
    with_bos, without = byte_level().encode("a"), byte_level().encode("a", add_special_tokens=False)
    assert with_bos == [1, *without]
    assert byte_level().decode(with_bos) == "<s>a"


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer.from_str(byte_level()._tokenizer.to_str())
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    assert Tokenizer(raw, {}).encode("a b c d e f") == byte_level().encode("a b c d e f")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config__json": {"eos_token_id": [5, 6]}, **OTHER}, (5, 6)),
        ({"generation_config__json": {}, **OTHER}, (7,)),
        ({"config__json": {"eos_token_id": None}}, (2,)),
        ({"tokenizer_config__json": {}}, ()),
        ({"tokenizer_config__json": {"eos_token": "<not there>"}}, ()),
    ],
)  # fmt: skip
def test_where_the_ending_ids_come_from(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert Tokenizer.from_folder(write_folder(tmp_path, **files)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("T", "T"),
        ([{"name": "tools", "template": "X"}, {"name": "default", "template": "D"}], "D"),
        ([{"name": "only", "template": "O"}], "O"),
        ([{"name": "a", "template": "A"}, {"name": "b", "template": "B"}], None),
        (None, None),
    ],
)
def test_templates_inside_the_config(tmp_path: Path, template: Any, expected: str | None) -> None:
    folder = write_folder(tmp_path, tokenizer_config__json={"chat_template": template})
    assert Tokenizer.from_folder(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(folder).chat_template == "J"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": '{"version": "1.0", "mod'}, "tokenizer.json is not a file that"),
        ({"chat_template__jinja": b"\xff"}, "chat_template.jinja must be UTF-8 text"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config__json": [1]}, "must hold a JSON object, got list"),
        ({"tokenizer_config__json": {"chat_template": 7}}, "must be text or a list of named"),
        ({"tokenizer_config__json": {"chat_template": ["x"]}}, "must be text or a list of named"),
        ({"config__json": {"eos_token_id": "</s>"}}, "must be an id or a list, got '</s>'"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(TextError, match=re.escape(message)):
        Tokenizer.from_folder(write_folder(tmp_path, **files))


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="which is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(TextError, match=r"has no tokenizer\.json: copy it from"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(TextError, match=r"has only tokenizer\.model, a SentencePiece file"):
        Tokenizer.from_folder(tmp_path)


# Chats

CHAT = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "Hi é"}]


def chat_with(template: str, messages: Any = CHAT, add_generation_prompt: bool = True) -> str:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None,
              "add_bos_token": True, "padding_side": "left"}  # fmt: skip
    tokenizer = Tokenizer(byte_level()._tokenizer, config, template)
    return tokenizer.decode(tokenizer.apply_chat_template(messages, add_generation_prompt))


def test_a_chat_is_written_as_its_template_says() -> None:
    template = """
    {%- for message in messages %}
        {{- bos_token + message['role'] + '\n' + message.content + eos_token }}
    {% endfor %}
    {% if add_generation_prompt %}
{{ bos_token }}assistant
{%- endif %}"""
    written = "<s>system\nBe <brief>.</s>\n<s>user\nHi é</s>\n"
    assert chat_with(template, add_generation_prompt=False) == written
    assert chat_with(template) == written + "<s>assistant"


def test_special_tokens_are_encoded_once_as_tokens() -> None:
    tokenizer = Tokenizer(byte_level()._tokenizer, {}, "<s>{{ messages[0].content }}</s>")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids == [1, *tokenizer.encode("hi", add_special_tokens=False), 2]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be <brief>."}'),
        ("{{ messages[1].content | tojson }}", '"Hi é"'),
        ("{{ [1, 2] | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
        ("{% for x in [1, 2] %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "2"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% for x in [1, 2] %}{% generation %}{{ x }} {% endgeneration %}{% endfor %}", "1 2 "),
        ("{{ pad_token }}{{ add_bos_token }}{{ padding_side }}{% if tools %}T{% endif %}", ""),
    ],
)  # fmt: skip
def test_what_templates_expect(template: str, expected: str) -> None:
    assert chat_with(template) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "failed: roles must alternate"),
        ("{{ messages[0].missing.deeper }}", "failed: .*missing"),
        ("{{ 1 + messages }}", "failed: unsupported operand"),
        ("{% if %}", "is not valid"),
        ("{{ messages.append(1) }}", "failed: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "failed: .*unsafe"),
    ],
)
def test_a_failing_template_says_why(template: str, message: str) -> None:
    with pytest.raises(TextError, match=f"the chat template {message}"):
        chat_with(template)


@pytest.mark.parametrize("messages", ["Hello", {"role": "user"}, [{"content": "x"}], ["Hello"]])
def test_something_else_than_a_chat_is_refused(messages: Any) -> None:
    with pytest.raises(TextError, match="a chat is a list like"):
        chat_with("x", messages)


def test_a_chat_without_a_template_is_refused() -> None:
    assert not byte_level().has_chat_template
    with pytest.raises(TextError, match="has no chat template"):
        byte_level().apply_chat_template(CHAT)


def test_jinja2_is_needed_for_chats_only(tmp_path: Path) -> None:
    byte_level().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    code = f"""
import sys
sys.modules["jinja2"] = None  # importing it now fails
from funcrt.errors import TextError
from funcrt.text import Tokenizer
tokenizer = Tokenizer.from_folder({str(tmp_path)!r})
stream = tokenizer.stream()
assert "".join(map(stream.push, tokenizer.encode("some text"))) == "some text"
try:
    tokenizer.apply_chat_template([{{"role": "user", "content": "x"}}])
except TextError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "chat templates need jinja2: pip install jinja2"
