"""Exporting: what is refused, what is left behind, and what survives a kill or a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from funcrt import publish
from funcrt.buckets import BucketPlan
from funcrt.bundle import export, exporter, load_bundle, load_manifest, targets, verify, weights
from funcrt.bundle.exporter import KIND
from funcrt.bundle.format import files
from funcrt.bundle.golden import recorder as golden
from funcrt.bundle.proof.invariances import count_invariances
from funcrt.errors import BundleError, PublishError
from funcrt.layers import part
from funcrt.model import Model
from funcrt.ops.rotary import Rotary
from tests.bundle.conftest import SMALL
from tests.helpers import TOLERANCE, make_model, random_tokens, relative_error, run_plain

import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[2]
TOKENS = random_tokens(7)


@pytest.fixture
def target(copy: Path) -> Path:
    """A bundle to export over, alone in its folder."""
    return copy


def is_intact(target: Path) -> bool:
    return all(row.passed for row in verify(target)) and left_over(target) == []


def left_over(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


def test_an_export_replaces_the_bundle_as_a_whole(target: Path) -> None:
    other = make_model("float32", seed=3)
    done: list[tuple[int, int, str]] = []
    bundle = export(other, target, SMALL, lambda *at: done.append(at))
    assert is_intact(target)
    assert bundle.folder == target
    assert load_manifest(target) == bundle.manifest
    assert bundle.plan == SMALL
    assert not (target / "tokenizer.json").exists()
    assert relative_error(bundle(TOKENS)[0][0], run_plain(other, TOKENS)[0]) <= TOLERANCE
    total = done[0][1]
    assert [(n, t) for n, t, _ in done] == [(i + 1, total) for i in range(total)]
    assert done[0][2] == "weights"
    assert done[-1][2].startswith("verify ")

    report, functions = bundle.target.report, bundle.target.functions
    assert report is not None
    assert report.seconds > sum(row.seconds for row in report.functions)
    assert [row.function for row in report.functions] == [entry.key for entry in functions]
    assert all(row.seconds > 0 for row in report.functions)
    assert all((row.compiled or 0.0) <= TOLERANCE for row in report.functions)
    assert all(entry.primitives > 0 for entry in functions)


def test_other_folders_are_not_replaced(model: Model, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("notes")
    with pytest.raises(PublishError, match=r"notes is not .* is not replaced"):
        export(model, tmp_path / "notes", SMALL)
    for name in ("file", "link"):
        with pytest.raises(PublishError, match="is a file or a link, not a folder"):
            export(model, tmp_path / name, SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "notes"]
    assert (tmp_path / "notes" / "diary.txt").read_text() == "dear"


def test_a_bundle_with_a_file_of_somebody_else_is_not_replaced(model: Model, copy: Path) -> None:
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(PublishError, match="is not replaced"):
        export(model, copy, SMALL)
    assert (copy / "notes.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written(model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match=r"cannot export to .*file"):
        export(model, tmp_path / "file" / "out", SMALL)
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    if not os.access(closed, os.W_OK):  # root may write everywhere
        with pytest.raises(BundleError, match="Permission denied"):
            export(model, closed / "out", SMALL)


@pytest.mark.parametrize(
    ("module", "stage"),
    [(weights, "save_arrays"), (files, "describe_files"), (exporter, "publish")],
    ids=["weights", "hashes", "publish"],
)
def test_a_full_disk_leaves_the_old_bundle(
    model: Model, target: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, stage: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, stage, fail)
    with pytest.raises(BundleError, match=r"cannot export to .*No space left on device"):
        export(model, target, SMALL)
    assert is_intact(target)


def test_wrong_results_are_not_published(
    model: Model, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = targets.save_arrays

    def disturb(path: Path, arrays: dict[str, mx.array], *rest: Any) -> None:
        changed = {k: v * 1.01 if k.endswith(".reference") else v for k, v in arrays.items()}
        save(path, changed, *rest)

    monkeypatch.setattr(targets, "save_arrays", disturb)
    with pytest.raises(BundleError, match=r"are wrong, nothing is published: prepare error 0\.0"):
        export(model, target, SMALL)
    assert is_intact(target)


def test_a_constant_that_mlx_exports_wrongly_is_noticed(
    model: Model, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX writes captured arrays that are not contiguous as if they were."""
    make = part.make_rotary

    def make_strided(*arguments: Any) -> Rotary:
        rotary = make(*arguments)
        pairs = mx.stack([rotary.periods, 2 * rotary.periods], axis=1)
        mx.eval(pairs)
        periods = pairs[:, 0]
        mx.eval(periods)
        return rotary._replace(periods=periods, waves=None)

    monkeypatch.setattr(part, "make_rotary", make_strided)
    with pytest.raises(BundleError, match="exported functions are wrong, nothing is published"):
        export(model, target, SMALL)
    assert is_intact(target)


def test_functions_that_do_not_run_are_not_published(
    model: Model, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BundleError, match="do not run, nothing is published: exit status 1"):
        export(model, target, SMALL)
    assert is_intact(target)


@pytest.mark.parametrize("moment", ["export prepare", "verify prepare"])
def test_an_interrupt_leaves_nothing(model: Model, target: Path, moment: str) -> None:
    def interrupt(done: int, total: int, item: str) -> None:
        if item == moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(model, target, SMALL, interrupt)
    assert is_intact(target)


def test_weights_in_a_graph_are_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_GRAPH_BYTES", 0)
    monkeypatch.setattr(targets, "_GRAPH_BYTES_PER_INPUT", 10)
    with pytest.raises(BundleError, match=r"graph takes .* bytes, so it holds weights"):
        export(model, tmp_path / "out", SMALL)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, dtype: str) -> None:
    model = make_model(dtype)
    name = "model.layers.1.mlp.down_proj.weight"
    bad = mx.nan if dtype == "float32" else 6e4
    model.params[name] = mx.full(model.params[name].shape, bad, model.params[name].dtype)
    with pytest.raises(BundleError, match=f"logits are not finite in {dtype}"):
        export(model, tmp_path / "out", SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "plan",
    [
        BucketPlan(batch=2, tokens=8, capacity=2),
        BucketPlan(batch=(2, 3), tokens=8, capacity=6),
    ],
    ids=["one slot", "more tokens than slots"],
)
def test_unusual_plans(model: Model, tmp_path: Path, plan: BucketPlan) -> None:
    bundle = export(model, tmp_path / "out", plan)
    tokens = TOKENS[: plan.capacity[-1] - 1]
    assert relative_error(bundle(tokens)[0][0], run_plain(model, tokens)[0]) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("kind", ["float32", "affine", "float16", "bfloat16"])
def test_a_wide_plan(tmp_path: Path, kind: str) -> None:
    plan = BucketPlan(batch=(1, 2, 5), tokens=(1, 3, 16, 64), capacity=(64, 300))
    bundle = export(make_model(kind), tmp_path / "out", plan)
    rows = verify(bundle)
    assert all(row.passed for row in rows)
    # By function: three prefills per T, four for 64; two decodes; T of 3 and 16 verify; growing;
    # what has no capacity.
    checks = {"prefills": (3 * 4 + 1) * 3, "decodes": 3 + 4, "verifies": 2 * (4 + 5)}
    recorded = 3 * (2 * sum(checks.values()) + 1 + 4 + 3)
    assert len(rows) == 1 + recorded + count_invariances(plan, bundle.cache_spec)


def test_large_weights_are_split(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SHARD_BYTES", 50_000)
    bundle = export(model, tmp_path / "out", SMALL)
    files = bundle.manifest.params.files
    assert files[0] == f"params-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    tokens = TOKENS
    assert relative_error(bundle(tokens)[0][0], run_plain(model, tokens)[0]) <= TOLERANCE


# --- kills and races -----------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from funcrt.buckets import BucketPlan
from funcrt import publish
from funcrt.bundle import export
from tests.helpers import make_model
target, moment, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(done, total, item):
    if item == moment:
        die()

if moment == "before exchange":
    publish.exchange = die
if moment == "after exchange":
    publish._sync, sync = (lambda path: die() if path.samefile(os.path.dirname(target)) else sync(path)), publish._sync
if moment == "full disk":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
plan = BucketPlan(batch=2, tokens=8, capacity=16)
export(make_model("float32", seed=seed), target, plan, progress)
"""  # noqa: E501


def export_elsewhere(target: Path, moment: str, seed: int = 4) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(target), moment, str(seed)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    "moment",
    ["weights", "export decode_b2_t1_s16", "eager prefill_b2_t8_s16", "verify prepare",
     "before exchange", "after exchange"],
)  # fmt: skip
def test_a_kill_leaves_one_whole_bundle(target: Path, moment: str) -> None:
    child = export_elsewhere(target, moment)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, errors
    assert [name.startswith(".copy.funcrt.") for name in left_over(target)] == [True]
    assert all(row.passed for row in verify(target))
    seed = 4 if moment == "after exchange" else 0
    logits, _ = load_bundle(target)(TOKENS)
    expected, _ = run_plain(make_model("float32", seed=seed), TOKENS)
    assert relative_error(logits[0], expected) <= TOLERANCE
    with publish.staging(target, KIND):  # as the next export begins
        assert len(left_over(target)) == 1
    assert left_over(target) == []


def test_a_file_that_cannot_grow(target: Path) -> None:
    child = export_elsewhere(target, "full disk")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 1
    assert "BundleError: cannot export to" in errors
    assert is_intact(target)


def test_two_exports_at_once(target: Path) -> None:
    children = [export_elsewhere(target, "", seed) for seed in (4, 5)]
    for child in children:
        _, errors = child.communicate(timeout=240)
        assert child.returncode == 0, errors
    assert is_intact(target)
    logits, _ = load_bundle(target)(TOKENS)
    close = [
        relative_error(logits[0], run_plain(make_model("float32", seed=s), TOKENS)[0]) <= TOLERANCE
        for s in (4, 5)
    ]
    assert sorted(close) == [False, True]


def test_a_folder_that_is_being_written_is_left_alone(target: Path) -> None:
    with publish.staging(target, KIND) as first, publish.staging(target, KIND) as second:
        assert first.is_dir()
        assert second.is_dir()
    assert left_over(target) == []


def test_without_an_atomic_exchange(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(first: Path, second: Path) -> None:
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(publish, "_exchange_atomically", refuse)
    (new := target.with_name("new")).mkdir()
    publish.exchange(new, target)
    assert list(target.iterdir()) == []
    assert load_manifest(new).targets

    # A death between the two renames: the next export puts the old one back.
    new.rename(aside := target.with_name(f".{target.name}.old"))
    target.rmdir()
    with publish.staging(target, KIND):
        assert load_manifest(target).targets
    assert not aside.exists()


def test_a_failed_rename_puts_the_old_bundle_back(target: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        publish._exchange_by_renames(target.with_name("absent"), target)
    assert is_intact(target)


def test_seeds_of_golden_draws_are_steady(model: Model) -> None:
    """With nearly flat logits, draws hang on little: seeds are chosen that survive rounding."""
    recorder = golden.Recorder(model, SMALL, None)
    recorded = recorder.record("golden.safetensors", lambda item: None)
    tokens = [a for k, a in recorded.arrays.items() if k.endswith("expected_tokens")]
    assert all(mx.any(array >= 0).item() for array in tokens)


def test_sizes_beyond_an_int32_are_an_error(
    tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OverflowError("Shape dimension 68719475712 is outside the supported range")

    with monkeypatch.context() as patch:
        patch.setattr(exporter, "verify_elsewhere", fail)
        with pytest.raises(BundleError, match=r"cannot export to .* outside the supported range"):
            export(tiny_model, tmp_path / "large.funcrt", SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "export_function", fail)
        with pytest.raises(
            BundleError, match=r"prepare cannot be exported: .* the supported range"
        ):
            export(tiny_model, tmp_path / "large.funcrt", SMALL)
    assert list(tmp_path.iterdir()) == []
