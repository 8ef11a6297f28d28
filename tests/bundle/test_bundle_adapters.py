"""Bundles whose adapters and other weights are replaced, without export and without model code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import converters.adapters
import funcrt
from funcrt import adapters
from funcrt.adapters import Adapter, Change
from funcrt.buckets import Bucket, BucketPlan
from funcrt.errors import BundleError, ParamsError
from tests.adapting import PLAN, PROMPT, Q, alone, logits_of, make_adapter, model_of, stacked
from tests.helpers import TOLERANCE, ids, relative_error
from tests.reference import golden

import mlx.core as mx
import numpy as np
import pytest

SWAP = """
import funcrt, json, sys
import mlx.core as mx
from funcrt import adapters
folder, arrays, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
bundle = funcrt.load_bundle(folder)
changes = {}
for name, array in mx.load(arrays).items():
    matrix, _, half = name.rpartition(".")
    changes.setdefault(matrix, {})[half] = array
adapter = adapters.Adapter("new", {m: adapters.Change(**c) for m, c in changes.items()})
other = bundle.with_params(adapters.fit(adapter, bundle.stored_shapes))
print(json.dumps([b(tokens)[0].tolist() for b in (bundle, other)]))
code = ("funcrt.models", "funcrt.layers", "funcrt.model", "converters")
assert not [name for name in sys.modules if name.startswith(code)]
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with places of rank 4, with nothing in them."""
    folder = tmp_path_factory.mktemp("bundle") / "places.funcrt"
    model = model_of("float32")
    funcrt.export(adapters.keep(model, adapters.init_adapter(model, 4)), folder, PLAN)
    return folder


def test_a_bundle_takes_an_adapter_without_export_or_model_code(exported, tmp_path):
    adapter = make_adapter()
    parts = {f"{n}.{h}": getattr(c, h) for n, c in adapter.changes.items() for h in ("a", "b")}
    mx.save_safetensors(str(tmp_path / "adapter.safetensors"), parts)
    rows = [PROMPT, PROMPT[::-1]]
    command = [str(exported), str(tmp_path / "adapter.safetensors"), json.dumps(rows)]
    done = subprocess.run(
        [sys.executable, "-c", SWAP, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    plain, adapted = (np.array(logits) for logits in json.loads(done.stdout))
    fused = adapters.fuse(model_of("float32"), adapter)
    for row, tokens in enumerate(rows):
        assert relative_error(plain[row], logits_of(model_of("float32"), tokens)) < TOLERANCE
        assert relative_error(adapted[row], logits_of(fused, tokens)) < TOLERANCE


def test_a_bundle_takes_what_peft_wrote(tmp_path):
    base = converters.load(golden.family_folder("mistral"), "float32")
    places = adapters.keep(base, adapters.init_adapter(base, 4, ["q_proj", "v_proj", "up_proj"]))
    plan = BucketPlan(batch=(2,), tokens=(8,), capacity=(32,))
    bundle = funcrt.export(places, tmp_path / "mistral.funcrt", plan)
    folder = Path(golden.__file__).parent / "adapters" / "mistral-plain"
    adapter = converters.adapters.read(folder, bundle)
    other = bundle.with_params(adapters.fit(adapter, bundle.stored_shapes))
    arrays = mx.load(str(folder / "golden.safetensors"))
    logits, _ = other(mx.concatenate([arrays["tokens"][None]] * 2))
    assert relative_error(logits[1], arrays["logits"]) < TOLERANCE


def test_bundles_with_other_weights_share_their_graphs(exported):
    bundle = funcrt.load_bundle(exported)
    before, _ = bundle([PROMPT, PROMPT])
    imported = set(bundle._imported)
    adapter = make_adapter()
    other = bundle.with_params(adapters.fit(adapter, bundle.stored_shapes))
    logits, _ = other([PROMPT, PROMPT])
    assert set(other._imported) == imported  # nothing was read or traced again
    kept = adapters.keep(model_of("float32"), Adapter("wide", {}))
    fitted = {**model_of("float32").params, **adapters.fit(adapter, bundle.stored_shapes)}
    assert other.fingerprint == kept.with_params(fitted).fingerprint != bundle.fingerprint
    assert relative_error(logits[0], logits_of(kept.with_params(fitted))) < TOLERANCE
    # A fine-tune of the base itself goes the same way, and back.
    tuned = adapters.fuse(model_of("float32"), adapter)
    full, _ = bundle.with_params(tuned.params)([PROMPT, PROMPT])
    assert relative_error(full[0], logits_of(tuned)) < TOLERANCE
    again, _ = other.with_params(bundle.with_params({})._stored)([PROMPT, PROMPT])
    assert mx.array_equal(again, before)


def test_a_bundle_refuses_what_does_not_fit(exported):
    bundle = funcrt.load_bundle(exported)
    with pytest.raises(ParamsError, match="of rank 5, there is place for 4"):
        adapters.fit(make_adapter(rank=5), bundle.stored_shapes)
    with pytest.raises(ParamsError, match="lm_head: there is no place"):
        adapters.fit(make_adapter(ends=["lm_head"]), bundle.stored_shapes)
    with pytest.raises(ParamsError, match="place for 1 adapters, got 2"):
        adapters.fit([make_adapter(), make_adapter()], bundle.stored_shapes)
    narrow = Adapter("narrow", {Q: Change(mx.zeros((2, 32)), mx.zeros((64, 2)))})
    with pytest.raises(ParamsError, match=r"changes \[64, 32\], there is place for \[64, 64\]"):
        adapters.fit(narrow, bundle.stored_shapes)
    with pytest.raises(ParamsError, match=r"no such tensor.*export the model that has them"):
        bundle.with_params({"model.norm.bias": mx.zeros((64,))})
    with pytest.raises(ParamsError, match=r"model.norm.weight: expected float32 \[64\], got"):
        bundle.with_params({"model.norm.weight": mx.zeros((63,))})
    with pytest.raises(ParamsError, match="expected float32"):
        bundle.with_params({"model.norm.weight": mx.zeros((64,), dtype=mx.uint32)})


def test_rows_of_a_bundle_choose_among_adapters(exported, tmp_path):
    bundle = funcrt.export(stacked(), tmp_path / "rows.funcrt", PLAN)
    assert bundle.adapter_count == 2
    state = bundle.init_cache(2, 16)
    state["adapter"] = mx.array([2, 1], dtype=mx.int32)
    logits, state = bundle([PROMPT, PROMPT], cache=state)
    assert state["adapter"].tolist() == [2, 1]
    for row, number in enumerate((2, 1)):
        assert relative_error(logits[row], logits_of(alone()[number])) < TOLERANCE
    compiled = bundle.compiled()
    for choice in ([0, 2], [1, 1]):
        state = {**bundle.init_cache(2, 16), "adapter": mx.array(choice, dtype=mx.int32)}
        logits, _ = compiled.prefill(ids(PROMPT, PROMPT), mx.ones((2, 8)), state)
        for row, number in enumerate(choice):
            assert relative_error(logits[row], logits_of(alone()[number])[-1]) < TOLERANCE
    assert compiled.traces == {f"prefill_{Bucket(2, 8, 16)}": 1}
    swapped = bundle.with_params(adapters.fit([make_adapter(5)], bundle.stored_shapes))
    state = {**bundle.init_cache(2, 16), "adapter": mx.array([1, 2], dtype=mx.int32)}
    logits, _ = swapped([PROMPT, PROMPT], cache=state)
    expected = adapters.fuse(model_of("float32"), make_adapter(5))
    assert relative_error(logits[0], logits_of(expected)) < TOLERANCE
    assert relative_error(logits[1], logits_of(model_of("float32"))) < TOLERANCE
    # What is left out is read from the folder, which must still be the same.
    shutil.rmtree(tmp_path / "rows.funcrt")
    shutil.copytree(exported, tmp_path / "rows.funcrt")
    with pytest.raises(BundleError, match="was replaced since it was loaded"):
        swapped.with_params({})
