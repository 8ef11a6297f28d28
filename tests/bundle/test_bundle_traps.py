"""What MLX gets wrong without a word: each is noticed before a bundle appears, or does no harm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from funcrt import sampling
from funcrt.bundle import Bundle, export, load_bundle
from funcrt.bundle.format.manifest import FunctionEntry
from funcrt.bundle.targets import TargetMaker
from funcrt.errors import BundleError
from funcrt.flat import FlatFunction
from funcrt.model import Model
from tests.bundle.conftest import SMALL
from tests.bundle.test_bundle_fuzz import write_manifest
from tests.helpers import make_model, random_tokens, relative_error, run_plain

import mlx.core as mx
import pytest

V = 96
WRONG = "exported functions are wrong, nothing is published"
Change = Callable[[mx.array], mx.array]


class Changed:
    """A family whose logits are changed, as one written by somebody else might."""

    def __init__(self, family: Any, change: Change) -> None:
        self._family = family
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def unembed(self, config: Any, params: Any, x: mx.array) -> mx.array:
        logits: mx.array = self._family.unembed(config, params, x)
        return self._change(logits)


def with_change(change: Change) -> Model:
    model = make_model()
    model.family = Changed(model.family, change)
    return model


# --- constants -----------------------------------------------------------------------------------


def table(*shape: int) -> mx.array:
    made = mx.random.normal(shape, key=mx.random.key(7))
    mx.eval(made)
    return made


def strided() -> mx.array:
    return table(V, 2)[:, 0]


def reversed_() -> mx.array:
    return table(V)[::-1]


def transposed() -> mx.array:
    return table(2, V).T


def broadcast() -> mx.array:
    return mx.broadcast_to(table(1, 2), (V, 2))


def contiguous() -> mx.array:
    return table(V, 2)


def add(constant: mx.array) -> Change:
    """Logits plus a captured array `[V]` or, by its columns, `[V, N]`."""
    mx.eval(constant)
    if constant.ndim == 1:
        return lambda logits: logits + constant
    return lambda logits: logits + mx.sum(constant * mx.array([1.0, 3.0]), axis=1)


@pytest.mark.parametrize("make", [strided, reversed_, transposed, broadcast])
def test_a_constant_that_is_not_contiguous(tmp_path: Path, make: Callable[[], mx.array]) -> None:
    """MLX writes its buffer as if it were."""
    with pytest.raises(BundleError, match=WRONG):
        export(with_change(add(make())), tmp_path / "out", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_constant_that_is_contiguous(tmp_path: Path) -> None:
    model = with_change(add(contiguous()))
    bundle = export(model, tmp_path / "out", SMALL)
    tokens = random_tokens(5)
    assert relative_error(bundle(tokens)[0][0], run_plain(model, tokens)[0]) <= 2e-5


# --- traces that fail ----------------------------------------------------------------------------


def fail_late() -> Change:
    """Every function but the first few."""
    calls = 0

    def change(logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("no more")
        return logits

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (fail_late(), r"cannot export to .*: no more"),
        (mx.contiguous, r"forward_b2_t8_s16 cannot be exported: .*Contiguous"),
    ],
    ids=["raises", "cannot be exported"],
)
def test_a_trace_that_fails(tmp_path: Path, change: Change, match: str) -> None:
    """It leaves a corrupt file, which must not stay."""
    with pytest.raises(BundleError, match=match):
        export(with_change(change), tmp_path / "out", SMALL)
    assert list(tmp_path.iterdir()) == []


# --- random state --------------------------------------------------------------------------------


def test_implicit_random_state_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        export(with_change(lambda x: x + mx.random.normal(x.shape)), tmp_path / "out", SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["decode", "sample", "verify"])
@pytest.mark.parametrize("frozen", ["seed", "implicit seed", "position"])
def test_a_frozen_draw_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, frozen: str
) -> None:
    """Whatever of a draw's key a graph holds, the golden calls have several of it."""
    mx.random.seed(0)  # by chance another seed draws the same few tokens
    make, noise = TargetMaker._function, sampling.make_noise

    def freeze(seed: mx.array, positions: mx.array, vocab: int) -> mx.array:
        if frozen == "position":
            return noise(seed, mx.full(positions.shape, 9, mx.int32), vocab)
        drawn = mx.random.randint(0, 99) if frozen == "implicit seed" else mx.array(3)
        return noise(mx.broadcast_to(drawn, seed.shape).astype(mx.uint32), positions, vocab)

    def function(self: TargetMaker, entry: FunctionEntry) -> tuple[FlatFunction, list[mx.array]]:
        traced, example = make(self, entry)
        if entry.name != name:
            return traced, example

        def trace(*arrays: mx.array) -> tuple[mx.array, ...]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sampling, "make_noise", freeze)
                return traced(*arrays)

        return trace, example

    monkeypatch.setattr(TargetMaker, "_function", function)
    with pytest.raises(BundleError, match=f"{WRONG}: {name}_b2"):
        export(make_model(), tmp_path / "out", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_draws_follow_seed_and_position(bundle: Bundle) -> None:
    logits = mx.zeros((2, V))
    drawn = set()
    for seed in range(8):
        settings = sampling.make_settings(2, V, temperature=1.0, seed=seed)
        for position in range(8):
            positions = mx.array([position, position + 100], mx.int32)
            ours = bundle.functions.sample(logits, positions, settings).tokens
            assert ours.tolist() == sampling.sample(logits, settings, positions).tokens.tolist()
            drawn.add(tuple(ours.tolist()))
    assert len(drawn) > 50


# --- names and places of inputs ------------------------------------------------------------------


def renamed(entry: dict[str, Any]) -> None:
    entry["inputs"][0]["name"] = "ids"


def reordered(entry: dict[str, Any]) -> None:
    entry["inputs"].reverse()


def outputs_reordered(entry: dict[str, Any]) -> None:
    entry["outputs"].reverse()


def other_params(entry: dict[str, Any]) -> None:
    entry["params"] = "stored"


def without_state(entry: dict[str, Any]) -> None:
    entry["state"] = False


def file_of_another(entry: dict[str, Any]) -> None:
    entry["file"] = entry["file"].replace("decode_greedy", "decode")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    "change",
    [renamed, reordered, outputs_reordered, other_params, without_state, file_of_another],
)
def test_other_inputs_than_those_that_are_passed(
    copy: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """MLX takes any keyword for a positional input, so names are compared here."""
    data = json.loads((copy / "manifest.json").read_text("utf-8"))
    functions = data["targets"]["cpu"]["functions"]
    change(next(entry for entry in functions if entry["name"] == "decode_greedy"))
    write_manifest(copy, json.dumps(data).encode())
    with pytest.raises(BundleError, match=r"decode_greedy_b2_t1_s16: its inputs and outputs"):
        load_bundle(copy)


# --- a bundle in use -----------------------------------------------------------------------------


def test_a_bundle_in_use_is_replaced(copy: Path, model: Model) -> None:
    """What was loaded runs on, also through functions that it has not imported yet."""
    old, tokens = load_bundle(copy), random_tokens(11)
    logits, state = old(tokens)
    other = make_model("float32", seed=3)
    new = export(other, copy, SMALL)
    more, _ = old(tokens[:2], cache=state)
    expected, _ = run_plain(model, [*tokens, *tokens[:2]])
    assert relative_error(logits[0], expected[:11]) <= 2e-5
    assert relative_error(more[0], expected[11:]) <= 2e-5
    for bundle in (new, load_bundle(copy)):
        assert relative_error(bundle(tokens)[0][0], run_plain(other, tokens)[0]) <= 2e-5
    shutil.rmtree(copy)
    assert relative_error(old(tokens)[0][0], expected[:11]) <= 2e-5


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.skipif(not mx.is_available(mx.gpu), reason="needs two devices")
def test_the_default_device_changes_after_loading(bundle: Bundle, model: Model) -> None:
    """A graph runs on the device that it was made for, whatever the default is by then."""
    before, tokens = mx.default_device(), random_tokens(7)
    expected, _ = run_plain(model, tokens)
    other = mx.cpu if before.type == mx.DeviceType.gpu else mx.gpu
    mx.set_default_device(other)
    try:
        assert relative_error(bundle(tokens)[0][0], expected) <= 2e-5
    finally:
        mx.set_default_device(before)
