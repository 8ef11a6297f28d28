"""The committed reference bundle: small, sound, and what its script makes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from exported import make_reference
from funcrt.bundle import load_bundle, verify
from funcrt.bundle.format.checks import load_manifest
from funcrt.engine import Engine

import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 200_000
HOST = ROOT / "exported" / "hosts" / "python" / "run.py"


@pytest.fixture(autouse=True)
def on_cpu() -> Any:
    """The graphs run on a CPU."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since verifying one writes a certificate into it."""
    made_by = load_manifest(make_reference.FOLDER).targets["cpu"].producer["mlx"]
    assert made_by == mx.__version__, (
        f"exported/reference.funcrt was made with MLX {made_by}, this is {mx.__version__}: run "
        "`python exported/make_reference.py` and commit what it makes"
    )
    folder = tmp_path_factory.mktemp("reference") / "copy.funcrt"
    return Path(shutil.copytree(make_reference.FOLDER, folder))


def test_it_is_small(reference: Path) -> None:
    files = {path for path in reference.rglob("*") if path.is_file()}
    listed = {"manifest.json", "manifest.json.sha256", *load_manifest(reference).files}
    names = {path.relative_to(reference).as_posix() for path in files}
    assert names - {"certificate.json"} == listed
    assert sum((reference / name).stat().st_size for name in listed) < MOST_BYTES


def test_it_passes_its_own_checks(reference: Path) -> None:
    checks = verify(reference)
    assert len(checks) >= 20
    assert [check for check in checks if not check.passed] == []


def test_it_computes_what_the_model_does(reference: Path) -> None:
    bundle, model = load_bundle(reference), make_reference.make_model()
    prompts = ["Gravity is", "A longer prompt that does not fit one call: 012345"]
    with Engine(bundle) as ours, Engine(model, plan=make_reference.PLAN) as theirs:
        said = ours.generate(prompts, max_tokens=12)
        expected = theirs.generate(prompts, max_tokens=12)
    assert [done.tokens for done in said] == [done.tokens for done in expected]
    assert len({token for done in said for token in done.tokens}) > 5  # not one over and over
    assert [done.prompt_tokens for done in said] == [len(prompt) for prompt in prompts]


def test_the_script_makes_the_same_again(reference: Path, tmp_path: Path) -> None:
    make_reference.make(tmp_path / "again.funcrt")
    assert lasting(tmp_path / "again.funcrt") == lasting(reference)
    weights = "params.safetensors"
    assert (tmp_path / "again.funcrt" / weights).read_bytes() == (reference / weights).read_bytes()


def lasting(folder: Path) -> Any:
    """A manifest without what differs from one export to the next.

    Graphs hold addresses of the process that traced them, and an eager run rounds as its BLAS does.
    """
    manifest = json.loads((folder / "manifest.json").read_bytes())
    target = manifest["targets"]["cpu"]
    del target["producer"]["funcrt"]
    for case in target["golden"]["cases"]:
        for call in case["calls"]:
            del call["scale"], call["eager"], call["allowed"]
    for name, entry in manifest["files"].items():
        if name.startswith(("functions/", "golden/")):
            del entry["sha256"]
    return manifest


def test_the_host_without_this_package_says_the_same(reference: Path) -> None:
    prompt = "Gravity is"
    with Engine(load_bundle(reference)) as engine:
        messages = [{"role": "user", "content": prompt}]
        assert engine.model.tokenizer is not None
        chat = engine.model.tokenizer.apply_chat_template(messages)
        assert engine.model.tokenizer.decode(chat) == f"user: {prompt}\nassistant: "
        plain, answer = engine.generate([prompt, chat], max_tokens=20)
    for flags, expected in [(["--raw"], plain.text), ([], answer.text)]:
        command = [sys.executable, str(HOST), str(reference), "--prompt", prompt, *flags]
        command += ["--max-tokens", "20"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == expected + "\n"
