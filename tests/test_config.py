from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

from funcrt.config import ModelConfig, RopeConfig
from funcrt.errors import ConfigError
from funcrt.models import read_config
from tests.families.cases import case_names, config_of

import pytest

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-3,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "rope_theta": 1234.5,
}
TYPE = "holds a value of a wrong type"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0}
# kind: (what the scaling dict holds besides the kind, what must come of it)
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"original_max_positions": 512}),
    "linear": ({"factor": 4.0}, {"factor": 4.0, "original_max_positions": 512}),
    "dynamic": ({"factor": 2.0}, {"factor": 2.0, "original_max_positions": 512}),
    "llama3": (
        {**LLAMA3, "original_max_position_embeddings": 128},
        {**LLAMA3, "original_max_positions": 128},
    ),
    "yarn": (
        {
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 0.9,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.1,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
        {
            "factor": 8.0,
            "original_max_positions": 64,
            "attention_factor": 0.9,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.1,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    ),
}


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**HF, **changes}.items() if key not in keys}


def old(kind: str, name: str = "rope_type", **changes: Any) -> dict[str, Any]:
    return {**HF, "rope_scaling": {name: kind, **ROPES[kind][0], **changes}}


def new(kind: str, **changes: Any) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 1234.5, **ROPES[kind][0], **changes}
    return without("rope_theta", rope_parameters=rope)


def refuse(hf: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        ModelConfig.from_hf(hf)
    assert "\n" not in str(caught.value)


def test_every_field_is_read():
    assert ModelConfig.from_hf(HF, "bfloat16") == ModelConfig(
        model_type="llama",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        norm_eps=1e-3,
        rope=RopeConfig(theta=1234.5, original_max_positions=512),
        max_positions=512,
        hidden_act="gelu",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def test_what_old_configs_leave_out():
    optional = [
        "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "attention_bias",
        "max_position_embeddings", "mlp_bias", "tie_word_embeddings", "rope_theta",
    ]  # fmt: skip
    for hf in (without(*optional), {**HF, **dict.fromkeys(optional[:2])}):
        config = ModelConfig.from_hf(hf)
        assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 16, "float32")
    config = ModelConfig.from_hf(without(*optional))
    assert (config.norm_eps, config.hidden_act, config.max_positions) == (1e-6, "silu", 2048)
    assert config.rope == RopeConfig(theta=10000.0, kind="default", original_max_positions=2048)
    flags = (config.attention_bias, config.mlp_bias, config.tie_word_embeddings)
    assert flags == (False, False, False)


def test_a_config_is_frozen_and_hashable():
    config = ModelConfig.from_hf(HF)
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 1
    assert hash(config) == hash(ModelConfig.from_hf(HF))


@pytest.mark.parametrize("kind", ROPES)
def test_both_spellings_read_alike(kind):
    expected = RopeConfig(theta=1234.5, kind=kind, **ROPES[kind][1])
    for hf in (old(kind), old(kind, "type"), new(kind), {**old(kind), **new(kind)}):
        assert ModelConfig.from_hf(hf).rope == expected


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("spelling", [old, new])
def test_round_trips(kind, spelling):
    config = ModelConfig.from_hf(spelling(kind), "float16")
    hf = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(hf, "float16") == config
    assert hf["rope_theta"] == 1234.5
    assert "rope_parameters" not in hf
    if kind != "default":
        assert hf["rope_scaling"]["rope_type"] == kind
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", case_names())
def test_what_is_written_is_written_alike_again(name):
    """Fingerprints hash it: 32 and 32.0 would be two models."""
    config = read_config(config_of(name))
    written = json.dumps(config.to_dict())
    assert json.dumps(type(config).from_dict(json.loads(written)).to_dict()) == written


def test_whole_numbers_become_floats():
    config = replace(read_config(config_of("llama-bias")), norm_eps=1, rope=RopeConfig(theta=500))
    assert json.dumps(config.norm_eps) == "1.0"
    assert json.dumps(config.rope.theta) == "500.0"
    assert RopeConfig(short_factor=[1, 2]) == RopeConfig(short_factor=(1.0, 2.0))
    with pytest.raises(ConfigError, match="theta"):
        RopeConfig(theta="500")


def test_from_dict_refuses_other_fields():
    data = ModelConfig.from_hf(HF).to_dict()
    rope = data["rope"]
    for bad in (
        {**data, "more": 1},
        {k: v for k, v in data.items() if k != "rope"},
        {k: v for k, v in data.items() if k != "hidden_size"},
        {**data, "rope": {**rope, "more": 1}},
        {**data, "rope": None},
    ):
        with pytest.raises(ConfigError, match="fields"):
            ModelConfig.from_dict(bad)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_theta": 10000.0}, "rope_parameters says rope_theta=1234.5"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters says rope_type=.llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "factor"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type"),
    ],
)
def test_spellings_that_disagree_are_refused(changes, match):
    refuse({**new("llama3"), **changes}, match)


def test_two_names_of_the_kind_must_agree():
    assert ModelConfig.from_hf(old("linear", type="linear")).rope.kind == "linear"
    refuse(old("linear", type="dynamic"), "type='dynamic' and rope_type='linear'")


@pytest.mark.parametrize(
    ("scaling", "match"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' needs short_factor, long_factor"),
        ({"rope_type": "proportional"}, "'proportional' is not supported; known: default"),
        ({"type": "su", "factor": 2.0}, "'su'"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "dynamic"}, "'dynamic' needs factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "does not take beta_fast"),
        ({"rope_type": "default", "mystery": 1}, "does not take mystery"),
        ({"rope_type": "linear", "factor": "4"}, "expected a finite number, got '4'"),
        ({"rope_type": "linear", "factor": float("nan")}, "finite number"),
        ({"rope_type": "linear", "factor": float("inf")}, "finite number"),
        ({"rope_type": "linear", "factor": 0}, "positive"),
        ({"rope_type": "linear", "factor": -2.0}, "positive"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "positive"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "64"}, TYPE),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "'default' does not take full_attention"),
        ("linear", TYPE),
        ([4.0], TYPE),
    ],
)
def test_rope_that_cannot_be_computed_is_refused(scaling, match):
    refuse({**HF, "rope_scaling": scaling}, match)


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"sliding_attention": {"rope_type": "default"}}, "per layer type"),
        ({"rope_type": "default", "rope_theta": 0}, "positive"),
        ({"rope_type": "default", "rope_theta": "1e4"}, "rope_theta"),
        ("default", TYPE),
    ],
)
def test_rope_parameters_that_cannot_be_computed_are_refused(parameters, match):
    refuse(without("rope_theta", rope_parameters=parameters), match)


@pytest.mark.parametrize(
    "key",
    [
        "model_type", "vocab_size", "hidden_size", "intermediate_size",
        "num_hidden_layers", "num_attention_heads",
    ],
)  # fmt: skip
def test_required_keys(key):
    refuse(without(key), f"config.json has no '{key}'")
    refuse({**HF, key: None}, f"config.json has no '{key}'")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": None, "rope_interleaved": True}, "model_type"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        ({"is_causal": False}, "is_causal=False"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ({"hidden_act": "swish2"}, "activation 'swish2' is not supported; known: silu"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"quantization": {"quant_method": "awq"}}, "'awq'"),
        ({"quantization_config": "gptq"}, TYPE),
        ({"logit_scale": 2.0}, "unknown: logit_scale"),
        ({"b": 1, "a": "x", "c": 0}, "unknown: a, b, c"),
        ({"num_key_value_heads": 3}, r"\(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"num_key_value_heads": 0}, "num_kv_heads: expected a positive int32, got 0"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"head_dim": None, "num_attention_heads": 5}, r"\(64\) is not a multiple of"),
        ({"head_dim": None, "num_attention_heads": 0}, TYPE),
        ({"head_dim": None, "num_attention_heads": "4"}, TYPE),
        ({"head_dim": None, "hidden_size": "64"}, TYPE),
        ({"vocab_size": 0}, "vocab_size: expected a positive int32, got 0"),
        ({"vocab_size": 96.0}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected a whole number, got True"),
        ({"max_position_embeddings": -1}, "positive"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a finite number, got 'small'"),
        ({"rms_norm_eps": None}, "no 'rms_norm_eps'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": ["silu"]}, "hidden_act: expected a string"),
        ({"model_type": 5}, "model_type: expected a string, got 5"),
    ],
)
def test_what_would_change_the_result_is_refused(changes, match):
    refuse({**HF, **changes}, match)


def test_unknown_keys_that_are_off_or_ignored_pass():
    expected = ModelConfig.from_hf(HF)
    off = {
        "is_causal": True,
        "use_mup": False,
        "logit_scale": None,
        "attn_implementation": "flash_attention_2",
        "sliding_window": None,
    }
    assert ModelConfig.from_hf({**HF, **off, "torch_dtype": "float16"}) == expected
    assert ModelConfig.from_hf({**HF, "logit_scale": 2.0}, ignore=["logit_scale"]) == expected
    assert ModelConfig.from_hf({**HF, "quantization": {"bits": 4, "group_size": 64}}) == expected


def test_architectures_may_be_null():
    assert ModelConfig.from_hf({**HF, "architectures": None}) == ModelConfig.from_hf(HF)
    smol = config_of("smollm3")
    assert read_config({**smol, "architectures": None}).architectures == ("SmolLM3ForCausalLM",)


def test_how_training_was_split_means_nothing_to_any_family():
    """Llama 2 and Command R say it; sums are the same in whatever pieces."""
    for name in [name for name in case_names() if not name.startswith("llama-")]:
        read = read_config(config_of(name))
        assert read_config({**config_of(name), "pretraining_tp": 2}) == read, name
    assert ModelConfig.from_hf({**HF, "pretraining_tp": 2}) == ModelConfig.from_hf(HF)


def test_a_dtype_must_be_one_that_computes():
    for dtype in ("float64", "int8", "fp16", ""):
        with pytest.raises(ConfigError, match="use float32, float16, bfloat16"):
            ModelConfig.from_hf(HF, dtype)
        with pytest.raises(ConfigError):
            replace(ModelConfig.from_hf(HF), dtype=dtype)


def test_where_the_original_length_comes_from():
    """As in transformers: see tests/reference/llama_cases.py."""
    top = {"original_max_position_embeddings": 32}
    for kind, spelled in [("llama3", 128), ("yarn", 64)]:
        read = ModelConfig.from_hf(old(kind)).rope
        assert read.original_max_positions == spelled
        assert ModelConfig.from_hf({**old(kind), **top}).rope == replace(
            read, original_max_positions=32
        )
        del (hf := old(kind))["rope_scaling"]["original_max_position_embeddings"]
        assert ModelConfig.from_hf(hf).rope == replace(read, original_max_positions=512)
    dynamic = old("dynamic", original_max_position_embeddings=64)
    assert ModelConfig.from_hf(dynamic).rope.original_max_positions == 512


def test_yarn_defaults():
    rope = ModelConfig.from_hf(
        {**HF, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 128}}
    ).rope
    assert (rope.factor, rope.beta_fast, rope.beta_slow) == (4.0, 32.0, 1.0)
    for unset in (0, None):
        zeros = ModelConfig.from_hf(old("yarn", beta_fast=unset, beta_slow=unset)).rope
        assert (zeros.beta_fast, zeros.beta_slow) == (32.0, 1.0)


def test_what_would_be_dropped_in_silence_raises():
    with pytest.raises(ConfigError, match=r"factor .* but no rope_type"):
        ModelConfig.from_hf({**HF, "rope_scaling": {"factor": 2.0}})
    with pytest.raises(ConfigError, match="rms_norm_eps: expected above 0"):
        ModelConfig.from_hf({**HF, "rms_norm_eps": 0})


@pytest.mark.parametrize(("given", "ids"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
def test_ids_that_end_a_text_are_kept(given, ids):
    config = ModelConfig.from_hf({**HF, "eos_token_id": given})
    assert config.eos_token_ids == ids
    assert ModelConfig.from_hf(config.to_hf()).eos_token_ids == ids
    assert ModelConfig.from_dict(config.to_dict()).eos_token_ids == ids
