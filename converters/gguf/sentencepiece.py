"""Tokenizers in the manner of SentencePiece: spaces are spelled ▁, unknown characters in bytes.

Files of `tokenizer.ggml.model` = llama have a score for each token instead of merges: of two
neighbours whose join is a token, those with the best join are joined first, as SentencePiece's BPE
does (arXiv:1808.06226 §3.1). Merges in the order of scores do the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from funcrt.errors import TextError

import tokenizers
from tokenizers import decoders, models, normalizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
_SPACE = "▁"


def make_merges(
    vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """All pairs of tokens whose join is a token that text may become, the best join first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, index in vocab.items():
        if types[index] not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                # Among joins of the same token the longer left piece first, as transformers has it.
                found.append((-scores[index], -len(left), -len(right), (left, right)))
    found.sort(key=lambda merge: merge[:3])
    return [pair for *_, pair in found]


def make_tokenizer(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unknown: str | None,
    space_prefix: bool,
) -> tokenizers.Tokenizer:
    """The `tokenizers` object, without added tokens.

    Args:
        vocab: tokens and ids.
        merges: in order.
        unknown: the token of what even bytes do not cover.
        space_prefix: put a space before each text, and take it off when decoding.
    """
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spelled = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spelled]) if space_prefix else spelled
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def check_bytes(vocab: Mapping[str, int]) -> None:
    """Raise TextError unless every byte has a token."""
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if missing:
        raise TextError(f"tokenizer.ggml.tokens lacks tokens of bytes: {', '.join(missing[:5])}")
