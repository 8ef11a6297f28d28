"""A real trained model against an independent PyTorch run of the same weights (float32)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import funcrt
from funcrt.cli import demo
from funcrt.model import Model
from tests.perplexity import check_perplexity

import mlx.core as mx
import pytest

REFERENCE = json.loads((Path(__file__).parent / "reference" / "smollm2.json").read_text("utf-8"))
GOLDEN: dict[str, dict[str, Any]] = REFERENCE["prompts"]
LOGIT_TOLERANCE = 2e-3  # of logits around 20
LONGEST = max(len(golden["prompt_ids"]) for golden in GOLDEN.values())
DEMO_PLAN = demo.PLAN
PLAN = funcrt.BucketPlan(batch=(1, 4), tokens=(64,), capacity=(1024,))


@pytest.fixture
def model(smollm2_model: Model) -> Model:
    return smollm2_model


@pytest.fixture
def bundle(smollm2_bundle: Path) -> Path:
    return smollm2_bundle


def check_logits(logits: mx.array, golden: dict[str, Any]) -> None:
    """`logits [V]` after the prompt: the reference's five likeliest tokens and their values."""
    for token, text, expected in golden["top5_first"]:
        assert abs(logits[token].item() - expected) <= LOGIT_TOLERANCE, text
    top = mx.argsort(-logits)[:5].tolist()
    assert top == [token for token, _, _ in golden["top5_first"]]


def test_the_golden_file_has_short_and_long_prompts() -> None:
    assert len(GOLDEN) == 4
    assert LONGEST >= 500


@pytest.mark.parametrize("name", GOLDEN)
def test_eager_continues_as_the_reference(model: Model, name: str) -> None:
    golden = GOLDEN[name]
    logits, cache = model([golden["prompt_ids"]])
    check_logits(logits[0, -1], golden)
    tokens = [int(mx.argmax(logits[0, -1]).item())]
    while len(tokens) < len(golden["greedy_ids"]):
        logits, cache = model([tokens[-1:]], cache=cache)
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
    assert tokens == golden["greedy_ids"]
    assert cache["lengths"].tolist() == [len(golden["prompt_ids"]) + len(tokens) - 1]


def test_perplexity_of_the_text_is_that_of_the_reference(model: Model) -> None:
    """Allowed 0.1 %; found 1.4e-7."""
    check_perplexity(model, REFERENCE["text"])


def test_compiled_batch_continues_as_the_reference(model: Model) -> None:
    """All prompts in one batch of ragged rows, the long one in chunks; rows end one by one."""
    compiled = model.compiled(PLAN)
    state = compiled.init_cache(4, 1024)
    last: dict[str, mx.array] = {}
    for start in range(0, LONGEST, 64):
        pieces = [golden["prompt_ids"][start : start + 64] for golden in GOLDEN.values()]
        tokens = mx.array([piece + [0] * (64 - len(piece)) for piece in pieces], dtype=mx.int32)
        valid = mx.arange(64) < mx.array([len(piece) for piece in pieces])[:, None]
        logits, state = compiled.prefill(tokens, valid, state)
        last |= {
            name: logits[row]
            for row, (name, piece) in enumerate(zip(GOLDEN, pieces, strict=True))
            if piece
        }
        mx.eval(last, state)
    for name, golden in GOLDEN.items():
        check_logits(last[name], golden)

    goldens = [golden["greedy_ids"] for golden in GOLDEN.values()]
    made = [[int(mx.argmax(logits).item())] for logits in last.values()]
    for step in range(1, max(map(len, goldens))):
        token = mx.array([row[-1] for row in made], dtype=mx.int32)
        going = [step < len(golden) for golden in goldens]
        (token, _, finite, *_), state = compiled.decode_greedy(token, mx.array(going), state)
        assert all(finite.tolist())
        for row, goes, new in zip(made, going, token.tolist(), strict=True):
            row += [new] if goes else []
    assert made == goldens
    assert dict(compiled.traces) == {"prefill_b4_t64_s1024": 1, "decode_greedy_b4_t1_s1024": 1}


IN_ANOTHER_PROCESS = """
import json, sys
import funcrt
bundle = funcrt.load_bundle(sys.argv[1])
goldens = json.load(sys.stdin)
engine = funcrt.Engine(bundle)
found = []
for golden in goldens:
    logits, _ = bundle([golden["prompt_ids"]])
    found.append([logits[0, -1, token].item() for token, _, _ in golden["top5_first"]])
completions = engine.generate(
    [golden["prompt_ids"] for golden in goldens],
    max_tokens=[len(golden["greedy_ids"]) for golden in goldens],
)
foreign = {"transformers", "converters", "funcrt.models", "funcrt.model"} & set(sys.modules)
print(json.dumps({
    "tokens": [completion.tokens for completion in completions],
    "top5": found,
    "traces": dict(engine.compiled.traces),
    "foreign": sorted(foreign),
}))
"""


def test_a_bundle_in_another_process_continues_as_the_reference(bundle: Path) -> None:
    goldens = list(GOLDEN.values())
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, str(bundle)],
        input=json.dumps(goldens), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["foreign"] == []
    assert found["tokens"] == [golden["greedy_ids"] for golden in goldens]
    for values, golden in zip(found["top5"], goldens, strict=True):
        expected = [value for _, _, value in golden["top5_first"]]
        assert max(abs(a - b) for a, b in zip(values, expected, strict=True)) <= LOGIT_TOLERANCE
    assert set(found["traces"].values()) == {1}


def test_text_prompts_and_stop_strings(model: Model) -> None:
    engine = funcrt.Engine(model, PLAN)
    (name, golden), *_ = GOLDEN.items()
    whole = engine.generate([name], max_tokens=30)[0]
    assert whole.tokens == golden["greedy_ids"]
    assert whole.finish_reason == "stop"  # its last token ends the text
    assert name + whole.text + "<|im_end|>" == golden["text"]
    pieces = list(engine.stream([name], max_tokens=30))
    assert "".join(piece.text for piece in pieces) == whole.text
    cut = engine.generate([name], max_tokens=30, stop="answer is")[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index("answer is")]


@pytest.mark.long
def test_every_bucket_of_the_demo_is_bitwise_its_rows_alone(model: Model, tmp_path: Path) -> None:
    """Imported functions: padding on every side, an idle row and poisoned slots change nothing."""
    bundle = funcrt.export(model, tmp_path / "demo.funcrt", DEMO_PLAN)
    goldens = [golden["prompt_ids"] for golden in GOLDEN.values()]
    for capacity in DEMO_PLAN.capacity:
        rows = [(goldens[3] + goldens[2])[:n] for n in (40, 17, 64)]
        alone = []
        for row in rows:  # the same bucket, the other rows idle
            tokens = mx.array([row + [0] * (64 - len(row)), *[[0] * 64] * 3], dtype=mx.int32)
            valid = mx.arange(64) < mx.array([len(row), 0, 0, 0])[:, None]
            state = bundle.init_cache(4, capacity)
            alone.append(bundle.functions.prefill(tokens, valid, state)[0][0])
        patterns = [
            [i >= 64 - len(rows[0]) for i in range(64)],
            [i % 3 == 1 and i // 3 < len(rows[1]) for i in range(64)],
            [True] * 64,
            [False] * 64,
        ]
        filled = [iter(row) for row in rows]
        tokens = mx.array(
            [[next(f) if real else 7 for real in p] for f, p in zip(filled, patterns, strict=False)]
            + [[7] * 64],
            dtype=mx.int32,
        )
        state = bundle.init_cache(4, capacity)
        poisoned = {k: v if k == "lengths" else v + 1e4 for k, v in state.items()}
        logits, after = bundle.functions.prefill(tokens, mx.array(patterns), poisoned)
        assert after["lengths"].tolist() == [40, 17, 64, 0]
        for row, expected in enumerate(alone):
            assert mx.array_equal(logits[row], expected)
        token = mx.argmax(logits, axis=-1).astype(mx.int32)
        active = mx.array([True, False, True, False])
        *_, after = bundle.functions.decode_greedy(token, active, after)
        assert after["lengths"].tolist() == [41, 17, 65, 0]
