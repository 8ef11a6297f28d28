"""`funcrt export` with --into, --refresh and --no-weights, and what opens such bundles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from funcrt.bundle import load_manifest
from tests.commands import run_here, save_model

import pytest

PLAN = ("--batch", "1", "--tokens", "8", "--capacity", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    out = folder.parent / "small.funcrt"
    done = run_here("export", folder, out, *PLAN)
    assert done.returncode == 0, done.stderr
    assert f"digest: {(out / 'manifest.json.sha256').read_text().split()[0]}" in done.stdout
    return out


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy.funcrt"))


def plan_of(folder: Path) -> tuple[tuple[int, ...], ...]:
    plan = load_manifest(folder).targets["cpu"].plan
    return plan.batch, plan.tokens, plan.capacity


def test_into_adds_shapes(folder: Path, copy: Path) -> None:
    done = run_here("export", "--into", copy, "--capacity", "64", "--json")
    facts = json.loads(done.stdout)
    assert plan_of(copy) == ((1,), (8,), (32, 64))
    assert facts["functions"]["grow_b1_t1_s32"]["primitives"] > 0
    assert facts["digest"] in (copy / "manifest.json.sha256").read_text()
    done = run_here("export", folder, "--into", copy, "--batch", "2")
    assert done.returncode == 0, done.stderr
    assert plan_of(copy) == ((1, 2), (8,), (32, 64))


def test_refresh_exports_what_is_there(copy: Path) -> None:
    before = (copy / "functions/cpu/prepare.mlxfn").stat().st_mtime_ns
    done = run_here("export", "--refresh", copy)
    assert done.returncode == 0, done.stderr
    assert "functions for cpu" in done.stdout
    assert (copy / "functions/cpu/prepare.mlxfn").stat().st_mtime_ns > before
    assert plan_of(copy) == ((1,), (8,), (32,))


def test_a_bundle_without_weights(folder: Path, bundle: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.funcrt"
    assert run_here("export", folder, bare, *PLAN, "--no-weights").returncode == 0
    refused = run_here("generate", bare, "--prompt", "ab")
    assert refused.returncode == 1
    assert "exported without weights: give some (params=..., --params FILE)" in refused.stderr
    answers = [
        run_here("generate", *source, "--prompt", "ab", "--max-tokens", "4", "--raw").stdout
        for source in ((bare, "--params", folder / "model.safetensors"), (bundle,))
    ]
    assert answers[0] == answers[1] != ""
    done = run_here("verify", bare, "--params", bundle)
    assert done.returncode == 0, done.stderr


def test_only_the_expected_bundle(bundle: Path) -> None:
    digest = (bundle / "manifest.json.sha256").read_text().split()[0]
    ask = ("generate", bundle, "--prompt", "ab", "--max-tokens", "1", "--raw", "--expected-digest")
    assert run_here(*ask, digest).returncode == 0
    refused = run_here(*ask, "0" * 64)
    assert refused.returncode == 1
    assert "is not the bundle that was expected" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("MODEL",), 2, "expected SOURCE and OUT, or --into BUNDLE, or --refresh"),
        ((), 2, "expected SOURCE and OUT"),
        (("--into", "BUNDLE", "--refresh", "BUNDLE"), 2, "give one of them"),
        (("--refresh", "BUNDLE", "--batch", "2"), 2, "--batch: --refresh exports what is in"),
        (("MODEL", "OUT", "--into", "BUNDLE"), 2, "OUT: --into adds to a bundle"),
        (("--into", "BUNDLE", "--no-weights"), 2, "--no-weights: --into adds to a bundle"),
        (("MODEL", "OUT", "--params", "BUNDLE"), 2, "--params: a new bundle gets the weights"),
        (("--into", "MODEL"), 1, "is not a bundle"),
        (("--refresh", "/nowhere"), 1, "is not a folder"),
        (("--into", "BUNDLE", "--kv-bits", "8"), 1, "with kv_bits None"),
    ],
)
def test_what_does_not_go_together(
    folder: Path, bundle: Path, tmp_path: Path, arguments: tuple[str, ...], status: int,
    message: str,
) -> None:  # fmt: skip
    places = {"MODEL": folder, "BUNDLE": bundle, "OUT": tmp_path / "out"}
    before = (bundle / "manifest.json").read_bytes()
    done = run_here("export", *(str(places.get(word, word)) for word in arguments))
    assert done.returncode == status
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert (bundle / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("option", ["--params", "--expected-digest"])
def test_options_of_bundles_with_a_checkpoint(folder: Path, option: str) -> None:
    done = run_here("generate", folder, "--prompt", "ab", option, "x")
    assert done.returncode == 1
    assert "are for bundles" in done.stderr
