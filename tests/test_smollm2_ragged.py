"""SmolLM2, prompts of very different length in one padded batch: each row is what it is alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import funcrt
from funcrt.model import Model

import mlx.core as mx
import pytest

REFERENCE = Path(__file__).parent / "reference" / "smollm2.json"
SHORT = (3, 9, 21, 40, 64, 90)
LONG = (3, 5, 9, 17, 33, 64, 65, 90, 128, 150, 201, 256, 333, 450, 600, 700)
SIDES = ("left", "right", "mixed")
STEPS = 4  # tokens decoded after the prompt
TOLERANCE = 2e-5  # of the largest logit


@pytest.fixture
def model(smollm2_model: Model) -> Model:
    return smollm2_model


def make_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Pieces of real text, each from another place."""
    goldens = json.loads(REFERENCE.read_text("utf-8"))["prompts"].values()
    text = max((golden["prompt_ids"] for golden in goldens), key=len)
    return [[*text[7 * i :], *text][:length] for i, length in enumerate(lengths)]


def make_batch(prompts: list[list[int]], side: str) -> tuple[mx.array, mx.array]:
    """Tokens `[B, T]` and an int16 padding mask; the padding is not zeros."""
    width = max(map(len, prompts))
    tokens, valid = [], []
    for prompt in prompts:
        padding = [11] * (width - len(prompt))
        real, fake = [1] * len(prompt), [0] * len(padding)
        left = side == "left" or (side == "mixed" and len(tokens) % 2)
        tokens.append(padding + prompt if left else prompt + padding)
        valid.append(fake + real if left else real + fake)
    return mx.array(tokens), mx.array(valid, dtype=mx.int16)


def last_real(logits: mx.array, valid: mx.array) -> mx.array:
    """Logits `[B, V]` of each row's last real token."""
    step = mx.arange(valid.shape[1])
    last = mx.max(mx.where(valid != 0, step, 0), axis=1)
    return mx.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]


def run_alone(model: Model, prompts: list[list[int]]) -> tuple[list[mx.array], list[list[int]]]:
    """Each prompt by itself, eager: the logits after it, and the greedy continuation."""
    firsts, continuations = [], []
    for prompt in prompts:
        logits, cache = model([prompt])
        first, tokens = logits[0, -1] + 0, []  # a copy: a view would keep all of them
        mx.eval(first)
        logits = first
        for _ in range(STEPS):
            tokens.append(int(mx.argmax(logits).item()))
            step, cache = model([tokens[-1:]], cache=cache)
            logits = step[0, -1]
        firsts.append(first)
        continuations.append(tokens)
    return firsts, continuations


def check_batch(
    model: Model, prompts: list[list[int]], plan: funcrt.BucketPlan, folder: Path
) -> None:
    """`folder` is of a bundle of the model that has a batch for all prompts."""
    firsts, continuations = run_alone(model, prompts)
    for side in SIDES:
        tokens, valid = make_batch(prompts, side)
        logits, cache = model(tokens, mask=valid)
        rows = last_real(logits, valid)
        for row, first in zip(rows, firsts, strict=True):
            assert mx.max(mx.abs(row - first)).item() <= TOLERANCE * mx.max(mx.abs(first)).item()
        assert cache["lengths"].tolist() == [len(prompt) for prompt in prompts]
        del logits
        made = [[token] for token in mx.argmax(rows, axis=-1).tolist()]
        for _ in range(1, STEPS):
            step, cache = model([row[-1:] for row in made], cache=cache)
            for row, token in zip(made, mx.argmax(step[:, -1], axis=-1).tolist(), strict=True):
                row.append(token)
        assert made == continuations, side

    engine = funcrt.Engine(model, plan)
    compiled = [c.tokens for c in engine.generate(prompts, max_tokens=STEPS)]
    assert compiled == continuations
    assert set(engine.compiled.traces.values()) == {1}

    found = json.loads(run_in_another_process(folder, prompts))
    assert found["engine"] == continuations
    for side in SIDES:
        for values, first in zip(found[side], firsts, strict=True):
            scale = mx.max(mx.abs(first)).item()
            probes = mx.array(PROBES)
            assert mx.max(mx.abs(mx.array(values) - first[probes])).item() <= TOLERANCE * scale


PROBES = [0, 2, 260, 504, 7042, 28, 49151]
IN_ANOTHER_PROCESS = """
import json, sys
import funcrt
import mlx.core as mx
bundle = funcrt.load_bundle(sys.argv[1])
given = json.load(sys.stdin)
found = {"engine": [
    c.tokens for c in funcrt.Engine(bundle).generate(given["prompts"], max_tokens=given["steps"])
]}
for side in given["sides"]:
    tokens, valid = (mx.array(array) for array in given[side])
    logits, cache = bundle(tokens, mask=valid.astype(mx.int16))
    last = mx.max(mx.where(valid != 0, mx.arange(valid.shape[1]), 0), axis=1)
    rows = mx.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]
    found[side] = rows[:, mx.array(given["probes"])].tolist()
print(json.dumps(found))
"""


def run_in_another_process(folder: Path, prompts: list[list[int]]) -> str:
    given = {"prompts": prompts, "steps": STEPS, "probes": PROBES, "sides": SIDES}
    for side in SIDES:
        given[side] = [array.tolist() for array in make_batch(prompts, side)]
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, str(folder)],
        input=json.dumps(given), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_six_prompts_are_what_they_are_alone(model: Model, smollm2_bundle: Path) -> None:
    plan = funcrt.BucketPlan(batch=(6,), tokens=(32,), capacity=(128,))
    check_batch(model, make_prompts(SHORT), plan, smollm2_bundle)


@pytest.mark.long
def test_sixteen_prompts_are_what_they_are_alone(model: Model, tmp_path: Path) -> None:
    plan = funcrt.BucketPlan(batch=(16,), tokens=(64,), capacity=(1024,))
    folder = tmp_path / "sixteen.funcrt"
    funcrt.export(model, folder, plan)
    check_batch(model, make_prompts(LONG), plan, folder)
