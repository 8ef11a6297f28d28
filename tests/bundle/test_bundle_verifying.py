"""What a verification covers, and that it fails when it should."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from funcrt.buckets import BucketPlan
from funcrt.bundle import load_bundle, verify
from funcrt.bundle.format.manifest import GROW, Target
from funcrt.bundle.golden.calls import LIKELIEST, VERIFYING, make_layout
from funcrt.bundle.golden.replay import observe_growth, observe_params, places
from funcrt.bundle.proof import verifier
from funcrt.flat import FlatFunction
from funcrt.model import Model
from funcrt.steps import FIRST, STEPS
from funcrt.storage import load_arrays, save_arrays
from tests.bundle.conftest import Edit, Exports, edit_target
from tests.helpers import TOLERANCE, run_plain

import mlx.core as mx
import pytest

INVARIANCES = {"neighbours", "padding", "poison", "chunking", "bucket"}


@pytest.mark.parametrize("kind", ["float32", "affine", "bfloat16"])
def test_a_sound_bundle_passes(exports: Exports, kind: str) -> None:
    bundle = load_bundle(exports(kind)[1])
    seen: list[tuple[int, int]] = []
    rows = verify(bundle, lambda done, total, item: seen.append((done, total)), write=False)
    assert all(row.passed for row in rows)
    functions = bundle.target.functions
    assert {row.function for row in rows} == {entry.key for entry in functions}
    checks = {}
    for entry in functions:
        outputs = {output.name for output in entry.outputs}
        checks[entry.key] = {"error", "tokens", "lengths", *({"accepted", "history"} & outputs)}
        if entry.name in ("prefill", "decode_greedy"):
            first = entry.bucket is not None and entry.bucket.capacity == 16
            checks[entry.key] |= INVARIANCES - ({"bucket"} if first else set())
    checks["prepare"] = {"error"}
    checks |= {entry.key: {"moved"} for entry in functions if entry.name == "grow"}
    assert {key: {row.check for row in rows if row.function == key} for key in checks} == checks
    assert len(rows) == sum(map(len, checks.values()))
    calls = sum(len(case.calls) for case in bundle.target.golden.cases)
    total = 1 + calls + sum(row.check in INVARIANCES for row in rows)
    assert seen == [(i + 1, total) for i in range(total)]
    errors = [row for row in rows if row.check == "error"]
    assert any(row.measured > 0 for row in errors)  # a reference of its own
    if kind != "bfloat16":
        assert {row.allowed for row in errors} == {TOLERANCE, bundle.target.golden.params_allowed}
    # Two runs may each be that far from the reference, where rounding is coarse.
    by_key = {row.function: row.allowed for row in errors}
    for row in rows:
        if row.check in ("chunking", "bucket"):
            assert row.allowed == by_key[row.function] * (2 if kind == "bfloat16" else 1)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_slightly_wrong_weights_fail(exports: Exports, kind: str) -> None:
    bundle = load_bundle(exports(kind)[1])
    factor = 1.0005 if kind == "float32" else 1.1
    bundle.prepared[1] = bundle.prepared[1] * mx.array(factor, bundle.prepared[1].dtype)
    # The folder is everybody's: a certificate of failure would be found there by others.
    failed = {row.function for row in verify(bundle, write=False) if not row.passed}
    assert {"prepare", "prefill_b2_t8_s16", "forward_b2_t8_s16"} <= failed


@pytest.mark.parametrize(
    ("name", "check"),
    [("reference", "error"), ("expected_tokens", "tokens"), ("expected_lengths", "lengths")],
)
def test_every_recorded_number_is_compared(copy: Path, edit: Edit, name: str, check: str) -> None:
    golden = copy / "golden/cpu.safetensors"
    arrays = load_arrays(golden)
    mx.eval(arrays)  # the file is about to be overwritten
    changed = {key for key in arrays if key.endswith(f".{name}") and key[0] != "p"}
    if name == "reference":
        arrays |= {key: arrays[key] * 1.001 for key in changed}
    else:
        arrays |= {key: mx.where(arrays[key] >= 0, arrays[key] + 1, -1) for key in changed}
    save_arrays(golden, arrays)
    edit(copy, lambda manifest: manifest)
    failed = {row.function for row in verify(copy) if not row.passed}
    assert {row.check for row in verify(copy) if not row.passed} == {check}
    golden_calls = places(load_bundle(copy).target.golden)
    everything = {place.key for place in golden_calls if place.call.function != GROW}
    assert failed == everything if name != "reference" else len(failed) >= len(everything) - 2


def test_a_graph_that_does_not_read_the_cache_fails(copy: Path, edit: Edit, model: Model) -> None:
    """In every function and shape, `decode` of the largest capacity too."""
    entries = [
        entry
        for entry in load_bundle(copy).target.functions
        if entry.state and entry.name != GROW and entry.bucket is not None
    ]
    for entry in entries:
        assert entry.bucket is not None
        function = model.flat_step(entry.name, entry.bucket)
        inputs = model.example(entry.name, entry.bucket)
        arrays = [
            a for item in inputs for a in (item.values() if isinstance(item, dict) else [item])
        ]
        mx.export_function(str(copy / entry.file), _forgetting(function, inputs[-1]), *arrays)
    edit(copy, lambda manifest: manifest)
    failed = {row.function for row in verify(copy) if row.check == "error" and not row.passed}
    first = load_bundle(copy).plan.tokens[0]
    later = {e.key for e in entries if e.name != "prefill" or f"_t{first}_" not in e.key}
    assert failed == later  # the first has nothing to read


def _forgetting(function: FlatFunction, state: Any) -> FlatFunction:
    """The function of a state whose keys and values are zeros."""
    names = list(state)

    def forget(*arrays: mx.array) -> tuple[mx.array, ...]:
        before, kept = arrays[: -len(names)], arrays[-len(names) :]
        pairs = zip(names, kept, strict=True)
        return function(*before, *[a if name == "lengths" else a * 0 for name, a in pairs])

    return forget


def test_the_reference_is_the_model_uncached(folder: Path, model: Model) -> None:
    bundle = load_bundle(folder)
    arrays = load_arrays(folder / "golden/cpu.safetensors")
    place = next(p for p in places(bundle.target.golden) if p.call.function == "prefill")
    tokens, valid = arrays[f"{place.prefix}tokens"], arrays[f"{place.prefix}valid"]
    probes = arrays[f"{place.prefix}probes"].tolist()
    values = arrays[f"{place.prefix}reference"].tolist()
    logits = {}
    for row in range(2):
        real = [t for t, v in zip(tokens[row].tolist(), valid[row].tolist(), strict=True) if v]
        if real:
            logits[row] = run_plain(model, real)[0][-1]
    assert len(values) == 8 * len(logits) > 0
    for pair, value in zip(probes, values, strict=True):
        row, column = pair
        assert value == pytest.approx(logits[row][column], abs=1e-4)


def test_weights_and_caches_may_be_larger_than_an_axis() -> None:
    """Nothing is evaluated: these would take gigabytes."""
    experts = mx.zeros((1 << 10, 1 << 11, 1 << 10))  # 2**31 values
    place = mx.array([[0, 2**31 - 1]], dtype=mx.int32)
    assert observe_params([experts], place).shape == (1,)
    few, many = (
        {
            "lengths": mx.zeros((2,), mx.int32),
            "layers.0.keys": mx.zeros((2, 1 << 10, slots, 1 << 10)),
        }
        for slots in (1 << 11, 1 << 12)
    )
    assert observe_growth(few, many).strange["moved"].shape == (2,)


# --- the layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        ((2,), (4, 8), (16, 32)),
        ((1, 4), (1, 64), (512, 1024)),
        ((1, 2), (1, 16), (2, 9)),
        ((3,), (5,), (4,)),
        ((1,), (16,), (16,)),
    ],
)
def test_the_layout_calls_every_function_and_never_overflows(sizes: Any) -> None:
    plan = BucketPlan(batch=sizes[0], tokens=sizes[1], capacity=sizes[2])
    called = []
    kinds = set()
    for case in make_layout(plan, 50):
        lengths = [0] * case.batch
        assert case.calls[0].fresh
        for number, call in enumerate(case.calls):
            step = STEPS[call.function]
            if call.fresh and number and case.capacity > 2:
                # A chain that begins again begins with a text that leaves room for the next call.
                assert (call.function, call.tokens) == ("prefill", plan.tokens[0])
                assert all(map(any, call.valid))
                assert not case.calls[number + 1].fresh
            called.append((call.function, case.batch, call.tokens, case.capacity * step.has_state))
            if call.function == FIRST:
                assert any(lengths)  # and there is another text in its rows, which does not matter
                assert not call.fresh
            if call.fresh or call.function == FIRST:
                lengths = [0] * case.batch
            after = lengths
            if step.has_state and not step.grows:
                counts = [sum(row) for row in call.valid]
                after = [n + count for n, count in zip(lengths, counts, strict=True)]
                kinds |= {tuple(row) for row in call.valid if call.tokens >= 4}
            assert max(after) <= case.capacity - 1
            assert call.undo == (call.function in VERIFYING)
            if step.grows:
                assert not call.fresh
                continue
            if call.undo:  # the lengths if every guess is wrong
                ahead = zip(lengths, call.valid, strict=True)
                assert call.lengths == [n + any(real) for n, real in ahead]
            else:
                lengths = after
                assert call.lengths == lengths
            assert call.spots
            least = LIKELIEST if call.undo else 0
            assert all(least <= token < 50 for row in call.ids for token in row)
            assert all(h < length for h, length in zip(call.hidden, lengths, strict=True))
    expected = [
        (step.name, *bucket)
        for step in STEPS.values()
        for bucket in step.buckets(plan.batch, plan.tokens, plan.capacity)
    ]
    assert {*called} == {*expected}
    twice = {one[0] for one in called if called.count(one) > 1}
    assert twice <= {"prefill"}
    if sizes[2][0] > 2 * sizes[1][0]:
        assert any(all(row) for row in kinds)
        assert any(not any(row) for row in kinds)
        assert any(row[0] and not row[-1] for row in kinds)  # right padding
        assert any(row[-1] and not row[0] for row in kinds)  # left padding


# --- its own process -----------------------------------------------------------------------------


def test_the_command(copy: Path, edit: Edit, capsys: pytest.CaptureFixture[str]) -> None:
    assert verifier.main([str(copy), "--device", "cpu"]) == 0
    assert "ok     decode_b2_t1_s16 tokens 0 (at most 0)" in capsys.readouterr().out

    def lower(target: Target) -> Target:
        cases = tuple(
            replace(case, calls=tuple(replace(call, allowed=0.0) for call in case.calls))
            for case in target.golden.cases
        )
        return replace(target, golden=replace(target.golden, cases=cases))

    edit(copy, lambda manifest: edit_target(manifest, lower))
    assert verifier.main([str(copy), "--json"]) == 1
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    total = len(lines)
    assert lines[0] == {"done": 1, "total": total, "item": "prepare"}
    assert lines[-1] == {
        "done": total, "total": total, "item": "decode_greedy_b2_t1_s32 bucket"
    }  # fmt: skip
    assert {"passed": False, "check": "error"}.items() <= last["checks"][1].items()
    assert last["certificate"] == str(copy / "certificate.json")
    assert json.loads((copy / "certificate.json").read_text())["checks"] == last["checks"]

    (copy / "tokenizer.json").unlink()
    assert verifier.main([str(copy)]) == 1
    assert "tokenizer.json is missing" in capsys.readouterr().err
