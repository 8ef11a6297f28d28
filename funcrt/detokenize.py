"""Ids to text as they come: characters whole, stop strings found across tokens, linear time."""

from __future__ import annotations

import codecs
import re

from funcrt.errors import TextError

import tokenizers
from tokenizers import decoders

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece vocabularies spell one byte


class Speller:
    """The bytes that each token stands for, found by decoding it once behind another token.

    Raises:
        TextError: a decoder whose text depends on tokens that come later.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        if isinstance(tokenizer.decoder, decoders.BPEDecoder | decoders.CTC):
            raise TextError(
                f"the decoder {type(tokenizer.decoder).__name__} cannot stream, its text depends "
                "on later tokens: decode the whole list"
            )
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._pieces: dict[int, bytes] = {}
        self._anchor = self._choose_anchor()

    def is_visible(self, token: int, skip_special_tokens: bool) -> bool:
        """Whether decoding looks at this id at all."""
        if skip_special_tokens and token in self._special:
            return False
        return self._tokenizer.id_to_token(token) is not None

    def spell_first(self, token: int) -> bytes:
        """UTF-8 bytes of a token that begins a text: some decoders drop a space there."""
        return self._spell([], token)

    def spell_next(self, token: int) -> bytes:
        """UTF-8 bytes, maybe half a character, that a token adds to a text under way."""
        if token not in self._pieces:
            self._pieces[token] = self._spell(self._anchor, token)
        return self._pieces[token]

    def _spell(self, before: list[int], token: int) -> bytes:
        text = self._decode([*before, token])[len(self._decode(before)) :]
        if "\ufffd" in text:  # half a character: only the vocabulary entry has its bytes
            return _read_bytes(self._tokenizer.id_to_token(token) or "") or text.encode()
        return text.encode()

    def _choose_anchor(self) -> list[int]:
        """A plain word: tokens decoded behind it are not the first of their text."""
        for token in range(self._tokenizer.get_vocab_size()):
            text = self._decode([token])
            if text.isascii() and text.isalnum():
                return [token]
        return []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class TextStream:
    """Turns tokens into text as they come.

    A piece of text is handed out as soon as nothing can change it: a character once its last byte
    is there, and what may be the beginning of a stop string once it turns out not to be. The first
    stop string to be complete ends the text; of several complete at once the longest counts. So
    the result depends on the text alone, not on how it falls into tokens.

    The pieces add up to `Tokenizer.decode` of all tokens, with one exception: where SentencePiece
    byte tokens are not UTF-8, `decode` replaces every byte of their run, while a stream, which
    cannot take back the characters of the run that were whole, replaces only what is broken.

    Attributes:
        stopped: a stop string was found. It and all that follows it are dropped.
    """

    def __init__(self, speller: Speller, stops: tuple[str, ...], skip_special_tokens: bool) -> None:
        self.stopped = False
        self._speller = speller
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._finished = False
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._held = ""  # the end of the text, as far as it may begin a stop string
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text handed out so far."""
        return "".join(self._parts)

    def push(self, token: int) -> str:
        """Add one token and return the text that it completes, often "".

        Raises:
            TextError: the stream was finished.
        """
        if self._finished:
            raise TextError("push after finish: start a new stream for a new text")
        if self.stopped or not self._speller.is_visible(token, self._skip_special_tokens):
            return ""
        spell = self._speller.spell_next if self._begun else self._speller.spell_first
        self._begun = True
        return self._add(self._utf8.decode(spell(token)))

    def finish(self) -> str:
        """End the text and return what was held back; half a character becomes U+FFFD."""
        self._finished = True
        piece = "" if self.stopped else self._add(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        self._parts.append(rest)
        return piece + rest

    def _add(self, new: str) -> str:
        text = self._held + new
        cut = self._find_stop(text, len(self._held))
        if cut is None:
            cut = len(text) - self._count_held(text)
            self._held = text[cut:]
        else:
            self.stopped = True
            self._held = ""
        self._parts.append(text[:cut])
        return text[:cut]

    def _find_stop(self, text: str, searched: int) -> int | None:
        """Where the first stop string to be complete begins; none is in text[:searched]."""
        for end in range(searched + 1, len(text) + 1):
            if text.endswith(self._stops, 0, end):
                longest = next(stop for stop in self._stops if text.endswith(stop, 0, end))
                return end - len(longest)
        return None

    def _count_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = len(self._stops[0]) - 1 if self._stops else 0
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if text[-n:] in self._beginnings), 0)


def _make_byte_alphabet() -> dict[str, int]:
    """The letter that GPT-2 style vocabularies write for each byte, reversed.

    Printable bytes stand for themselves, the others for 256, 257, ... (Radford et al. 2019).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_ALPHABET = _make_byte_alphabet()


def _read_bytes(spelling: str) -> bytes | None:
    """The bytes that a vocabulary entry spells, None if it does not spell bytes."""
    if match := _BYTE_TOKEN.fullmatch(spelling):
        return bytes.fromhex(match[1])
    if all(letter in _BYTE_ALPHABET for letter in spelling):
        return bytes(_BYTE_ALPHABET[letter] for letter in spelling)
    return None
