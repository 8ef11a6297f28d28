"""A tiny mistral against the logits of transformers: the sliding window, full caches and rings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import converters
from funcrt import BucketPlan, Engine, Model
from funcrt.errors import ConfigError
from funcrt.models import read_config
from tests.helpers import run_in_pieces
from tests.reference.golden import FAMILIES, family_folder, read_family_golden

import mlx.core as mx
import pytest

TOLERANCE = 2e-5
BLINDNESS = 100 * TOLERANCE
NAMES = ["mistral", "mistral-new", "mistral-window"]
DEFAULTS: dict[str, Any] = json.loads((FAMILIES / "defaults.json").read_text())["mistral"]


@pytest.fixture
def models() -> dict[str, Model]:
    return {name: converters.load(family_folder(name), dtype="float32") for name in NAMES}


def published(name: str) -> dict[str, Any]:
    return json.loads((family_folder(name) / "config.json").read_text())


def run(
    model: Model,
    name: str,
    sizes: Sequence[int] = (540,),
    max_tokens: int | None = None,
    capacity: int = 541,
) -> mx.array:
    """Logits `[T, V]` of the prompt fed in calls of these sizes."""
    state = model.init_cache(1, capacity, max_tokens=max_tokens)
    return run_in_pieces(model, read_family_golden(name).tokens, sizes, state)


def difference(logits: mx.array, name: str) -> float:
    golden = read_family_golden(name)
    got = logits[golden.positions]
    return (mx.abs(got - golden.logits).max() / mx.abs(golden.logits).max()).item()


def assert_golden(logits: mx.array, name: str) -> None:
    assert difference(logits, name) <= TOLERANCE
    assert mx.array_equal(mx.argmax(logits, axis=-1), read_family_golden(name).argmax)


@pytest.mark.parametrize("name", NAMES)
def test_whole_prompt(models, name):
    assert_golden(run(models[name], name), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_tokens", [None, 256, 200], ids=lambda m: f"ring{m}")
def test_prompt_in_pieces(models, name, max_tokens):
    """A ring of 24 + 200 - 1 slots wraps twice; without a window `max_tokens` changes nothing."""
    sizes = [200, 24, 7, 150, 151, *[1] * 8]
    assert_golden(run(models[name], name, sizes, max_tokens, capacity=600), name)


def test_ring_of_single_tokens(models):
    """The smallest ring has as many slots as the window, and wraps 21 times."""
    state = models["mistral-window"].init_cache(1, 541, max_tokens=1)
    assert state["layers.0.ring_keys"].shape == (1, 2, 24 + 1, 16)
    assert_golden(
        run(models["mistral-window"], "mistral-window", [1] * 540, max_tokens=1), "mistral-window"
    )


def test_whole_prompt_through_a_ring(models):
    assert_golden(run(models["mistral-window"], "mistral-window", max_tokens=540), "mistral-window")


def test_engine_continues_through_a_ring_as_alone_with_a_full_cache(models):
    """The plan makes rings; prompts longer and shorter than the window, more of them than rows."""
    model = models["mistral-window"]
    tokens = read_family_golden("mistral-window").tokens[0].tolist()
    prompts = [tokens[:90], tokens[100:107], tokens[200:245], tokens[3:4]]
    engine = Engine(model, BucketPlan(batch=2, tokens=16, capacity=256))
    assert "layers.1.ring_keys" in engine.compiled.init_cache(2, 256)
    lengths = [50, 90, 60, 80]
    for completion, prompt, count in zip(
        engine.generate(prompts, max_tokens=lengths), prompts, lengths, strict=True
    ):
        assert completion.finish_reason == "length"
        text = [*prompt, *completion.tokens]
        state = model.init_cache(1, 256)
        assert "layers.1.keys" in state
        logits, _ = model(mx.array([text]), cache=state)
        greedy = mx.argmax(logits[0, len(prompt) - 1 : -1], axis=-1)
        assert greedy.tolist() == completion.tokens
        assert len(completion.tokens) == count


# --- the golden files are not blind --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral-window", {"sliding_window": None}),
        ("mistral-window", {"sliding_window": 23}),
        ("mistral-window", {"sliding_window": 25}),
        ("mistral-window", {"theta": 10000.0}),
        ("mistral", {"sliding_window": 24}),
        ("mistral", {"sliding_window": 128}),
        ("mistral", {"theta": 10000.0}),
    ],
    ids=str,
)
def test_golden_sees(models, name, changes):
    config = models[name].config
    if "theta" in changes:
        config = replace(config, rope=replace(config.rope, theta=changes["theta"]))
    else:
        config = replace(config, **changes)
    changed = run(Model(config, models[name].params), name)
    assert difference(changed, name) >= BLINDNESS


# --- config.json ----------------------------------------------------------------------------------


def test_what_a_config_leaves_out_is_filled_in_as_transformers_does():
    filled = DEFAULTS["filled"]
    config = read_config(DEFAULTS["config"])
    assert config.sliding_window == filled["sliding_window"] == 4096
    assert config.num_kv_heads == filled["num_key_value_heads"] == 8
    assert config.head_dim == filled["head_dim"]
    assert config.max_positions == filled["max_position_embeddings"]
    assert config.norm_eps == filled["rms_norm_eps"]
    assert config.hidden_act == filled["hidden_act"]
    assert config.tie_word_embeddings == filled["tie_word_embeddings"]
    assert config.rope.theta == filled["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("name", NAMES)
def test_config_is_written_so_that_it_reads_the_same(models, name, tmp_path):
    written = models[name].config.to_hf()
    assert written["sliding_window"] == published(name)["sliding_window"]
    assert written["architectures"] == ["MistralForCausalLM"]
    assert read_config(written) == models[name].config
    models[name].save(tmp_path / "again")
    again = converters.load(tmp_path / "again", dtype="float32")
    assert again.config == models[name].config


@pytest.mark.parametrize("window", [0, -1, 2.5, True, "4096"])
def test_windows_that_are_no_size_are_refused(window):
    with pytest.raises(ConfigError, match="sliding_window"):
        read_config({**published("mistral-window"), "sliding_window": window})


def test_layers_of_two_kinds_are_refused():
    with pytest.raises(ConfigError, match="layer_types"):
        read_config({**published("mistral-window"), "layer_types": ["full_attention"] * 2})
