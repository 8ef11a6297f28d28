"""SmolLM2 under load: every completion is what its prompt gets alone, in float32, no exceptions."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from funcrt import BucketPlan, Engine
from funcrt.bundle import export
from funcrt.compiled import Compiled
from funcrt.model import Model
from tests.engine.arrivals import serve
from tests.engine.harness import check_traces

import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests" / "reference" / "smollm2.json"
SHORT = (3, 5, 8, 11, 14, 17, 21, 25, 28, 32, 36, 40)
SHORT_PLAN = BucketPlan(batch=(1, 4, 16), tokens=(4, 16), capacity=64)
PLAN = BucketPlan(batch=(1, 4, 16), tokens=(4, 16, 64), capacity=(64, 256, 768))
# Every function of a bundle is checked when it is exported: few shapes.
BUNDLE_PLAN = BucketPlan(batch=(1, 16), tokens=(8, 64), capacity=768)
NEW = 24


@pytest.fixture
def model(smollm2_model: Model) -> Model:
    return smollm2_model


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
        capacity = compiled.plan.choose_capacity(len(prompt) + count - 1)  # the last is not put in
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


@pytest.fixture(scope="module")
def expected_short(smollm2_model: Model) -> list[list[int]]:
    assert tuple(smollm2_model.eos_token_ids) == ENDS
    solo = Solo(smollm2_model.compiled(SHORT_PLAN))
    return [solo.complete(prompt, NEW) for prompt in make_prompts(SHORT)]


def make_pauses(count: int, seed: int, longest: int) -> list[int]:
    """How many calls of the model lie between one prompt and the next."""
    chosen = random.Random(seed)
    return [chosen.randint(0, longest) for _ in range(count)]


def test_twelve_short_prompts_arriving_one_by_one(model, expected_short):
    """Some are decoded while others come, until nearly all of them are in one batch."""
    pauses = make_pauses(12, 4, 2)
    served = serve(model, SHORT_PLAN, make_prompts(SHORT), pauses, NEW)
    check_traces(served.compiled)
    steps = [report for report in served.reports if report.function == "decode"]
    assert {report.bucket.batch for report in steps} == {1, 4, 16}
    assert max(report.rows for report in steps) >= 9
    assert served.tokens == expected_short


# It imports neither converters nor model code, only the schedule that the tests share.
SERVE = """
import json, sys
from funcrt.bundle import load_bundle
from tests.engine.arrivals import serve
wishes = json.load(sys.stdin)
served = serve(load_bundle(sys.argv[1]), None, wishes["prompts"], wishes["pauses"], wishes["new"])
assert set(served.compiled.traces.values()) == {1}, served.compiled.traces
assert not {"converters", "funcrt.models", "funcrt.model"} & sys.modules.keys()
most = max(report.rows for report in served.reports)
json.dump({"tokens": served.tokens, "most": most}, sys.stdout)
"""


def serve_elsewhere(
    folder: Path, prompts: list[list[int]], pauses: list[int]
) -> tuple[list[list[int]], int]:
    """New tokens from a bundle in another process, and the most rows of a call."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(folder)],
        input=json.dumps({"prompts": prompts, "pauses": pauses, "new": NEW}),
        capture_output=True, text=True, timeout=1500, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["tokens"], found["most"]


def test_twelve_short_prompts_from_a_bundle_in_another_process(smollm2_bundle, expected_short):
    """More prompts than the bundle has rows."""
    found, most = serve_elsewhere(smollm2_bundle, make_prompts(SHORT), make_pauses(12, 4, 3))
    assert most == 6
    assert found == expected_short


# --- long -----------------------------------------------------------------------------------------


def make_lengths() -> list[int]:
    """64 lengths from 3 to 700, most of them short; the shortest come first, to be many at once."""
    lengths = [3, 700, *(round(3 * 233 ** ((i + 1) / 63)) for i in range(62))]
    lengths.sort()
    chosen = random.Random(1)
    first = chosen.sample(lengths[:24], 24)
    for length in first:
        lengths.remove(length)
    chosen.shuffle(lengths)
    return first + lengths


@pytest.fixture(scope="module")
def expected(smollm2_model: Model) -> list[list[int]]:
    plan = BucketPlan(batch=1, tokens=PLAN.tokens, capacity=PLAN.capacity)
    solo = Solo(smollm2_model.compiled(plan))
    return [solo.complete(prompt, NEW) for prompt in make_prompts(make_lengths())]


@pytest.fixture(scope="module")
def folder(smollm2_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smollm2_16") / "smollm2.funcrt"
    export(smollm2_model, made, BUNDLE_PLAN)
    return made


@pytest.mark.long
def test_64_prompts_at_random_times(model, expected):
    lengths = make_lengths()
    assert (len(lengths), min(lengths), max(lengths)) == (64, 3, 700)
    served = serve(model, PLAN, make_prompts(lengths), make_pauses(64, 3, 1), NEW)
    check_traces(served.compiled)
    assert max(report.rows for report in served.reports) == 16
    wrong = [i for i, found in enumerate(served.tokens) if found != expected[i]]
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
    prompts = make_prompts(make_lengths())
    tokens, most = serve_elsewhere(folder, prompts, make_pauses(64, 3, 1))
    assert most == 16
    assert [i for i, found in enumerate(tokens) if found != expected[i]] == []
