"""`flatten`, and what it is for: the same results in a process that has nothing but MLX."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from funcrt import flatten, masks
from funcrt.cache import CacheState
from funcrt.errors import InputError
from funcrt.model import Model
from tests.helpers import (
    KINDS,
    ROUNDING,
    TOLERANCE,
    ids,
    make_model,
    poison,
    random_tokens,
    relative_error,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

model_of = cache(make_model)
A, B, C = mx.array([1.0]), mx.array([2, 3]), mx.array([[4.0]])


class Pair(NamedTuple):
    first: mx.array
    second: Any


def test_names_follow_the_tree_and_the_order_of_the_example():
    def f(params: Any, x: mx.array, rest: Any) -> Pair:
        assert isinstance(rest[1], Pair)
        assert isinstance(rest[0], list)
        return Pair(params["z.w"] + x, {"b": rest[0][1], "a": (rest[1].second, x)})

    flat, inputs, outputs = flatten(f, {"z.w": A, "a": {"k": B}}, C, ([A, B], Pair(C, A)))
    assert inputs == [
        "params.z.w",
        "params.a.k",
        "x",
        "rest.0.0",
        "rest.0.1",
        "rest.1.first",
        "rest.1.second",
    ]
    assert outputs == ["first", "second.b", "second.a.0", "second.a.1"]
    arrays = [mx.array([float(i)]) for i in range(7)]
    assert [array.item() for array in flat(*arrays)] == [2, 4, 6, 2]


def test_single_and_positional_outputs():
    def total(*arrays: mx.array) -> mx.array:
        return arrays[0] + arrays[1]

    flat, inputs, outputs = flatten(total, A, C)
    assert (inputs, outputs) == (["arrays.0", "arrays.1"], ["output"])
    assert [array.tolist() for array in flat(A, C)] == [[[5.0]]]
    assert flatten(lambda x: (x, [x, {"k": x}]), A)[2] == ["0", "1.0", "1.1.k"]
    assert flatten(lambda x, y=None: x, A)[1] == ["x"]
    assert flatten(lambda x, *rest: x, A, B, C)[1] == ["x", "rest.0", "rest.1"]


def test_names_of_the_contract():
    model = model_of("affine")
    state = model.init_cache(2, 16)
    example = [model.params, ids([0], [0]), mx.zeros((2, 1, 1, 16), mx.bool_), state]
    flat, inputs, outputs = flatten(model.forward, *example)
    states = [f"cache_state.{name}" for name in state]
    assert inputs == [*(f"params.{name}" for name in model.params), "tokens", "mask", *states]
    assert outputs == ["logits", *states]
    arrays = [*model.params.values(), *example[1:3], *state.values()]
    logits, lengths, *_ = flat(*arrays)
    assert logits.shape == (2, 1, 96)
    assert lengths.tolist() == [0, 0]
    with_positions = flatten(model.forward, *example, ids([0], [0]))
    assert with_positions[1] == [*inputs, "positions"]


@pytest.mark.parametrize(
    ("f", "example", "match"),
    [
        (lambda x: x, (1,), "got int at x"),
        (lambda x: x, ({"a": [None]},), r"got NoneType at x\.a\.0"),
        (lambda x: 3, (A,), "got int at the output"),
        (lambda x: {"a": None}, (A,), "got NoneType at a"),
        (lambda x: x, (A, B), "takes 1 arguments, got 2"),
        (lambda: A, (A,), "takes 0 arguments, got 1"),
    ],
)
def test_what_cannot_be_flattened(f, example, match):
    with pytest.raises(InputError, match=match):
        flatten(f, *example)


def test_the_number_of_arrays_is_checked():
    flat, _, _ = flatten(lambda x, y: x, A, [B, C])
    for arrays in ([], [A, B], [A, B, C, A]):
        with pytest.raises(InputError, match=f"expected 3 arrays, got {len(arrays)}"):
            flat(*arrays)


def test_nothing_is_evaluated():
    def f(x: mx.array) -> mx.array:
        return x + mx.zeros((2**20, 2**20))  # would take 4 TiB

    flat, _, _ = flatten(f, mx.zeros((1,)))
    assert flat(mx.zeros((1,)))[0].shape == (2**20, 2**20)


# --- another process ------------------------------------------------------------------------------

# What a host does: chain a padded prefill and two decode steps, then hand over all results.
IMPORTED = """
import json, sys
import mlx.core as mx

for folder in sys.argv[1:]:
    params = list(mx.load(f"{folder}/params.safetensors").items())
    order = json.load(open(f"{folder}/order.json"))
    params = [dict(params)[name] for name in order["params"]]
    calls = mx.load(f"{folder}/calls.safetensors")
    forward = mx.import_function(f"{folder}/forward.mlxfn")
    state = [calls[f"state.{name}"] for name in order["state"]]
    results = {}
    for call in range(3):
        logits, *state = forward(*params, calls[f"{call}.tokens"], calls[f"{call}.mask"], *state)
        results[f"{call}.logits"] = logits
    results |= {f"state.{name}": array for name, array in zip(order["state"], state)}
    mx.save_safetensors(f"{folder}/results.safetensors", results)
assert not {name.split(".")[0] for name in sys.modules} & {"funcrt", "converters", "numpy"}
"""
Calls = list[tuple[mx.array, mx.array]]


def make_calls() -> tuple[Calls, list[list[bool]]]:
    """Three rows, eight tokens and then one each; the second row pauses once."""
    valid = [
        [[1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1, 1], [1] * 8],
        [[1], [0], [1]],
        [[1], [1], [1]],
    ]
    lengths = np.zeros(3, np.int32)
    calls = []
    for n, real in enumerate(valid):
        tokens = ids(*(random_tokens(len(real[0]), 10 * n + row) for row in range(3)))
        calls.append((tokens, masks.causal(mx.array(real), mx.array(lengths), 24)))
        lengths = lengths + np.array(real, np.int32).sum(1, dtype=np.int32)
    return calls, valid


def follow(
    forward: Callable[[mx.array, mx.array, CacheState], tuple[mx.array, CacheState]],
    state: CacheState,
) -> dict[str, mx.array]:
    results = {}
    for n, (tokens, mask) in enumerate(make_calls()[0]):
        results[f"{n}.logits"], state = forward(tokens, mask, state)
    return {**results, **{f"state.{name}": array for name, array in state.items()}}


def export(model: Model, folder: Path) -> Path:
    """One file with both shapes, weights beside it: fused ones, or packed ones as they are."""
    folder.mkdir()
    params = model.params if folder.name == "affine" else model.prepared
    state = model.init_cache(3, 24)
    calls, _ = make_calls()
    flat, _, outputs = flatten(model.forward, params, *calls[0], state)
    assert outputs[1] == "cache_state.lengths"
    with mx.exporter(str(folder / "forward.mlxfn"), flat) as exporter:
        for tokens, mask in calls[:2]:
            exporter(*params.values(), tokens, mask, *state.values())
    mx.save_safetensors(str(folder / "params.safetensors"), params)
    arrays = {f"state.{name}": array for name, array in poison(state).items()}
    for n, (tokens, mask) in enumerate(calls):
        arrays |= {f"{n}.tokens": tokens, f"{n}.mask": mask}
    mx.save_safetensors(str(folder / "calls.safetensors"), arrays)
    order = {"params": list(params), "state": list(state)}
    (folder / "order.json").write_text(json.dumps(order))
    return folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, mx.array]]:
    """What one new process got for every kind of weights."""
    base = tmp_path_factory.mktemp("exported")
    folders = [str(export(model_of(kind), base / kind)) for kind in KINDS]
    subprocess.run([sys.executable, "-c", IMPORTED, *folders], check=True, timeout=120)
    loaded = (mx.load(f"{folder}/results.safetensors") for folder in folders)
    return dict(zip(KINDS, loaded, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_imported_in_a_new_process_equals_eager(imported, kind):
    model = model_of(kind)
    plain = follow(lambda *call: model.forward(model.params, *call), model.init_cache(3, 24))
    precise = Model(replace(model.config, dtype="float32"), model.params)
    exact = follow(lambda *call: precise.forward(precise.params, *call), precise.init_cache(3, 24))
    assert imported[kind]["state.lengths"].tolist() == [7, 6, 10]
    for n, real in enumerate(make_calls()[1]):
        name, rows = f"{n}.logits", np.array(real, bool)
        ours, eager, reference = (to_numpy(r[name])[rows] for r in (imported[kind], plain, exact))
        allowed = max(ROUNDING * relative_error(eager, reference), TOLERANCE)
        assert relative_error(ours, reference) <= allowed
        assert imported[kind][name].dtype == plain[name].dtype
    for name in plain:
        if name.startswith("state.layers"):
            for row, length in enumerate([7, 6, 10]):
                results = (imported[kind], plain, exact)
                ours, eager, reference = (to_numpy(r[name])[row, :, :length] for r in results)
                allowed = max(ROUNDING * relative_error(eager, reference), TOLERANCE)
                assert relative_error(ours, reference) <= allowed
