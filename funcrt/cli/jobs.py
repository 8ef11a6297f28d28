"""The input of `funcrt batch`: lines as they come, and what each of them asks for."""

from __future__ import annotations

import hashlib
import json
import math
import os
import select
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from funcrt.errors import InputError
from funcrt.settings import OPTION_NAMES

OPTIONS = frozenset({*OPTION_NAMES, "max_tokens", "stop", "speculate", "logprobs", "top_logprobs"})
"""What a line may set for itself."""

_CONTENT = frozenset({"prompt", "messages", "id"})
_READ_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineReader:
    """Lines of a file or a pipe; waiting for a slow pipe keeps nobody from other work.

    Line ends and white space around lines are taken off; empty lines at the end are none.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._partial = b""
        self._blank = 0
        self._first = True
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether there are no more lines."""
        return self._ended and not self._lines

    def next(self, timeout: float | None) -> bytes | None:
        """The next line; None if none came in `timeout` seconds (None waits), or at the end."""
        while not self._lines and not self._ended:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                return None
            self._read()
        return self._lines.popleft() if self._lines else None

    def _read(self) -> None:
        data = os.read(self._descriptor, _READ_BYTES)
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data:
            self._ended = True
            lines = [self._partial]
        for line in lines:
            if self._first:
                line = line.removeprefix(_BYTE_ORDER_MARK)
                self._first = False
            if line := line.strip():
                self._lines.extend([b""] * self._blank)
                self._lines.append(line)
                self._blank = 0
            else:
                self._blank += 1


def count_lines(path: Path) -> int:
    """How many lines a file has, about: empty ones at the end count too."""
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_READ_BYTES), b""))


class Digest:
    """Hashes of input lines, together with everything else that an answer depends on."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._base = hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + b"\n")

    def of(self, line: bytes) -> str:
        """16 hexadecimal digits."""
        digest = self._base.copy()
        digest.update(line)
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Task:
    """What one line asks for: exactly one of `text`, `ids` and `messages`, and its own options."""

    options: dict[str, Any]
    text: str | None = None
    ids: list[Any] | None = None
    messages: list[Any] | None = None


def parse(line: bytes) -> dict[str, Any]:
    """A line as an object; a string is a prompt. Raises InputError."""
    try:
        data = json.loads(line.decode(), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError:
        raise InputError("the line is not UTF-8 text") from None
    except RecursionError:
        raise InputError("the line is nested too deeply") from None
    except ValueError as error:
        what = f"not valid JSON: {error}" if line else "empty"
        raise InputError(f"the line is {what}") from None
    if isinstance(data, str):
        return {"prompt": data}
    if not isinstance(data, dict):
        raise InputError(f"expected a JSON object or a string, got {_shown(data)}")
    return data


def task_of(data: Mapping[str, Any]) -> Task:
    """What the object of a line asks for; the engine checks values. Raises InputError."""
    if unknown := sorted(data.keys() - OPTIONS - _CONTENT):
        known = ", ".join(sorted(OPTIONS))
        raise InputError(f"unknown key {unknown[0]!r}; known: prompt, messages, id, {known}")
    # null is what writers of such files put for "not said"
    given = {name: value for name, value in data.items() if value is not None}
    if ("prompt" in given) == ("messages" in given):
        raise InputError('expected "prompt" or "messages", and not both')
    options = {name: value for name, value in given.items() if name in OPTIONS}
    if isinstance(biases := options.get("logit_bias"), dict):
        options["logit_bias"] = {_id_of(token): bias for token, bias in biases.items()}
    content = given.get("prompt", given.get("messages"))
    if "messages" in given:
        if not isinstance(content, list) or not content:
            raise InputError(f"messages: expected a list of messages, got {_shown(content)}")
        return Task(options, messages=content)
    if isinstance(content, str):
        return Task(options, text=content)
    if not isinstance(content, list):
        raise InputError(f"prompt: expected text or a list of ids, got {_shown(content)}")
    return Task(options, ids=content)


def _id_of(token: str) -> int:
    try:
        return int(token)
    except ValueError:
        raise InputError(f"logit_bias: expected token ids as keys, got {token!r}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number


def _shown(value: object) -> str:
    return f"{json.dumps(value):.40}"
