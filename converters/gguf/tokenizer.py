"""A `tokenizers` tokenizer from GGUF metadata.

Three kinds exist in generating models: byte-level BPE (`tokenizer.ggml.model` = gpt2) with its
merges and the name of a pre-tokenizer, SentencePiece's BPE with scores (llama), and Gemma 4's with
merges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from converters.gguf.sentencepiece import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    check_bytes,
    make_merges,
    make_tokenizer,
)
from funcrt.errors import TextError
from funcrt.text import Tokenizer

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

_STOPS = ("eos", "eot", "eom")  # each ends a reply
_SKIP = "pass ignore=('tokenizer',) to load the model without text"
_START = "tokenizer.ggml."


def build(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that GGUF metadata describes; None if it describes none.

    Raises:
        TextError: a tokenizer kind or pre-tokenizer name that is not known, a list that is missing
            or does not fit the others, or ids outside the vocabulary.
    """
    kind = metadata.get(f"{_START}model")
    if kind is None:
        return None
    if kind not in _KINDS:
        raise TextError(f"GGUF tokenizer {kind!r} is not supported; known: {_listed()}; {_SKIP}")
    tokens = _strings(metadata, "tokens")
    types = _types(metadata, len(tokens))
    named = _named_tokens(metadata, tokens)
    tokenizer, bos = _KINDS[kind](metadata, tokens, types, named)
    add_bos = bool(metadata.get(f"{_START}add_bos_token", bos))
    add_eos = bool(metadata.get(f"{_START}add_eos_token", False))
    _add_template(tokenizer, _wanted("bos", named, add_bos), _wanted("eos", named, add_eos))
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


# --- kinds: metadata, tokens, their types, named ones -> tokenizer, and whether BOS is added ------

_Made = tuple[tokenizers.Tokenizer, bool]
_Named = dict[str, tuple[str, int]]


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], named: _Named
) -> _Made:
    name = metadata.get(f"{_START}pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise TextError(
            f"GGUF pre-tokenizer {name!r} is not known; known: {', '.join(PRE_TOKENIZERS)}; {_SKIP}"
        )
    pre = PRE_TOKENIZERS[name]
    tokenizer = _make_byte_level(_vocab(tokens), _merges(metadata, _vocab(tokens)), pre)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
    )
    return tokenizer, pre.add_bos


def _make_byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer
) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _scored(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], named: _Named
) -> _Made:
    scores = metadata.get(f"{_START}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        got = f"{len(scores)} entries" if isinstance(scores, list) else "none"
        raise TextError(f"{_START}scores: expected {len(tokens)} entries, got {got}")
    vocab = _vocab(tokens)
    return _spelled(metadata, tokens, types, named, make_merges(vocab, scores, types))


def _gemma4(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], named: _Named
) -> _Made:
    merges = _merges(metadata, _vocab(tokens))
    return _spelled(metadata, tokens, types, named, merges, prefix=False)


def _spelled(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    named: _Named,
    merges: list[tuple[str, str]],
    prefix: bool = True,
) -> _Made:
    vocab = _vocab(tokens)
    check_bytes(vocab)
    if metadata.get(f"{_START}remove_extra_whitespaces"):
        raise TextError(f"{_START}remove_extra_whitespaces is not supported; {_SKIP}")
    space = bool(metadata.get(f"{_START}add_space_prefix", prefix))
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = make_tokenizer(vocab, merges, unknown=unknown, space_prefix=space)
    tokenizer.add_tokens(
        [
            # Spelled like text, tokens of users are found in it once it is spelled so; but with a
            # prefix to each text they would get one too.
            AddedToken(
                token, special=kind != USER_DEFINED, normalized=kind == USER_DEFINED and not space
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
    )
    return tokenizer, True


_KINDS = {"gpt2": _byte_level, "llama": _scored, "gemma4": _gemma4}


def _listed() -> str:
    return ", ".join(_KINDS)


# --- lists in the metadata -----------------------------------------------------------------------


def _vocab(tokens: list[str]) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = sorted({token for index, token in enumerate(tokens) if vocab[token] != index})
        raise TextError(f"tokenizer.ggml.tokens lists tokens twice: {repeated[:5]}")
    return vocab


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in _strings(metadata, "merges"):
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise TextError(f"tokenizer.ggml.merges joins {merge!r}, which tokens do not cover")
        pairs.append((left, right))
    return pairs


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    types = metadata.get(f"{_START}token_type")
    if not isinstance(types, list) or len(types) != count:
        got = f"{len(types)} entries" if isinstance(types, list) else "none"
        raise TextError(f"tokenizer.ggml.token_type: expected {count} entries, got {got}")
    return types


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
