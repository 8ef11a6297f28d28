"""`funcrt convert` as a person runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

from tests.commands import command, run, run_here, save_model
from tests.helpers import make_model

import pytest

PIECE = "the quick brown fox jumps over the lazy dog "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are printable characters."""
    return save_model(tmp_path_factory.mktemp("convert") / "tiny model")


def test_report_as_text_and_as_json(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--quantize", "4", "--group-size", "64")
    done = run("convert", folder, out, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Errors by tensor, the worst 12 of 14 (all: --json)")
    assert "affine 4/64" in done.stdout
    reason = "96 columns are no multiple of the group size 64"
    assert f"model.layers.0.mlp.down_proj stays float32: {reason}" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"{out}: ")
    assert " bits per weight, relative error " in last
    facts = json.loads(run_here("convert", folder, out, *options, "--json").stdout)
    assert facts["folder"] == str(out)
    assert {"model_type", "layers", "bytes", "seconds", "bits_per_weight"} <= facts.keys()
    errors = [tensor["relative_error"] for tensor in facts["tensors"]]
    assert errors == sorted(errors, reverse=True)
    assert f"relative error {facts['relative_error']:.2e}" in last
    assert run("generate", out, "--prompt", "a", "--max-tokens", "2").returncode == 0


@pytest.mark.parametrize(
    ("options", "packing"),
    [
        (("--mode", "mxfp4"), (4, 32, "mxfp4")),
        (("--mode", "nvfp4", "--quantize", "4"), (4, 16, "nvfp4")),
        (("--quantize", "8", "--group-size", "32"), (8, 32, "affine")),
    ],
)
def test_modes(
    folder: Path, tmp_path: Path, options: tuple[str, ...], packing: tuple[int, int, str]
) -> None:
    done = run_here("convert", folder, tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (settings["bits"], settings["group_size"], settings["mode"]) == packing


def test_perplexity_of_a_text(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PIECE * 20)
    command = ("convert", folder, tmp_path / "out", "--text", text)
    facts = json.loads(run_here(*command, "--json").stdout)["perplexity"]
    assert facts["before"] == facts["after"] > 1
    assert facts["tokens"] == len(PIECE * 20) - 1
    packed = run_here(*command, "--quantize", "2", "--group-size", "32")
    assert "perplexity " in packed.stdout
    facts = json.loads(
        run_here(*command, "--quantize", "2", "--group-size", "32", "--json").stdout
    )["perplexity"]
    assert facts["change"] == facts["after"] / facts["before"] - 1 != 0


def test_a_recipe(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text('[{"match": "lm_head", "keep": true}, {"match": "*.down_proj", "bits": 8,'
                      ' "group_size": 32}]')  # fmt: skip
    done = run_here(
        "convert", folder, tmp_path / "out", "--recipe", recipe, "--quantize", "4", "--json"
    )
    written = {t["name"]: t["written"] for t in json.loads(done.stdout)["tensors"]}
    assert written["lm_head"] == "float32"
    assert written["model.layers.1.mlp.down_proj"] == "affine 8/32"
    assert written["model.layers.1.mlp.up_proj"] == "affine 4/64"


def test_expanding(folder: Path, tmp_path: Path) -> None:
    assert run_here("convert", folder, tmp_path / "four", "--quantize", "4").returncode == 0
    done = run_here("convert", tmp_path / "four", tmp_path / "dense", "--dequantize", "--json")
    assert {t["written"] for t in json.loads(done.stdout)["tensors"]} == {"float32"}


@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        (("--quantize", "7"), 2, "--quantize: affine packs with 2, 3, 4, 5, 6, 8, got 7"),
        (
            ("--quantize", "4", "--group-size", "48"),
            2,
            "--group-size: affine packs with 32, 64, 128, got 48",
        ),
        (("--quantize", "8", "--mode", "mxfp4"), 2, "mxfp4 packs with 4, got 8"),
        (("--mode", "q4_k"), 2, "--mode: expected one of affine, mxfp4, mxfp8, nvfp4"),
        (("--group-size", "64"), 2, "--group-size needs --quantize or --mode"),
        (("--dequantize", "--quantize", "4"), 2, "exclude each other"),
        (("--recipe", "/nowhere.json"), 1, "cannot read the recipe /nowhere.json"),
        (("--text", "/nowhere.txt"), 1, "cannot read /nowhere.txt"),
        (("--dtype", "float8"), 1, "dtype 'float8' is not supported"),
        (("--adapter", "/nowhere/at/all"), 1, "error: "),
    ],
)
def test_wrong_options(
    folder: Path, tmp_path: Path, options: tuple[str, ...], code: int, match: str
) -> None:
    done = run_here("convert", folder, tmp_path / "out", *options)
    assert done.returncode == code
    assert match in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tokenizer_has_no_perplexity(tmp_path: Path) -> None:
    make_model().save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(PIECE)
    done = run_here(
        "convert", tmp_path / "model", tmp_path / "out", "--text", tmp_path / "text.txt"
    )
    assert done.returncode == 1
    assert "perplexity needs a tokenizer.json" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_conversion_leaves_no_target(tmp_path: Path, number: signal.Signals) -> None:
    make_model(vocab_size=60_000, hidden_size=512, num_heads=32).save(tmp_path / "model")
    out = tmp_path / "out"
    process = subprocess.Popen(
        command("convert", tmp_path / "model", out, "--quantize", "8"), stderr=subprocess.PIPE
    )
    while process.poll() is None and not any(tmp_path.glob(".out.*.tmp/*.safetensors")):
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 130), err
    assert not out.exists()
    if number != signal.SIGKILL:
        assert b"Traceback" not in err
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert run("convert", tmp_path / "model", out).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]  # all cleaned up
