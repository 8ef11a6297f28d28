"""The C++ host on damaged bundles and wrong usage: one line that says what to do, never a crash."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from funcrt.storage import load_arrays, save_arrays
from tests.hosts.cpp_host import build, start
from tests.hosts.python_host import rewrite, sign

import mlx.core as mx
import pytest

PROMPT = ("--prompt-ids", "1,2", "--max-tokens", "2")
GRAPH = "functions/cpu/prefill_b2_t8_s16.mlxfn"


@pytest.fixture(scope="module", autouse=True)
def program() -> Path:
    return build("funcrt_run")


def fail(code: int, *arguments: str | Path, **variables: str) -> str:
    """The only line of an error, without the one that names the BLAS."""
    done = start(*arguments, **variables)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("BLAS ")]
    assert done.returncode == code, done
    assert done.stdout == ""
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("funcrt_run: ")
    return lines[0].removeprefix("funcrt_run: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --prompt-ids, --verify or --info"),
        (("--prompt-ids", ""), "--prompt-ids: the prompt is empty"),
        (("--prompt-ids", "1,,2"), "--prompt-ids: expected ids as 504,3575,282, got ''"),
        (("--prompt-ids", "1,x"), "got 'x'"),
        (("--prompt-ids", "-1"), "got '-1'"),
        (("--prompt-ids", "99999999999"), "got '99999999999'"),
        (("--prompt-ids",), "--prompt-ids: expected a value"),
        ((*PROMPT, "--max-tokens", "0"), "--max-tokens: expected a number from 1 up, got '0'"),
        ((*PROMPT, "--temperature", "nan"), "--temperature: expected a number from 0 (greedy) up"),
        ((*PROMPT, "--top-p=0"), "--top-p: expected a number above 0"),
        ((*PROMPT, "--top-k=1.5"), "--top-k: expected a number from 0 (off) up, got '1.5'"),
        ((*PROMPT, "--seed", "4294967296"), "--seed: expected a number from 0 to 2**32 - 1"),
        ((*PROMPT, "--device", "tpu"), "--device: expected cpu or gpu, got 'tpu'"),
        ((*PROMPT, "--tempreature", "1"), "unknown option --tempreature: see --help"),
        ((*PROMPT, "another"), "unexpected argument 'another'"),
        (("--verify", *PROMPT), "--verify and --info take no prompts"),
    ],
)
def test_wrong_usage(arguments, message, plain):
    assert message in fail(2, plain, *arguments)


def test_no_bundle_named():
    assert fail(2, "--verify") == "expected the folder of a bundle: see --help"
    done = start("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("funcrt_run BUNDLE --prompt-ids IDS")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-ids", "1,96"),
         "prompt 0: token id 96 is outside the vocabulary (0 to 95)"),
        (("--prompt-ids", "1", "--prompt-ids", ",".join(["1"] * 32)),
         "prompt has 32 tokens, largest capacity is 31: export a larger one (--capacity 64)"),
        ((*PROMPT, "--params", "/nonexistent"),
         "/nonexistent: cannot be read, or is not a safetensors file"),
        ((*PROMPT, "--logits", "/dev/null/file"), "cannot write /dev/null/file"),
    ],
)  # fmt: skip
def test_what_a_bundle_cannot_do(arguments, message, plain):
    done = start(plain, *arguments)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_not_a_bundle(tmp_path):
    assert "is not a folder" in fail(1, tmp_path / "nothing", *PROMPT)
    assert "is not a bundle: cannot read" in fail(1, tmp_path, *PROMPT)
    os.mkfifo(tmp_path / "manifest.json")
    assert "is not a bundle: cannot read" in fail(1, tmp_path, *PROMPT)


def change(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def link_out(folder: Path) -> None:
    shutil.move(folder / GRAPH, folder.parent / "graph")
    (folder / GRAPH).symlink_to(folder.parent / "graph")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change(f / GRAPH, 500), "prefill_b2_t8_s16.mlxfn is damaged: its sha256"),
        (lambda f: change(f / "manifest.json", 500), "does not match manifest.json.sha256"),
        (lambda f: change(f / "params.safetensors", 30), "the sha256 of its header does not match"),
        (lambda f: change(f / "generation_config.json", 3), "config.json is damaged: its sha256"),
        (lambda f: os.truncate(f / "params.safetensors", 5000), "params.safetensors is damaged: e"),
        (lambda f: (f / GRAPH).unlink(), "prefill_b2_t8_s16.mlxfn is missing"),
        (lambda f: (f / "manifest.json.sha256").unlink(), "is not a bundle"),
        (link_out, "is a link out of the bundle"),
        (lambda f: rewrite(f, '"3.0"', '"4.0"'), "schema version '4.0' cannot be read"),
        (lambda f: rewrite(f, '"funcrt-bundle"', '"else"'), "is not one of a funcrt bundle"),
        (lambda f: rewrite(f, f'"mlx": "{mx.__version__}"', '"mlx": "0.1.0"'),
         "was made by MLX 0.1.0, this process runs"),
        (lambda f: rewrite(f, '"cpu": {', '"metal": {'),
         "has functions for metal, this process runs on cpu"),
        (lambda f: rewrite(f, '"tokenizer.json"', '"../tokenizer.json"'), "unsafe file path"),
        (lambda f: rewrite(f, '"vocab_size": 96,\n  "max', '"vocab_size": 0,\n  "max'),
         "vocab_size: expected a whole number from 1"),
        (lambda f: rewrite(f, '"name": "sample"', '"name": "simple"'),
         "there is no function sample_b2_t1_s0"),
        (lambda f: rewrite(f, '"name": "active"', '"name": "actives"'),
         "takes an input that this host does not know: actives bool [2]"),
    ],
)  # fmt: skip
def test_damage_is_found_before_it_is_run(damage: Callable[[Path], None], message, copy):
    damage(copy)
    done = start(copy, *PROMPT)
    assert message in done.stderr.splitlines()[-1]
    assert done.returncode == 1


def test_what_only_verify_reads_is_found_by_verify(copy):
    change(copy / "params.safetensors", -1)
    assert start(copy, *PROMPT).returncode == 0
    assert "params.safetensors is damaged: its sha256" in fail(1, copy, "--verify")


def test_an_incomplete_golden_file(copy):
    arrays = load_arrays(copy / "golden" / "cpu.safetensors")
    mx.eval(arrays)
    del arrays["0.1.gaps"]
    save_arrays(copy / "golden" / "cpu.safetensors", arrays)
    sign(copy)
    done = start(copy, "--verify")
    assert done.returncode == 1
    assert "cpu.safetensors is incomplete" in done.stderr


def test_weights_that_do_not_fit(plain, tmp_path):
    file = tmp_path / "other.safetensors"
    save_arrays(file, {"model.norm.weight": mx.zeros((3,))})
    message = "expected model.norm.weight float32 [64], got model.norm.weight float32 [3]"
    assert message in fail(1, plain, *PROMPT, "--params", file)
    save_arrays(file, {"model.norm": mx.zeros((3,))})
    assert "the bundle takes no tensor model.norm" in fail(1, plain, *PROMPT, "--params", file)
    header = b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    assert "damaged entry for a" in fail(1, plain, *PROMPT, "--params", file)


def test_mutated_manifests_never_crash_it(copy):
    manifest, source = copy / "manifest.json", random.Random(0)
    text = manifest.read_text("utf-8")
    for _ in range(25):
        place = source.randrange(len(text))
        piece = source.choice(["", "-", "9" * 12, '"', "[", "}", "null", "1e400", "\\u0000"])
        manifest.write_text(text[:place] + piece + text[place + source.randrange(4) :], "utf-8")
        rewrite(copy, "{", "{")  # the hash is that of somebody who means it
        assert start(copy, *PROMPT).returncode in (0, 1)
