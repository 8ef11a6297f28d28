"""Tiny llama models against the logits of transformers (tests/reference/README.md).

One golden per head layout, spelling, bias, activation and rope scaling; and for each of these a
proof that its golden would notice the feature missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import converters
from funcrt import Model, ModelConfig
from tests.helpers import run_in_pieces
from tests.reference.golden import CASES, Golden, make_folder, read_golden

import mlx.core as mx
import pytest

TOLERANCE = 2e-5
BLINDNESS = 100 * TOLERANCE
DYNAMIC = [name for name in CASES if name.startswith("dynamic")]
Params = dict[str, mx.array]


def run(model: Model, tokens: mx.array, sizes: Sequence[int], capacity: int) -> mx.array:
    """Logits `[T, V]` of the prompt fed in calls of these sizes, eager and uncompiled."""
    return run_in_pieces(model, tokens, sizes, model.init_cache(1, capacity))


def run_whole(model: Model, golden: Golden) -> mx.array:
    length = golden.tokens.shape[1]
    return run(model, golden.tokens, [length], length + 1)


def difference(logits: mx.array, golden: Golden, expected: mx.array | None = None) -> float:
    """Largest difference at the golden positions, as a share of the largest logit."""
    expected = golden.logits if expected is None else expected
    return (mx.abs(logits[golden.positions] - expected).max() / mx.abs(expected).max()).item()


@pytest.fixture(params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, tmp_path: Path) -> Model:
    return converters.load(make_folder(name, tmp_path / "model"), dtype="float32")


def test_whole_prompt(model: Model, name: str) -> None:
    golden = read_golden(name)
    logits = run_whole(model, golden)
    assert difference(logits, golden) <= TOLERANCE
    assert mx.array_equal(mx.argmax(logits, axis=-1), golden.argmax)


def test_prompt_in_pieces(model: Model, name: str) -> None:
    golden = read_golden(name)
    if golden.chunks is None:
        sizes, expected = [256, 200, 76, *[1] * 8], golden.logits
    else:
        sizes, expected = golden.chunks.tolist(), golden.chunked_logits
    logits = run(model, golden.tokens, sizes, capacity=600)
    assert difference(logits, golden, expected) <= TOLERANCE
    if golden.chunks is None:
        assert mx.array_equal(mx.argmax(logits, axis=-1), golden.argmax)


def test_only_dynamic_scaling_depends_on_the_pieces() -> None:
    depends = [name for name in CASES if read_golden(name).chunks is not None]
    assert depends == DYNAMIC


def test_saved_and_loaded_again(model: Model, name: str, tmp_path: Path) -> None:
    model.save(tmp_path / "again")
    again = converters.load(tmp_path / "again", dtype="float32")
    assert again.config == model.config
    assert all(mx.array_equal(array, again.params[key]) for key, array in model.params.items())


def test_both_spellings_are_the_same_config(name: str) -> None:
    config = dict(CASES[name]["config"])
    read = ModelConfig.from_hf(config)
    if "rope_parameters" in config:
        scaling = dict(config.pop("rope_parameters"))
        other = {**config, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    else:
        scaling = config.pop("rope_scaling") or {"rope_type": "default"}
        other = {**config, "rope_parameters": {"rope_theta": config.pop("rope_theta"), **scaling}}
        del other["rope_theta"]
    assert ModelConfig.from_hf(other) == read


# --- no golden is blind to its feature -----------------------------------------------------------

Change = Callable[[ModelConfig, Params], tuple[ModelConfig, Params]]


def set_rope(**changes: object) -> Change:
    return lambda config, params: (
        replace(config, rope=replace(config.rope, **changes)),
        params,
    )


def set_config(**changes: object) -> Change:
    return lambda config, params: (replace(config, **changes), params)


def fill(ending: str, value: float) -> Change:
    """Overwrite every tensor with this ending, of which there must be some."""

    def change(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        assert any(key.endswith(ending) for key in params)
        return config, {
            key: mx.full(array.shape, value, array.dtype) if key.endswith(ending) else array
            for key, array in params.items()
        }

    return change


def tie(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    params = {key: array for key, array in params.items() if key != "lm_head.weight"}
    return replace(config, tie_word_embeddings=True), params


def untie(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    head = mx.roll(params["model.embed_tokens.weight"], 1, axis=0)
    return replace(config, tie_word_embeddings=False), {**params, "lm_head.weight": head}


def map_matrix(member: str, change: Callable[[mx.array], mx.array]) -> Change:
    """Apply `change` to the matrix (and bias) of this name in every layer."""
    return lambda config, params: (
        config,
        {key: change(array) if f".{member}." in key else array for key, array in params.items()},
    )


def interleave_halves(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Rotate neighbours instead of halves, as weights laid out for other programs expect."""

    def change(array: mx.array) -> mx.array:
        heads = array.reshape(-1, config.head_dim // 2, 2, *array.shape[1:])
        return heads.swapaxes(1, 2).reshape(array.shape)

    for member in ("q_proj", "k_proj"):
        config, params = map_matrix(member, change)(config, params)
    return config, params


def deal_heads(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Give query heads to key heads in turn (0, 1, 0, 1) instead of in groups (0, 0, 1, 1)."""
    order = mx.arange(config.num_heads).reshape(config.num_kv_heads, -1).T.reshape(-1)

    def rows(array: mx.array) -> mx.array:
        heads = array.reshape(config.num_heads, config.head_dim, *array.shape[1:])
        return heads[order].reshape(array.shape)

    def columns(array: mx.array) -> mx.array:
        return rows(array.T).T if array.ndim == 2 else array

    for member, change in (("q_proj", rows), ("o_proj", columns)):
        config, params = map_matrix(member, change)(config, params)
    return config, params


def scale_by_width(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Scale scores by hidden_size / num_heads, as if head_dim had not been given."""
    ratio = (config.head_dim * config.num_heads / config.hidden_size) ** 0.5
    return map_matrix("q_proj", lambda array: array * ratio)(config, params)


# fmt: off
OFF: dict[str, dict[str, Change]] = {
    "mha": {
        "norm_eps": set_config(norm_eps=1e-5),
        "untied": tie,
        "input norm": fill("input_layernorm.weight", 1.0),
        "post norm": fill("post_attention_layernorm.weight", 1.0),
        "last norm": fill("model.norm.weight", 1.0),
        "halves": interleave_halves,
    },
    "mha-gelu": {"hidden_act": set_config(hidden_act="silu")},
    "mha-gelu-tanh": {"hidden_act": set_config(hidden_act="silu")},
    "gqa": {"tied": untie, "grouping": deal_heads, "head_dim": scale_by_width},
    "mqa": {
        "untied": tie,
        "head_dim": scale_by_width,
        **{f"{m} bias": fill(f"{m}_proj.bias", 0.0) for m in ("gate", "up", "down")},
    },
    "bias": {
        "tied": untie,
        "grouping": deal_heads,
        **{
            f"{m} bias": fill(f"{m}_proj.bias", 0.0)
            for m in ("q", "k", "v", "o", "gate", "up", "down")
        },
    },
    "linear-type": {"factor": set_rope(factor=3.5)},
    "linear-new": {"factor": set_rope(factor=3.0)},
    "dynamic-type": {
        "factor": set_rope(factor=3.5), "length": set_rope(original_max_positions=160),
    },
    "dynamic-new": {
        "factor": set_rope(factor=1.5), "length": set_rope(original_max_positions=320),
    },
    "llama3-old": {
        "factor": set_rope(factor=4.0),
        "low": set_rope(low_freq_factor=2.0),
        "high": set_rope(high_freq_factor=6.0),
        "length": set_rope(original_max_positions=512),
    },
    "llama3-new": {
        "factor": set_rope(factor=8.0),
        "low": set_rope(low_freq_factor=2.0),
        "high": set_rope(high_freq_factor=4.0),
        "length": set_rope(original_max_positions=2048),
    },
    "yarn-old": {
        "factor": set_rope(factor=4.0),
        "attention factor": set_rope(attention_factor=1.0),
        "length": set_rope(original_max_positions=2048),
    },
    "yarn-new": {
        "factor": set_rope(factor=8.0),
        "attention factor": set_rope(attention_factor=1.0),
        "length": set_rope(original_max_positions=2048),
    },
    "yarn-attention-factor": {"attention factor": set_rope(attention_factor=None)},
    "yarn-betas": {"fast": set_rope(beta_fast=32.0), "slow": set_rope(beta_slow=1.0)},
    "yarn-mscale": {
        "both": set_rope(mscale=None, mscale_all_dim=None),
        "mscale": set_rope(mscale=1.0),
        "mscale_all_dim": set_rope(mscale_all_dim=1.0),
    },
    "yarn-no-truncate": {"truncate": set_rope(truncate=True)},
    "yarn-original-from-max": {"length": set_rope(original_max_positions=2048)},
    "yarn-original-at-top": {"length": set_rope(original_max_positions=128)},
}
# fmt: on
for _name in OFF:
    OFF[_name]["theta"] = set_rope(theta=10000.0)
    if not _name.startswith(("mha", "gqa", "mqa", "bias")):
        OFF[_name]["kind"] = set_rope(kind="default")


def test_every_case_is_switched_off() -> None:
    assert list(OFF) == list(CASES)


@pytest.mark.parametrize(
    ("name", "feature"), [(name, feature) for name in OFF for feature in OFF[name]]
)
def test_golden_sees(model: Model, name: str, feature: str) -> None:
    golden = read_golden(name)
    config, params = OFF[name][feature](model.config, model.params)
    changed = run_whole(Model(config, params), golden)
    assert difference(changed, golden) >= BLINDNESS


def test_the_two_gelus_are_told_apart(tmp_path: Path) -> None:
    # They differ by 5e-4 at most, so the logits move less than with other features.
    for name, other in (("mha-gelu", "gelu_pytorch_tanh"), ("mha-gelu-tanh", "gelu")):
        folder = make_folder(name, tmp_path / name, hidden_act=other)
        golden = read_golden(name)
        model = converters.load(folder, dtype="float32")
        assert difference(run_whole(model, golden), golden) >= 4 * TOLERANCE
