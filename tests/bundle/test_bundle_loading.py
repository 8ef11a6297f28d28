"""A bundle computes what its model does, in a process that lacks the model's code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from funcrt import masks
from funcrt.buckets import Bucket, BucketPlan
from funcrt.bundle import Bundle, load_bundle
from funcrt.cache import FULL
from funcrt.errors import CapacityError, InputError
from funcrt.model import Model
from funcrt.sampling import make_settings
from funcrt.storage import load_arrays, save_arrays
from tests.bundle.conftest import PLAN, Edit, Exports
from tests.helpers import (
    ROUNDING,
    TOLERANCE,
    assert_same,
    ids,
    make_model,
    random_tokens,
    relative_error,
    run_plain,
    to_numpy,
)

import mlx.core as mx
import numpy as np
import pytest

LONG, SHORT = random_tokens(11), random_tokens(5)

# Two ragged rows: eager there, through the bundle here; and no module that a bundle makes needless.
SCRIPT = """
import json, sys
from funcrt import Engine, load_bundle
bundle = load_bundle(sys.argv[1])
Engine(bundle)
import mlx.core as mx
from funcrt import sampling
long, short = json.loads(sys.argv[3])
pad = [0] * (len(long) - len(short))
mask = mx.array([[1] * len(long), [0] * len(pad) + [1] * len(short)])
logits, state = bundle([long, pad + short], mask)
functions = bundle.functions
token = mx.argmax(logits[:, -1], axis=-1).astype(mx.int32)
active = mx.array([True, True])
(first, *_), state = functions.decode_greedy(token, active, state)
settings = sampling.make_settings(2, bundle.vocab_size, temperature=1.0, seed=7)
(second, logprobs, finite, *_), state = functions.decode(first, active, settings, state)
results = {"logits": logits, "token": token, "first": first, "second": second,
           "logprobs": logprobs, "finite": finite, **state}
mx.save_safetensors(sys.argv[2], results)
print(json.dumps({"modules": sorted(sys.modules), "traces": functions.traces,
                  "text": bundle.tokenizer.decode([3, 4])}))
"""


def run_elsewhere(folder: Path, output: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    arguments = [str(folder), str(output), json.dumps([LONG, SHORT])]
    command = [sys.executable, "-c", SCRIPT, *arguments]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout), load_arrays(output)


@pytest.mark.parametrize("kind", ["float32", "affine", "bfloat16"])
def test_another_process_computes_the_same(exports: Exports, tmp_path: Path, kind: str) -> None:
    model, folder = exports(kind)
    said, results = run_elsewhere(folder, tmp_path / "results.safetensors")
    assert said["text"] == "w3 w4"

    exact = make_model(kind) if kind != "bfloat16" else as_float32(model)
    for row, tokens in enumerate([LONG, SHORT]):
        reference, _ = run_plain(exact, tokens)
        eager, _ = run_plain(model, tokens)
        logits = results["logits"][row, len(LONG) - len(tokens) :]
        allowed = max(TOLERANCE, ROUNDING * relative_error(eager, reference))
        assert relative_error(logits, reference) <= allowed
    # What was chosen, replayed without a cache.
    chosen = [to_numpy(results[name]).astype(int) for name in ("token", "first", "second")]
    assert results["lengths"].tolist() == [len(LONG) + 2, len(SHORT) + 2]
    assert results["finite"].tolist() == [True, True]
    if kind != "bfloat16":
        for row, tokens in enumerate([LONG, SHORT]):
            logits, _ = run_plain(exact, [*tokens, int(chosen[0][row]), int(chosen[1][row])])
            assert logits[-3].argmax() == chosen[0][row]
            assert logits[-2].argmax() == chosen[1][row]
            log_total = np.log(np.exp(logits[-1]).sum())
            expected = logits[-1][chosen[2][row]] - log_total
            assert results["logprobs"][row].item() == pytest.approx(expected, abs=1e-4)


def test_loading_imports_no_model_code_and_traces_once(exports: Exports, tmp_path: Path) -> None:
    said, _ = run_elsewhere(exports()[1], tmp_path / "results.safetensors")
    modules = set(said["modules"])
    assert not modules & {"transformers", "converters", "funcrt.models", "funcrt.model", "numpy"}
    assert not modules & {"funcrt.models.llama", "funcrt.bundle.exporter", "jinja2", "typer"}
    assert not modules & {"asyncio", "concurrent.futures", "logging"}  # slow to import
    # Eleven tokens in chunks of eight; the rest is padded to four.
    assert said["traces"] == {
        "forward_b2_t8_s16": 1,
        "forward_b2_t4_s16": 1,
        "decode_greedy_b2_t1_s16": 1,
        "decode_b2_t1_s16": 1,
    }


def as_float32(model: Model) -> Model:
    params = {name: array.astype(mx.float32) for name, array in model.params.items()}
    return Model(replace(model.config, dtype="float32"), params)


# --- the contract's form -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8])
def test_forward_takes_any_t_up_to_the_largest(bundle: Bundle, model: Model, count: int) -> None:
    tokens = ids(random_tokens(count), random_tokens(count, 1))
    valid = mx.array([[True] * count, [i != 1 for i in range(count)]])
    state = bundle.init_cache(2, 16)
    mask = masks.causal(valid, state["lengths"], 16)
    logits, after = bundle.forward(tokens, mask, state)
    expected, expected_state = model.forward(model.prepared, tokens, mask, state)
    assert logits.shape == (2, count, model.vocab_size)
    where = valid[..., None]
    assert relative_error(logits * where, expected * where) <= TOLERANCE
    assert after["lengths"].tolist() == expected_state["lengths"].tolist()


def test_forward_refuses_what_was_not_exported(bundle: Bundle) -> None:
    state = bundle.init_cache(2, 16)
    with pytest.raises(CapacityError, match=r"9 tokens in one call, largest is 8.*--tokens 9"):
        bundle.forward(mx.zeros((2, 9), mx.int32), mx.zeros((2, 1, 9, 16), mx.bool_), state)
    with pytest.raises(InputError, match="mask"):
        bundle.forward(mx.zeros((2, 4), mx.int32), mx.zeros((2, 1, 4, 32), mx.bool_), state)
    for batch, capacity in [(1, 16), (2, 17)]:
        with pytest.raises(CapacityError, match="not declared"):
            bundle.init_cache(batch, capacity)


def test_a_part_of_the_plan_can_be_used(bundle: Bundle) -> None:
    part = BucketPlan(batch=2, tokens=4, capacity=32)
    assert bundle.compiled(part).plan == part
    with pytest.raises(CapacityError, match="plan tokens 5 was not exported; exported: 4, 8"):
        bundle.compiled(BucketPlan(batch=2, tokens=(4, 5), capacity=32))


def test_facts_are_at_hand(bundle: Bundle, model: Model) -> None:
    assert bundle.vocab_size == model.vocab_size
    assert bundle.max_positions == model.config.max_positions
    assert (bundle.dtype, bundle.device, bundle.plan) == ("float32", "cpu", PLAN)
    assert bundle.cache_spec == model.cache_spec(FULL)
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.encode("w7 w9") == [7, 9]


# --- the call form -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 8, 13, 20])
def test_call_pads_rows_and_feeds_chunks(bundle: Bundle, model: Model, count: int) -> None:
    tokens = random_tokens(count)
    logits, state = bundle(tokens)
    expected, _ = run_plain(model, tokens)
    assert logits.shape == (1, count, model.vocab_size)
    assert relative_error(logits[0], expected) <= TOLERANCE
    assert state["lengths"].tolist() == [count, 0]
    again, state = bundle(tokens[:2], cache=state)
    expected, _ = run_plain(model, [*tokens, *tokens[:2]])
    assert relative_error(again[0], expected[-2:]) <= TOLERANCE


def test_the_cache_grows_to_the_next_declared_capacity(bundle: Bundle, model: Model) -> None:
    tokens = random_tokens(28)
    _, state = bundle(tokens[:14])
    assert state["layers.0.keys"].shape[2] == 16
    logits, state = bundle(tokens[14:], cache=state)
    assert state["layers.0.keys"].shape[2] == 32
    assert relative_error(logits[0], run_plain(model, tokens)[0][14:]) <= TOLERANCE
    with pytest.raises(CapacityError, match="largest capacity is 31"):
        bundle(tokens[:4], cache=state)
    with pytest.raises(CapacityError, match="3 rows, largest batch is 2"):
        bundle([[1], [2], [3]])


def test_holes_and_neighbours_do_not_matter(bundle: Bundle) -> None:
    alone, _ = bundle([LONG, [0] * 11], mx.array([[1] * 11, [0] * 11]))
    pair, _ = bundle([LONG, random_tokens(11, 3)], mx.array([[1] * 11, [1, 0, 1] * 3 + [1, 1]]))
    assert mx.array_equal(alone[0], pair[0]).item()


def test_a_long_mask_that_looks_back_is_fed_in_chunks(bundle: Bundle, model: Model) -> None:
    tokens = ids(random_tokens(12), random_tokens(12, 1))
    state = model.init_cache(2, 16)
    mask = masks.causal(mx.ones((2, 12)), state["lengths"], 16)
    mask = mask & (mx.arange(16) != 2)  # slot 2 is nobody's past, and token 2 sees 0 and 1 only
    expected, _ = model.forward(model.prepared, tokens, mask, state)
    logits, _ = bundle(tokens, mask)
    assert relative_error(logits, expected) <= TOLERANCE


def test_a_long_mask_that_looks_ahead_is_refused(bundle: Bundle) -> None:
    tokens = ids(random_tokens(12), random_tokens(12, 1))
    mask = masks.causal(mx.ones((2, 12)), mx.zeros((2,), mx.int32), 16)
    near, far = mx.array(mask), mx.array(mask)
    near[1, 0, 2, 7] = True  # within the first chunk of eight
    bundle(tokens, near)
    far[1, 0, 2, 8] = True
    with pytest.raises(CapacityError, match=r"--tokens 12"):
        bundle(tokens, far)
    beyond = mx.array(mask)
    beyond[1, 0, 2, 12:] = True  # nothing is ever written there, so nothing changes
    assert relative_error(bundle(tokens, beyond)[0], bundle(tokens, mask)[0]) == 0


# --- what graphs hold, and what they outlive -----------------------------------------------------


def test_graphs_hold_no_weights(copy: Path, edit: Edit) -> None:
    other = make_model("float32", seed=5)
    save_arrays(copy / "params.safetensors", other.params)
    edit(copy, lambda manifest: manifest)
    logits, _ = load_bundle(copy)(LONG)
    assert relative_error(logits[0], run_plain(other, LONG)[0]) <= TOLERANCE
    assert all(path.stat().st_size < 60_000 for path in copy.rglob("*.mlxfn"))


def test_a_loaded_bundle_outlives_its_folder(copy: Path, model: Model) -> None:
    bundle = load_bundle(copy)
    shutil.rmtree(copy)
    logits, _ = bundle(LONG)
    assert relative_error(logits[0], run_plain(model, LONG)[0]) <= TOLERANCE


def test_inputs_are_not_changed(bundle: Bundle) -> None:
    _, state = bundle([LONG, LONG])
    before = {name: mx.array(to_numpy(array)).astype(array.dtype) for name, array in state.items()}
    token, active = mx.array([3, 4], mx.int32), mx.array([True, True])
    bundle.functions.decode(
        token, active, make_settings(2, bundle.vocab_size, temperature=1.0), state
    )
    assert_same(state, before)


def test_prepared_weights_equal_the_models(bundle: Bundle, model: Model) -> None:
    names = [spec.name for spec in bundle.target.prepared]
    assert_same(dict(zip(names, bundle.prepared, strict=True)), model.prepared)


def test_every_function_of_the_plan_is_there(bundle: Bundle) -> None:
    functions = bundle.target.step_functions()
    assert ("decode", Bucket(2, 1, 32)) in functions
    assert ("forward", Bucket(2, 8, 16)) in functions
    assert ("sample", Bucket(2, 1, 0)) in functions
    assert ("prefill_block", Bucket(2, 4, 32)) in functions
    assert ("verify", Bucket(2, 4, 16)) in functions
    assert ("verify_greedy", Bucket(2, 8, 32)) in functions
    assert ("top", Bucket(2, 1, 0)) in functions
    assert functions["grow", Bucket(2, 1, 16)].grown == 32
    assert len(functions) == 5 * 4 + 2 + 2 + 1 + 1 + 1
