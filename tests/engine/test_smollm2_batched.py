"""SmolLM2 under load: every completion is what its prompt gets alone, in float32, no exceptions."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import converters
from converters import smollm2
from funcrt import BucketPlan, Engine
from funcrt.bundle import export
from funcrt.compiled import Compiled
from funcrt.model import Model
from tests.engine.harness import DirectEngine, check_traces

import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests" / "reference" / "smollm2.json"
SHORT = (3, 5, 8, 11, 14, 17, 21, 25, 28, 32, 36, 40)
SHORT_PLAN = BucketPlan(batch=(1, 4), tokens=(4, 16), capacity=64)
PLAN = BucketPlan(batch=(1, 4, 16), tokens=(4, 16, 64), capacity=(64, 256, 768))
# Every function of a bundle is checked when it is exported: few shapes.
BUNDLE_PLAN = BucketPlan(batch=(1, 16), tokens=(8, 64), capacity=768)
NEW_SHORT, NEW = 12, 24


@pytest.fixture(scope="module")
def model() -> Model:
    return converters.load(smollm2.fetch())


def make_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Pieces of real text, each from another place; the engine may find common beginnings."""
    goldens = json.loads(REFERENCE.read_text("utf-8"))["prompts"].values()
    texts = sorted((golden["prompt_ids"] for golden in goldens), key=len)
    text = [token for ids in reversed(texts) for token in ids]
    return [([*text[13 * i :], *text] * 3)[:length] for i, length in enumerate(lengths)]


class Solo:
    """Greedy completions of one row, without any engine: compiled prefill, then decode."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled

    def complete(self, prompt: Sequence[int], count: int) -> list[int]:
        compiled, sizes = self._compiled, self._compiled.plan.tokens
        capacity = compiled.plan.choose_capacity(len(prompt) + count)
        state, done = compiled.init_cache(1, capacity), 0
        while done < len(prompt):
            width = max((t for t in sizes if t <= len(prompt) - done), default=sizes[0])
            chunk = list(prompt[done : done + width])
            ids = mx.array([[*chunk, *[0] * (width - len(chunk))]], dtype=mx.int32)
            logits, state = compiled.prefill(ids, mx.arange(width)[None] < len(chunk), state)
            mx.eval(logits, state)
            done += len(chunk)
        tokens = [int(mx.argmax(logits[0]).item())]
        while len(tokens) < count and tokens[-1] not in ENDS:
            sampled, state = compiled.decode_greedy(
                mx.array(tokens[-1:], dtype=mx.int32), mx.array([True]), state
            )
            mx.eval(sampled.tokens, state)
            tokens.append(int(sampled.tokens.item()))
        return tokens


ENDS = (2,)  # <|im_end|>


def test_twelve_short_prompts_arriving_one_by_one(model):
    """Three rounds apart: some are decoded while others come, more than there are rows."""
    assert tuple(model.eos_token_ids) == ENDS
    prompts = make_prompts(SHORT)
    arrivals = random.Random(4)
    order = arrivals.sample(range(12), 12)
    engine = DirectEngine(model, SHORT_PLAN)
    handles: dict[int, Any] = {}
    while len(handles) < 12 or engine.busy:
        if len(handles) < 12 and arrivals.random() < 0.4:
            index = order[len(handles)]
            handles[index] = engine.submit(prompts[index], max_tokens=NEW_SHORT)
        if engine.busy:
            engine.round()
    engine.check_idle()
    check_traces(engine.compiled)
    assert max(report.rows for report in engine.reports) == 4
    solo = Solo(engine.compiled)
    for index, handle in handles.items():
        assert handle.result(0).tokens == solo.complete(prompts[index], NEW_SHORT), index


# --- long -----------------------------------------------------------------------------------------

SERVE = """
import json, random, sys, time
from funcrt import Engine
from funcrt.bundle import load_bundle
wishes = json.load(sys.stdin)
random.seed(2)
with Engine(load_bundle(sys.argv[1])) as engine:
    handles = []
    for prompt in wishes["prompts"]:
        handles.append(engine.submit(prompt, max_tokens=wishes["new"]))
        time.sleep(random.expovariate(10.0))
    tokens = [handle.result().tokens for handle in handles]
    traces = engine.compiled.traces
    assert set(traces.values()) == {1}, traces
    assert not {"converters", "funcrt.models", "funcrt.model"} & sys.modules.keys()
    json.dump({"tokens": tokens, "batch": engine.stats.row_places}, sys.stdout)
"""


def make_lengths() -> list[int]:
    """64 lengths from 3 to 700, most of them short, in no order."""
    lengths = [3, 700, *(round(3 * 233 ** ((i + 1) / 63)) for i in range(62))]
    random.Random(1).shuffle(lengths)
    return lengths


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    solo = Solo(model.compiled(BucketPlan(batch=1, tokens=PLAN.tokens, capacity=PLAN.capacity)))
    return [solo.complete(prompt, NEW) for prompt in make_prompts(make_lengths())]


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("smollm2") / "smollm2.funcrt"
    export(model, made, BUNDLE_PLAN)
    return made


@pytest.mark.long
def test_64_prompts_at_random_times(model, expected):
    lengths, pauses = make_lengths(), random.Random(3)
    assert (len(lengths), min(lengths), max(lengths)) == (64, 3, 700)
    most = 0

    def watch(report: Any) -> None:
        nonlocal most
        most = max(most, report.rows)

    with Engine(model, PLAN, on_step=watch) as engine:
        handles = []
        for prompt in make_prompts(lengths):
            handles.append(engine.submit(prompt, max_tokens=NEW))
            time.sleep(pauses.expovariate(10.0))
        tokens = [handle.result(600).tokens for handle in handles]
        check_traces(engine.compiled)
    assert most == 16
    wrong = [i for i, found in enumerate(tokens) if found != expected[i]]
    assert wrong == []


@pytest.mark.long
@pytest.mark.parametrize("speculate", ["ngram"])
def test_64_prompts_with_guesses(model, expected, speculate):
    with Engine(model, PLAN, speculate=speculate) as engine:
        done = engine.generate(make_prompts(make_lengths()), max_tokens=NEW)
        assert engine.stats.accepted_tokens > 0
    assert [i for i, c in enumerate(done) if c.tokens != expected[i]] == []


@pytest.mark.long
def test_64_prompts_from_a_bundle_in_another_process(folder, expected):
    wishes = {"prompts": make_prompts(make_lengths()), "new": NEW}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(folder)],
        input=json.dumps(wishes), capture_output=True, text=True, timeout=1200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens = json.loads(done.stdout)["tokens"]
    assert [i for i, found in enumerate(tokens) if found != expected[i]] == []
