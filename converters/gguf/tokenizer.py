"""A `tokenizers` tokenizer from GGUF metadata.

Byte-level BPE (`tokenizer.ggml.model` = gpt2) stores its vocabulary and merges, but of the
pre-tokenizer only a name. `PRE_TOKENIZERS` says what each known name stands for: the rules that the
models' own tokenizer.json files hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from funcrt.errors import TextError
from funcrt.text import Tokenizer

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased(after: str) -> str:
    """Words split where lower case turns into upper case, each followed by `after`."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{after}|{start}{_UPPER}+{_LOWER}*{after}"


_GPT4O = rf"{_cased(_CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
_TEKKEN = rf"{_cased('')}|\p{{N}}|{_PATHS}|{_SPACES}"


@dataclass(frozen=True)
class PreTokenizer:
    """What a `tokenizer.ggml.pre` name stands for.

    Attributes:
        pattern: regex of the pieces; None is the one built into `ByteLevel` (GPT-2's).
        digits: split digits one by one first.
        ignore_merges: a piece that is a token becomes it, whatever the merges give.
        add_bos: what a missing `tokenizer.ggml.add_bos_token` means.
        nfc: normalize to NFC first.
    """

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        )
        return pre_tokenizers.Sequence(steps)


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(digits=True)
_LLAMA_BPE = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer(_QWEN2, nfc=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "gpt-4o": PreTokenizer(_GPT4O),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
}

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2  # values of tokenizer.ggml.token_type
_STOPS = ("eos", "eot", "eom")  # each ends a reply
_SKIP = "pass ignore=('tokenizer',) to load the model without text"


def build(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that GGUF metadata describes; None if it describes none.

    Raises:
        TextError: a tokenizer kind or pre-tokenizer name that is not known, a list that is missing
            or does not fit the others, or ids outside the vocabulary.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    if kind != "gpt2":
        raise TextError(f"GGUF tokenizer {kind!r} is not supported; known: gpt2; {_SKIP}")
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise TextError(
            f"GGUF pre-tokenizer {name!r} is not known; known: {', '.join(PRE_TOKENIZERS)}; {_SKIP}"
        )
    tokens = _strings(metadata, "tokens")
    named = _named_tokens(metadata, tokens)
    pre = PRE_TOKENIZERS[name]
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    tokenizer = _make_bpe(tokens, _strings(metadata, "merges"), pre)
    _add_special(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type"))
    _add_template(
        tokenizer,
        _wanted("bos", named, add_bos),
        _wanted("eos", named, add_eos),
    )
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TextError(f"tokenizer.chat_template: expected text, got {type(template).__name__}")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        **{
            f"{role}_token": named[role][0]
            for role in ("bos", "eos", "unk", "pad")
            if role in named
        },
    }
    stops = tuple(dict.fromkeys(named[role][1] for role in _STOPS if role in named))
    return Tokenizer(tokenizer, config, template, stops)


def _make_bpe(tokens: list[str], merges: list[str], pre: PreTokenizer) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = sorted({token for index, token in enumerate(tokens) if vocab[token] != index})
        raise TextError(f"tokenizer.ggml.tokens lists tokens twice: {repeated[:5]}")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise TextError(f"tokenizer.ggml.merges joins {merge!r}, which tokens do not cover")
        pairs.append((left, right))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: Any) -> None:
    if not isinstance(types, list) or len(types) != len(tokens):
        got = f"{len(types)} entries" if isinstance(types, list) else "none"
        raise TextError(f"tokenizer.ggml.token_type: expected {len(tokens)} entries, got {got}")
    added = [
        AddedToken(token, special=type_ != _USER_DEFINED, normalized=False)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    tokenizer.add_tokens(added)


def _add_template(
    tokenizer: tokenizers.Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> None:
    if bos is None and eos is None:
        return
    # Labels, because the tokens themselves may hold characters with a meaning in templates.
    before, after = ["bos"] * (bos is not None), ["eos"] * (eos is not None)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[
            {"id": label, "ids": [found[1]], "tokens": [found[0]]}
            for label, found in (("bos", bos), ("eos", eos))
            if found is not None
        ],
    )


def _named_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, tuple[str, int]]:
    """Role -> token and id, for the roles whose id the metadata has."""
    named = {}
    for role, key in {
        "bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding",
    }.items():  # fmt: skip
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise TextError(
                f"tokenizer.ggml.{key}_token_id: expected an id below {len(tokens)}, got {index!r}"
            )
        named[role] = (tokens[index], index)
    return named


def _wanted(
    role: str, named: Mapping[str, tuple[str, int]], wanted: bool
) -> tuple[str, int] | None:
    if wanted and role not in named:
        raise TextError(
            f"tokenizer.ggml.add_{role}_token is on, but tokenizer.ggml.{role}_token_id is missing"
        )
    return named[role] if wanted else None


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TextError(
            f"tokenizer.ggml.{key}: expected a list of strings, got {type(values).__name__}"
        )
    return values
