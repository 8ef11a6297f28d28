"""From what a person names on the command line to a model and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from funcrt.errors import InputError, TextError

if TYPE_CHECKING:
    from funcrt.calling import CallForm
    from funcrt.model import Model
    from funcrt.text import Tokenizer


def load_checkpoint(source: str, dtype: str | None, ignore: Sequence[str] | None = None) -> Model:
    """A checkpoint of any known format."""
    import converters

    return converters.load(source, dtype, ignore=ignore or ())


def load_any(source: str, dtype: str | None, ignore: Sequence[str] | None = None) -> CallForm:
    """A bundle or a checkpoint."""
    if (Path(source) / "manifest.json").is_file():
        from funcrt.bundle import load_bundle

        if dtype is not None:
            raise InputError("--dtype is fixed when a bundle is exported; export it again")
        return load_bundle(source)
    return load_checkpoint(source, dtype, ignore)


def tokenizer_of(model: CallForm) -> Tokenizer:
    """The model's tokenizer. Raises TextError if it has none."""
    if model.tokenizer is None:
        raise TextError(
            "this model has no tokenizer.json, so it cannot read or write text: "
            "copy it from the original checkpoint, then convert or export again"
        )
    return model.tokenizer


def prompt_ids(model: CallForm, text: str, raw: bool, system_prompt: str | None) -> list[int]:
    """Ids of a prompt: through the chat template where there is one, unless `raw`."""
    tokenizer = tokenizer_of(model)
    if raw or (not tokenizer.has_chat_template and system_prompt is None):
        return list(tokenizer.encode(text))
    return chat_ids(model, [*system_messages(system_prompt), {"role": "user", "content": text}])


def chat_ids(model: CallForm, messages: list[dict[str, str]]) -> list[int]:
    """Ids of a conversation, ready for the next answer."""
    return list(tokenizer_of(model).apply_chat_template(messages))


def system_messages(system_prompt: str | None) -> list[dict[str, str]]:
    """The beginning of a conversation."""
    return [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
