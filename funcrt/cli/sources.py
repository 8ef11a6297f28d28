"""From what a person names on the command line to a model and token ids."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funcrt.buckets import BucketPlan
from funcrt.cli import terminal
from funcrt.cli.options import Generation, Opening, Sizes
from funcrt.errors import InputError, TextError

if TYPE_CHECKING:
    from funcrt.calling import CallForm
    from funcrt.engine import Engine
    from funcrt.model import Model
    from funcrt.text import Tokenizer

NOT_FINITE = "the model's logits are not finite: its weights are broken"


def load_checkpoint(source: str, dtype: str | None, ignore: Sequence[str] | None = None) -> Model:
    """A checkpoint of any known format; what it notes is shown."""
    import converters

    model = converters.load(source, dtype, ignore=ignore or ())
    for note in model.notes:
        terminal.warn(f"note: {note}")
    return model


def find_bundle(source: str) -> Path | None:
    """The folder of an exported bundle, pulled if it is one on the hub; None for other sources."""
    if (Path(source) / "manifest.json").is_file():
        return Path(source)
    from converters import hub

    if Path(source).exists() or not hub.is_hub_id(source):
        return None
    return _pull_bundle(source)


@functools.cache
def _pull_bundle(repo: str) -> Path | None:
    from converters.hub import pulling

    return pulling.find_bundle(repo)


def is_bundle(source: str) -> bool:
    """Whether a source is an exported bundle."""
    return find_bundle(source) is not None


def load_any(source: str, loading: Opening | None = None) -> CallForm:
    """A bundle or a checkpoint, behind a spinner."""
    loading = loading or Opening()
    with terminal.timed(f"Loading {source}"):
        bundle = find_bundle(source)
        if bundle is None:
            if loading.params or loading.expected_digest:
                raise InputError(
                    "--params and --expected-digest are for bundles, and this is a checkpoint: "
                    "leave them out"
                )
            return load_checkpoint(source, loading.dtype, loading.ignore)
        from funcrt.bundle import load_bundle

        if loading.dtype is not None:
            raise InputError("--dtype is fixed when a bundle is exported; export it again")
        digest = loading.expected_digest
        return load_bundle(bundle, params=loading.params, expected_digest=digest)


def choose_plan(source: str, model: CallForm, sizes: Sizes) -> BucketPlan | None:
    """The plan that options ask for; None is the model's own. Raises InputError for a bundle."""
    if sizes == Sizes():
        return None
    from funcrt.model import Model

    if is_bundle(source) or not isinstance(model, Model):
        raise InputError(
            "--batch, --tokens and --capacity are fixed when a bundle is exported; export it again"
        )
    return sizes.plan(model.default_plan)


@contextmanager
def open_engine(
    model: CallForm,
    generation: Generation,
    plan: BucketPlan | None = None,
    memory_budget: int | None = None,
) -> Iterator[Engine]:
    """An engine that guesses as the options say, closed at the end of the block."""
    from funcrt.engine import Engine

    guesser: Any = generation.speculate
    if guesser not in (None, "ngram"):
        guesser = load_any(guesser)
    with Engine(model, plan, memory_budget, speculate=guesser) as engine:
        yield engine


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


def chat_ids(model: CallForm, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ids of a conversation, ready for the next answer."""
    return list(tokenizer_of(model).apply_chat_template(messages))


def system_messages(system_prompt: str | None) -> list[dict[str, str]]:
    """The beginning of a conversation."""
    return [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
