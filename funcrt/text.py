"""Tokenizer files, text to ids and back. With `chat` and `detokenize` all that knows of text.

Everything above arrays meets text here only. Needs `tokenizers`, and `jinja2` for chats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from funcrt.chat import ChatTemplate, choose_template
from funcrt.detokenize import Speller, TextStream
from funcrt.errors import TextError

import tokenizers

__all__ = ["TOKENIZER_FILES", "TextStream", "Tokenizer"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""What `Tokenizer.save` writes."""


class Tokenizer:
    """Text to ids and back, and chats to ids.

    Args:
        tokenizer: the `tokenizers` object. Its padding and truncation are switched off: a prompt
            is never cut in silence.
        config: what tokenizer_config.json holds.
        chat_template: Jinja source; None takes the one in `config`, if there is one.
        eos_token_ids: the ids that end a generated text.

    Attributes:
        config: `config` without its chat template.
        chat_template: Jinja source, or None.
        eos_token_ids: as given.

    Raises:
        TextError: `config` holds a chat template of unknown form.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.config = dict(config)
        in_config = choose_template(self.config.pop("chat_template", None))
        self.chat_template = in_config if chat_template is None else chat_template
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer files of a Hugging Face style folder.

        Only tokenizer.json must exist. The chat template is chat_template.jinja, else the one in
        tokenizer_config.json; of several named ones the one called "default". The ids that end a
        text come from the first of generation_config.json, config.json and the `eos_token` of
        tokenizer_config.json that names any.

        Raises:
            TextError: tokenizer.json is missing, or a file cannot be understood.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TextError(_explain_missing(folder))
        try:
            tokenizer = tokenizers.Tokenizer.from_str(_read_text(path))
        except Exception as error:  # nothing narrower is raised
            raise TextError(f"{path} is not a file that `tokenizers` reads: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        source = _read_text(template) if template.is_file() else None
        return cls(tokenizer, config, source, _read_eos_token_ids(folder, config, tokenizer))

    def save(self, folder: str | Path) -> None:
        """Write the files that `from_folder` reads, over any that are there.

        These are tokenizer.json, tokenizer_config.json, generation_config.json (only the ids that
        end a text) and, if there is a chat template, chat_template.jinja.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", self.config)
        _write_json(folder / "generation_config.json", {"eos_token_id": list(self.eos_token_ids)})
        template = folder / "chat_template.jinja"
        if self.chat_template is None:
            template.unlink(missing_ok=True)  # one left from before would be read back
        else:
            template.write_bytes(self.chat_template.encode())

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included. A model may have more rows than this."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into ids; special tokens such as BOS are added where the tokenizer says so.

        Raises TextError for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"the text is not valid Unicode ({error.reason})") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Turn ids into text. Ids outside the vocabulary add nothing."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(
        self, stop: str | Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> TextStream:
        """Start to decode a text token by token, up to the first of the strings `stop`.

        Raises:
            TextError: a stop string that is empty or not a string, or a tokenizer whose text
                depends on tokens that come later.
        """
        stops: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
        for string in stops:
            if not isinstance(string, str) or not string:
                raise TextError(f"a stop string must be text and not empty, got {string!r}")
        return TextStream(self._speller, stops, skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return self.chat_template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Write a chat as the model's prompt and encode it.

        The template itself writes the special tokens, so none are added.

        Args:
            messages: mappings with at least "role" and, as most templates expect, "content".
            add_generation_prompt: end with the header of the reply that is to be generated.

        Raises:
            TextError: there is no template, jinja2 is not installed, the messages are not a list
                of mappings with a role, or the template fails or refuses them.
        """
        named = {name: _read_token(value) for name, value in self.config.items()}
        special_tokens = {
            name: token for name, token in named.items() if name.endswith("_token") and token
        }
        text = self._chat.render(messages, special_tokens, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _chat(self) -> ChatTemplate:
        if self.chat_template is None:
            raise TextError("this tokenizer has no chat template: pass the prompt as plain text")
        return ChatTemplate(self.chat_template)

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self._tokenizer)


def _read_token(value: object) -> str | None:
    """A special token's text, stored as text or as an object with "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_eos_token_ids(
    folder: Path, config: Mapping[str, Any], tokenizer: tokenizers.Tokenizer
) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and all(isinstance(token, int) for token in ids):
            return tuple(ids)
        if ids is not None:
            raise TextError(f"eos_token_id in {folder / name} must be an id or a list, got {ids!r}")
    eos = _read_token(config.get("eos_token"))
    token = None if eos is None else tokenizer.token_to_id(eos)
    return () if token is None else (token,)


def _explain_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"expected a folder with tokenizer.json, got {folder}, which is not a folder"
    convert = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers"
    if (folder / "tokenizer.model").exists():
        return (
            f"{folder} has only tokenizer.model, a SentencePiece file that is not read here: "
            f"make tokenizer.json from it with {convert}"
        )
    return (
        f"{folder} has no tokenizer.json: copy it from where the model came from, or make it "
        f"from older files with {convert}"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # as bytes, so that line ends stay what they are
    except UnicodeDecodeError as error:
        raise TextError(f"{path} must be UTF-8 text: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is not there reads as empty."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise TextError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TextError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
