"""What the standalone Python host refuses, and what it reads although it is new to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from funcrt.bundle.graphs import device_class
from tests.hosts.python_host import Command, hash_of, listed, rewrite

import mlx.core as mx
import pytest

PROMPT = list(range(3, 12))
DEVICE = device_class()
PREPARE = f"functions/{DEVICE}/prepare.mlxfn"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def link_out(folder: Path) -> None:
    file = folder / PREPARE
    file.rename(folder.parent / "prepare.mlxfn")
    file.symlink_to(folder.parent / "prepare.mlxfn")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: flip(f / PREPARE), "prepare.mlxfn is damaged"),
        (lambda f: flip(f / "params.safetensors"), "params.safetensors is damaged"),
        (lambda f: flip(f / "manifest.json"), "manifest.json has another digest"),
        (link_out, "prepare.mlxfn is not in the bundle"),
        (lambda f: rewrite(f, '"3.0"', '"4.0"'), "cannot read funcrt-bundle 4.0, only 3.x"),
        (lambda f: rewrite(f, '"funcrt-bundle"', '"bundle"'), "cannot read bundle 3.0, only 3.x"),
        (lambda f: rewrite(f, f'"mlx": "{mx.__version__}"', '"mlx": "0.1"'), "install mlx==0.1"),
        (lambda f: rewrite(f, f'"{DEVICE}": {{', '"tpu": {'), f"exported for tpu, not {DEVICE}"),
        (lambda f: rewrite(f, '"targets": {', '"aims": {'), "KeyError: 'targets'"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json"),
    ],
)  # fmt: skip
def test_damage_is_refused_before_mlx_sees_it(
    copy: Path,
    run: Command,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
    reason: str,
) -> None:
    damage(copy)
    reached = list[object]()
    original = mx.import_function
    monkeypatch.setattr(mx, "import_function", lambda file: reached.append(file) or original(file))
    with pytest.raises(SystemExit) as refusal:
        run(copy, "--prompt-ids", "1,2")
    said = str(refusal.value)
    assert said.startswith("run.py: ")
    assert reason in said
    assert "\n" not in said
    assert not reached or "params" in reason


def test_newer_minor_versions_and_unknown_fields_are_read(
    plain: Path, copy: Path, run: Command
) -> None:
    rewrite(copy, '"schema_version": "3.0"', '"schema_version": "3.7", "invented": [1]')
    rewrite(copy, '"bucket": {', '"hint": 1, "bucket": {"lanes": 3,')
    arguments = ["--prompt-ids", listed(PROMPT), "--max-tokens", "6"]
    assert run(copy, *arguments) == run(plain, *arguments)


def test_an_expected_digest_is_what_counts(copy: Path, run: Command) -> None:
    digest = hash_of(copy / "manifest.json")
    assert run(copy, "--prompt-ids", "5", "--max-tokens", "1", "--digest", digest)
    rewrite(copy, '"vocab_size": 96', '"vocab_size": 95')
    with pytest.raises(SystemExit, match="another digest"):
        run(copy, "--prompt-ids", "5", "--digest", digest)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give prompts"),
        (["--prompt-ids", "96"], "ids that the model has"),
        (["--prompt-ids", "-1"], "ids that the model has"),
        (["--prompt-ids", ""], "int()"),
        (["--prompt-ids", listed([1] * 32)], "capacity 33 needed, largest is 32"),
        (["--prompt-ids", "1"] * 3, "batch 3 needed, largest is 2"),
        (["--promt", "1"], "unrecognized arguments"),
        (["--prompt-ids", "1", "--top-k", "x"], "--top-k"),
        (["--prompt-ids", "1", "--temperature", "-1"], "settings begin at 0"),
        (["--prompt-ids", "1", "--temperature", "nan"], "settings begin at 0"),
        (["--prompt-ids", "1", "--params", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)  # fmt: skip
def test_impossible_requests_are_refused(
    plain: Path, run: Command, arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as refusal:
        run(plain, *arguments)
    assert str(refusal.value).startswith("run.py: ")
    assert reason in str(refusal.value)


def test_text_needs_a_tokenizer(copy: Path, run: Command) -> None:
    rewrite(copy, '"tokenizer.json"', '"other.json"')
    with pytest.raises(SystemExit) as refusal:
        run(copy, "--prompt", "text")
    assert str(refusal.value) == "run.py: tokenizer.json is not in the bundle"
