"""The C++ host: the same functions and BLAS without Python, so the same bits."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path

from funcrt import blas
from funcrt.bundle import Bundle, load_bundle, verify
from funcrt.storage import save_arrays
from tests.helpers import make_model, make_params, random_tokens, to_numpy
from tests.hosts.conftest import make_bundle
from tests.hosts.cpp_host import ask, build, follow, start
from tests.hosts.python_host import listed, rewrite, sign

import mlx.core as mx
import numpy as np
import pytest

LONG, SHORT = random_tokens(11), random_tokens(3)
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 7}
PENALIZED = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.4}


def flags(options: dict[str, float]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


@pytest.fixture(scope="module", autouse=True)
def program() -> Path:
    return build("funcrt_run", "sha256")


@pytest.fixture(scope="module")
def bundle(plain: Path) -> Bundle:
    return load_bundle(plain)


@pytest.fixture
def logits(tmp_path: Path) -> Path:
    return tmp_path / "last logits"


@pytest.mark.parametrize(
    "options", [{}, SAMPLED, PENALIZED, SAMPLED | PENALIZED],
    ids=["greedy", "sampled", "penalized", "both"],
)  # fmt: skip
@pytest.mark.parametrize("prompts", [[LONG], [SHORT], [LONG, SHORT]], ids=["long", "short", "two"])
def test_ids_and_logits_are_those_of_python_bit_for_bit(plain, bundle, logits, prompts, options):
    most = 12 if LONG in prompts else 16  # past the smaller capacity
    expected, last = follow(bundle, prompts, most, **options)
    rows, found = ask(plain, prompts, logits, "--max-tokens", str(most), *flags(options))
    assert rows == expected
    assert found.dtype == last.dtype
    np.testing.assert_array_equal(to_numpy(found), to_numpy(last))


def test_a_row_does_not_depend_on_its_neighbours(plain, logits):
    first, second = LONG[:5], LONG[3:]  # both in chunks of 8, both in the smaller capacity
    options = ["--max-tokens=7", *flags(SAMPLED)]
    together, last = ask(plain, [first, second, second], logits, *options)
    alone, own = ask(plain, [first], logits, *options)
    assert together[0] == alone[0]
    np.testing.assert_array_equal(to_numpy(last)[:1], to_numpy(own))
    assert together[1] == together[2]  # of another group: the batch has two rows


def test_the_first_chunk_looks_at_no_slots(long_calls, without_prefill, logits):
    prompts = [random_tokens(35, 1), random_tokens(3, 2)]  # the longer one in two chunks
    expected, last = follow(load_bundle(long_calls), prompts, 5)
    rows, found = ask(without_prefill, prompts, logits, "--max-tokens=5")
    assert rows == expected
    np.testing.assert_array_equal(to_numpy(found), to_numpy(last))


def test_texts_end_where_the_largest_capacity_is_full(plain, logits):
    rows, _ = ask(plain, [LONG, SHORT], logits, "--max-tokens=1000")
    assert [len(row) for row in rows] == [32 - len(LONG), 32 - len(SHORT)]


def test_texts_end_with_an_id_that_ends_them(copy, logits):
    (text,), _ = ask(copy, [SHORT], logits, "--max-tokens=9")
    ends = [text[4], 95]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), "utf-8")
    sign(copy)
    rows, _ = ask(copy, [SHORT, LONG], logits, "--max-tokens=9")
    assert rows[0] == text[: text.index(text[4]) + 1]
    assert len(rows[1]) > len(rows[0])


def test_ids_appear_one_by_one(plain):
    done = start(plain, "--prompt-ids", listed(SHORT), "--max-tokens=5")
    assert re.fullmatch(r"\d+( \d+){4}\n", done.stdout)


def test_other_weights_in_place_of_the_bundles(plain, copy, tmp_path, logits):
    other = make_params(make_model().config, seed=1)
    expected, last = follow(load_bundle(plain).with_params(other), [LONG], 3)
    (copy / "params.safetensors").unlink()
    rewrite(copy, '"files": [\n      "params.safetensors"\n    ]', '"files": []')
    sign(copy)
    halves = [dict(list(other.items())[half::2]) for half in range(2)]
    files = [tmp_path / f"half {half}.safetensors" for half in range(2)]
    for file, half in zip(files, halves, strict=True):
        save_arrays(file, half)
    params = [word for file in files for word in ("--params", str(file))]
    for folder in (plain, copy):
        rows, found = ask(folder, [LONG], logits, "--max-tokens=3", *params)
        assert rows == expected
        np.testing.assert_array_equal(to_numpy(found), to_numpy(last))
    done = start(copy, "--prompt-ids", "1", *params[:2])
    assert done.returncode == 1
    assert "the weights have no" in done.stderr
    assert "holds no weights" in start(copy, "--prompt-ids", "1").stderr


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_verify_measures_what_python_measures(kind, copy, tmp_path):
    folder = copy if kind == "float32" else make_bundle(tmp_path / "tiny.funcrt", kind)
    golden = ("error", "tokens", "lengths", "accepted", "history", "moved")
    expected = []
    for check in verify(folder):
        if check.check in golden:
            numbers = f"{check.measured:.3g} (at most {check.allowed:.3g})"
            expected.append(
                f"ok     {check.function} {check.check} {numbers} {check.note}".rstrip()
            )
    done = start(folder, "--verify")
    worst = {}  # a function that is called twice has two lines of each check
    for line in done.stdout.splitlines():
        _, function, check, measured, *_ = line.split()
        if float(measured) > float(worst.setdefault((function, check), line).split()[3]):
            worst[function, check] = line
    assert list(worst.values()) == expected
    assert done.returncode == 0
    assert {line.split()[2] for line in expected} == set(golden)


@pytest.mark.parametrize(
    ("array", "check"),
    [("0.0.reference", "error"), ("0.0.expected_tokens", "tokens"),
     ("0.0.expected_lengths", "lengths"), ("prepare.reference", "error")],
)  # fmt: skip
def test_verify_fails_on_other_golden_values(array, check, copy):
    arrays = mx.load(str(copy / "golden" / "cpu.safetensors"))
    changed = arrays[array] + 1
    save_arrays(copy / "golden" / "cpu.safetensors", {**arrays, array: changed})
    sign(copy)
    done = start(copy, "--verify")
    failed = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert failed == [check]
    assert done.returncode == 1


def test_it_says_what_it_runs_on(plain):
    done = start(plain, "--info")
    lines = done.stdout.splitlines()
    assert lines[:3] == [f"BLAS {blas.describe()}", f"MLX {mx.__version__}", "device class cpu"]
    assert done.stderr == lines[0] + "\n"
    inputs = "token int32 [2], active bool [2], state"
    outputs = (
        "tokens int32 [2], logprobs float32 [2], finite bool [2], logits float32 [2,96], state"
    )
    assert f"decode_greedy_b2_t1_s16: {inputs} -> {outputs}" in lines


@pytest.mark.skipif(
    blas.load().source in ("builtin", "not needed"), reason="there is no other BLAS than MLX's"
)
def test_the_blas_can_be_chosen(plain, logits, monkeypatch):
    usual, last = ask(plain, [LONG], logits, "--max-tokens=4")
    monkeypatch.setenv("FUNCRT_BLAS", "none")
    slow, other = ask(plain, [LONG], logits, "--max-tokens=4")
    assert slow == usual
    assert not mx.array_equal(other, last)  # it rounds in another way
    done = start(plain, "--info")
    assert "BLAS reference BLAS (builtin)" in done.stdout
    assert "warning: MLX computes with the reference BLAS" in done.stderr
    missing = start(plain, "--info", FUNCRT_BLAS="/nonexistent.so")
    assert missing.returncode == 1
    assert missing.stderr.startswith("funcrt_run: FUNCRT_BLAS=/nonexistent.so: no such file")


def test_hashes_are_those_of_hashlib(program):
    data = np.random.default_rng(0).bytes(1 << 16)
    sizes = [0, 1, 54, 55, 56, 57, 63, 64, 65, 119, 120, 128, 1000, len(data)]
    for size, piece in [(size, piece) for size in sizes for piece in (7, 64, 1 << 20)]:
        done = subprocess.run(
            [program / "sha256", str(piece)], input=data[:size], capture_output=True, check=True
        )
        assert done.stdout.decode().strip() == hashlib.sha256(data[:size]).hexdigest()
