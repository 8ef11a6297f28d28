"""`funcrt inspect`: what is known of a bundle before anything runs, in every form that it has."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

from funcrt.buckets import Bucket
from funcrt.bundle import Bundle, drawing
from funcrt.bundle.drawing import draw
from funcrt.bundle.facts import BundleFacts, TargetFacts, bytes_read, count_bytes, know
from funcrt.bundle.format.checks import load_manifest
from funcrt.bundle.format.files import hash_file, read_file
from funcrt.bundle.format.manifest import ArraySpec, Manifest, describe_arrays
from funcrt.cli.page import render
from funcrt.errors import BundleError
from funcrt.footprint import Footprint
from funcrt.model import Model
from funcrt.models import read_config
from tests.bundle.conftest import PLAN, Edit, edit_target
from tests.commands import run_here
from tests.families.cases import config_of
from tests.random_families import draw_params
from tests.reference import golden

import mlx.core as mx
import pytest

DECODE = "decode_b2_t1_s16"


@pytest.fixture(scope="module")
def facts(folder: Path) -> BundleFacts:
    return know(folder)


@pytest.fixture(scope="module")
def target(facts: BundleFacts) -> TargetFacts:
    return facts.find("cpu")


# --- facts ---------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_arrays(
    bundle: Bundle, facts: BundleFacts, target: TargetFacts, folder: Path
) -> None:
    assert facts.damage == ()
    assert facts.digest == hash_file(folder / "manifest.json")
    assert target.weights == sum(array.nbytes for array in bundle.prepared)
    assert [f.entry.key for f in target.functions] == [e.key for e in bundle.target.functions]
    for f in target.functions:
        state = bundle.init_cache(f.bucket.batch, f.bucket.capacity) if f.entry.state else {}
        assert f.cache == sum(array.nbytes for array in state.values()), f.entry.key
        assert f.file_bytes == (folder / f.entry.file).stat().st_size
        assert f.entry.primitives > 0
        assert f.peak is not None
        assert f.peak > f.cache + target.weights
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    beside = [folder / name for name in ("manifest.json", "manifest.json.sha256")]
    beside += folder.glob("certificate.json")
    assert facts.total == kept - sum(path.stat().st_size for path in beside)


def test_calls_read_weights_state_and_inputs(bundle: Bundle, target: TargetFacts) -> None:
    found = {f.entry.key: f for f in target.functions}
    embedding = next(a for a in bundle.target.prepared if "embed_tokens" in a.name)
    vocab, width = embedding.shape
    weights = target.weights - 4 * width * (vocab - 2 * 4)  # eight tokens look up eight rows
    prefill = found["prefill_b2_t4_s16"]
    assert prefill.reads == weights + prefill.cache + 2 * 4 * (4 + 1)
    assert found["top_b2_t1_s0"].reads == 2 * vocab * 4
    assert found["grow_b2_t1_s16"].reads == found["grow_b2_t1_s16"].cache
    assert found["prepare"].reads == sum(
        math.prod(spec.shape) * 4 for spec in bundle.manifest.params.stored
    )


def test_peaks_are_those_of_the_footprint(bundle: Bundle, target: TargetFacts) -> None:
    footprint = Footprint.of(bundle)
    found = {f.entry.key: f for f in target.functions}
    inputs = 2 * 8 * (4 + 1)
    expected = footprint.params + footprint.state(2, 32) + footprint.call(2, 8, 32, "prefill")
    assert found["prefill_b2_t8_s32"].peak == expected + inputs
    lengths = 2 * 4  # passed on as they are
    grown = footprint.params + footprint.state(2, 16) + footprint.state(2, 32) - lengths
    assert found["grow_b2_t1_s16"].peak == grown


def test_memory_is_that_of_the_largest_call(target: TargetFacts) -> None:
    assert [(m.batch, m.capacity) for m in target.memory] == [(2, 16), (2, 32)]
    for m in target.memory:
        peaks = {
            f.entry.key: f.peak
            for f in target.functions
            if (f.bucket.batch, f.bucket.capacity) == (m.batch, m.capacity)
        }
        assert m.weights + m.state + m.call == max(peak or 0 for peak in peaks.values())
        assert peaks[m.largest] == m.weights + m.state + m.call


@pytest.mark.usefixtures("untouched")
def test_nothing_is_loaded(folder: Path) -> None:
    assert know(folder).targets[0].functions


def test_only_chosen_experts_and_looked_up_rows_are_read() -> None:
    config = {"num_experts": 8, "experts_per_token": 2, "vocab_size": 100}
    experts = ArraySpec("layers.0.mlp.experts.up_proj.weight", (8 * 3, 4), "float16")
    router = ArraySpec("layers.0.mlp.gate.weight", (8, 4), "float16")
    table = ArraySpec("model.embed_tokens.weight", (100, 4), "float32")
    flag = ArraySpec("flag", (), "bool")
    for tokens, read in ((1, 2), (3, 6), (64, 8)):
        assert bytes_read([experts, router], config, tokens) == read * 3 * 4 * 2 + 8 * 4 * 2
    assert bytes_read([experts], {**config, "num_experts": 0}, 1) == 8 * 3 * 4 * 2
    assert bytes_read([table], {**config, "tie_word_embeddings": False}, 3) == 3 * 4 * 4
    assert bytes_read([table], {**config, "tie_word_embeddings": True}, 3) == 100 * 4 * 4
    assert bytes_read([table, flag], {}, 3) == 100 * 4 * 4 + 1


def test_experts_of_every_family_are_known_by_their_names() -> None:
    found = []
    for name in golden.family_cases():
        config = read_config(config_of(name))
        values = {**config.to_dict(), "tie_word_embeddings": True}
        if "num_experts" in values:
            model = Model(config, draw_params(config_of(name)))
            prepared = describe_arrays(model.prepare(model.params))
            assert bytes_read(prepared, values, 1) < count_bytes(prepared), name
            found.append(config.model_type)
    assert {"mixtral", "granitemoe", "gpt_oss", "deepseek_v3", "qwen3_5_moe"} <= set(found)


def test_a_model_of_unknown_sizes_has_no_peaks(copy: Path, edit: Edit) -> None:
    edit(copy, lambda m: replace(m, model={"model_type": "other"}))
    (target,) = know(copy).targets
    known = {f.entry.name for f in target.functions if f.peak is not None}
    assert known == {"prepare", "grow"}  # whose arrays are all in the manifest
    assert target.memory == ()
    assert run_here("inspect", copy).returncode == 0
    assert "not known" in render(know(copy), None)


# --- the command ---------------------------------------------------------------------------------


def test_the_text_names_every_function(folder: Path, facts: BundleFacts) -> None:
    shown = run_here("inspect", folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    first = {line.split()[0] for line in shown.stdout.splitlines() if line.strip()}
    assert first >= {f.entry.key for t in facts.targets for f in t.functions}
    assert facts.digest in shown.stdout
    assert "plan: batch 2; tokens 4, 8; capacity 16, 32" in shown.stdout


def test_json_is_the_manifest_and_what_follows_from_it(folder: Path, target: TargetFacts) -> None:
    done = run_here("inspect", folder, "--json")
    data = json.loads(done.stdout)
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert {name: data[name] for name in manifest} == manifest
    assert data["plan"] == {name: list(getattr(PLAN, name)) for name in data["plan"]}
    assert data["cache"] == manifest["targets"]["cpu"]["cache"]
    assert data["device"] == "cpu"
    functions = {entry["key"]: entry for entry in data["functions"]}
    assert len(functions) == len(target.functions)
    decode, fact = functions[DECODE], next(f for f in target.functions if f.entry.key == DECODE)
    assert decode["bucket"] == {"batch": 2, "tokens": 1, "capacity": 16}
    assert decode["inputs"][0] == {"name": "token", "shape": [2], "dtype": "int32"}
    numbers = ("bytes_read", "cache_bytes", "peak_bytes", "file_bytes", "primitives")
    assert [decode[name] for name in numbers] == [
        fact.reads, fact.cache, fact.peak, fact.file_bytes, fact.entry.primitives,
    ]  # fmt: skip
    assert data["memory"]["cpu"]["prepared"] == target.weights


def test_options_exclude_each_other(folder: Path, tmp_path: Path) -> None:
    done = run_here("inspect", folder, "--json", "--html", tmp_path / "page.html")
    assert done.returncode == 2
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("options", [[], ["--json"], ["--html", "page.html"], ["--dot", DECODE]])
def test_damaged_bundles_are_refused(
    copy: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    text = (copy / "manifest.json").read_text("utf-8")
    (copy / "manifest.json").write_text(text.replace('"llama"', '"Llama"', 1), "utf-8")
    with pytest.raises(BundleError, match="damaged"):
        know(copy)
    for bundle, words in ((copy, "damaged"), (copy.parent / "none.funcrt", "")):
        done = run_here("inspect", bundle, *options)
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (copy.parent / "page.html").exists()


def test_missing_files_are_told(copy: Path) -> None:
    (copy / "params.safetensors").unlink()
    (copy / f"functions/cpu/{DECODE}.mlxfn").write_bytes(b"short")
    done = run_here("inspect", copy)
    assert done.returncode == 0
    assert "damaged: params.safetensors is missing" in done.stderr
    assert f"{DECODE}.mlxfn has 5 bytes instead of" in done.stderr
    assert "params.safetensors is missing" in json.loads(
        run_here("inspect", copy, "--json").stdout
    )["damage"]  # fmt: skip


# --- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["prepare", DECODE, "grow_b2_t1_s16", "top_b2_t1_s0"])
def test_a_drawing_has_the_nodes_and_names_of_the_graph(bundle: Bundle, key: str) -> None:
    entry = next(entry for entry in bundle.target.functions if entry.key == key)
    dot = draw(bundle.folder, key)
    assert dot.startswith("digraph {")
    nodes = re.findall(r'label ="([^"]+)"', dot)
    assert sum(node != "Load" for node in nodes) == entry.primitives  # constants are loaded
    names = set(re.findall(r'"([^"]+)"', dot))
    assert {spec.name for spec in (*entry.inputs, *entry.outputs)} <= {n.strip("'") for n in names}
    if entry.state:
        assert {"lengths", "layers.1.keys", "layers.1.keys'"} <= names
    if entry.params == "prepared":
        assert {spec.name for spec in bundle.target.prepared} <= names
    if entry.name == "decode":
        assert {"history", "history'", "tokens"} <= names


def test_the_command_prints_the_drawing(folder: Path) -> None:
    done = run_here("inspect", folder, "--dot", "top_b2_t1_s0")
    assert done.returncode == 0
    assert re.match(r"digraph \{.*\}\n\Z", done.stdout, re.DOTALL)
    unknown = run_here("inspect", folder, "--dot", "decode_b9")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "no function 'decode_b9'; there are prepare, " in unknown.stderr
    assert DECODE in unknown.stderr


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_name_alone_stands_for_the_smallest_shape(
    bundle: Bundle, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    def see(folder: Path, file: str, manifest: Manifest) -> bytes:
        drawn.append(file)
        return read_file(folder, file, manifest)

    monkeypatch.setattr(drawing, "read_file", see)
    entries = [entry for entry in bundle.target.functions if entry.name == name]
    smallest = min(entries, key=lambda entry: entry.bucket or ())
    assert len(entries) > 1
    assert draw(bundle.folder, name).startswith("digraph {")
    assert drawn == [smallest.file]


@pytest.mark.usefixtures("untouched")
def test_damaged_graphs_are_not_drawn(copy: Path, edit: Edit) -> None:
    path = copy / f"functions/cpu/{DECODE}.mlxfn"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BundleError, match=f"{DECODE}.mlxfn is damaged"):
        draw(copy, DECODE)
    path.write_bytes(whole)
    edit(copy, lambda m: edit_target(m, lambda t: replace(t, producer={"mlx": "0.1.0"})))
    with pytest.raises(BundleError, match=re.escape("pip install mlx==0.1.0")):
        draw(copy, DECODE)


@pytest.mark.usefixtures("untouched")
def test_graphs_of_a_gpu_need_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = load_manifest(folder)
    elsewhere = replace(manifest, targets={"cuda": manifest.targets["cpu"]})
    monkeypatch.setattr(drawing, "load_manifest", lambda folder: elsewhere)
    monkeypatch.setattr(mx, "is_available", lambda device: False)
    with pytest.raises(BundleError, match="is a graph for cuda"):
        draw(folder, DECODE)


def test_buckets_are_listed_as_declared(target: TargetFacts) -> None:
    assert {f.bucket for f in target.functions if f.entry.name == "prefill"} == {
        Bucket(2, t, s) for t in PLAN.tokens for s in PLAN.capacity
    }
