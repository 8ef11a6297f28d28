"""Commands in processes of their own, and a tiny model that they can run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from funcrt.cli.app import app
from funcrt.model import Model
from funcrt.text import Tokenizer
from tests.helpers import TINY, make_params

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def command(*arguments: str | Path) -> list[str]:
    """What starts funcrt with these arguments."""
    return [sys.executable, "-m", "funcrt", *map(str, arguments)]


def run(
    *arguments: str | Path, text: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run funcrt to its end."""
    return subprocess.run(
        command(*arguments),
        input=text, capture_output=True, text=True, check=False, env={**os.environ, **variables},
        timeout=300,
    )  # fmt: skip


def run_here(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same within this process, which is quicker; there is no standard input."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def save_model(path: Path, ends: tuple[int, ...] = (95,)) -> Path:
    """A model folder with a tokenizer whose tokens are printable characters.

    Without `ends` nothing but limits ends a text.
    """
    vocabulary = {chr(33 + i): i for i in range(TINY.vocab_size - 2)} | {"Ġ": 94, "<eos>": 95}
    backend = Backend(models.BPE(vocabulary, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {"eos_token": "<eos>"} if ends else {}, CHAT, ends)
    Model(TINY, make_params(TINY), tokenizer).save(path)
    return path
