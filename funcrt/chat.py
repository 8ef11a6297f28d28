"""Chat templates: Jinja programs that come with a model and write a conversation as its prompt.

`jinja2` is imported when the first template is compiled: running a model does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from funcrt.errors import TextError


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja program.

    Raises:
        TextError: jinja2 is not installed, or the source is not valid.
    """

    def __init__(self, source: str) -> None:
        try:
            self._template = _make_environment().from_string(source)
        except ImportError as error:
            raise TextError("chat templates need jinja2: pip install jinja2") from error
        except Exception as error:
            raise TextError(f"the chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool,
    ) -> str:
        """Write a chat as text.

        Args:
            messages: mappings with at least "role" and, as most templates expect, "content".
            special_tokens: what the template may name, such as bos_token.
            add_generation_prompt: end with the header of the reply that is to be generated.

        Raises:
            TextError: not a list of such mappings, or the template fails or refuses them.
        """
        check_messages(messages)
        try:
            rendered = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **special_tokens
            )
        except Exception as error:  # it is a program, and may fail in any way
            raise TextError(f"the chat template failed: {error}") from error
        return str(rendered)


def check_messages(messages: Any) -> None:
    """Raise TextError unless `messages` is a list of mappings that each have a role."""
    if isinstance(messages, str | Mapping) or not all(
        isinstance(message, Mapping) and "role" in message for message in messages
    ):
        example = [{"role": "user", "content": "Hello"}]
        raise TextError(f"a chat is a list like {example}, got {messages!r:.80}")


def choose_template(templates: Any) -> str | None:
    """The source to use of `chat_template` in tokenizer_config.json.

    That is None, text, or a list of named ones: then the one called "default" or the only one.

    Raises:
        TextError: it is something else.
    """
    if templates is None or isinstance(templates, str):
        return templates
    try:
        named = {entry["name"]: str(entry["template"]) for entry in templates}
    except (TypeError, KeyError) as error:
        raise TextError(
            "chat_template in tokenizer_config.json must be text or a list of named templates, "
            f"got {templates!r:.80}"
        ) from error
    return named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)


def _make_environment() -> Any:
    """The Jinja environment that chat templates on the Hugging Face hub are written for.

    Templates are programs of strangers, so they run in a sandbox that cannot change its inputs.
    Raises ImportError without jinja2.
    """
    from jinja2 import TemplateError, ext, nodes, parser, sandbox

    class Generation(ext.Extension):
        """`{% generation %}` marks what the assistant wrote, for training; here it is inert."""

        tags = {"generation"}  # noqa: RUF012  as the base class declares it

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def make_json(value: Any, **options: Any) -> str:
        # Jinja's own filter escapes for HTML, which a prompt must not contain.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = make_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
