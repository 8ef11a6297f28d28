"""Configs of the families that are Llama with changes: what is filled in, written and refused."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

import converters
from funcrt.config.fields import hf_keys
from funcrt.config.layer_types import MixedConfig
from funcrt.errors import ConfigError
from funcrt.model import Model
from funcrt.models import FAMILIES, read_config
from tests.families.cases import causal
from tests.helpers import relative_error, run_in_pieces
from tests.reference.golden import FAMILIES as GOLDEN
from tests.reference.golden import family_folder, read_family_golden

import mlx.core as mx
import pytest

TYPES = ("ernie4_5", "granite", "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2")
CASES = (*TYPES, "phi3-longrope", "phi3-partial", "qwen2-window", "stablelm-parallel")
DEFAULTS: dict[str, Any] = json.loads((GOLDEN / "defaults.json").read_text("utf-8"))
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
SIZES = {
    "vocab_size": 1000, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 4,
    "num_attention_heads": 32,
}  # fmt: skip


def published(case: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((family_folder(case) / "config.json").read_text("utf-8"))
    return {**config, **changes}


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_what_a_config_leaves_out_is_filled_in_as_transformers_does(kind: str) -> None:
    given, filled = DEFAULTS[kind]["config"], DEFAULTS[kind]["filled"]
    heads = max(given["num_attention_heads"], filled["num_key_value_heads"])
    config = read_config({**given, "num_attention_heads": heads, "hidden_size": 16 * heads})
    for name, key in hf_keys(type(config)).items():
        if key in filled:
            value = getattr(config, name)
            assert (list(value) if isinstance(value, tuple) else value) == filled[key], key
    rope = filled["rope_parameters"]
    assert config.rope.theta == rope["rope_theta"]
    assert config.rope.partial == rope.get("partial_rotary_factor", 1.0)
    ids = filled["eos_token_id"]
    assert config.eos_token_ids == (() if ids is None else (ids,))


# Keys and values of config.json files on the hub, beside the sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "model_type": "qwen2", "max_window_layers": 28, "sliding_window": 131072,
        "use_mrope": False, "use_sliding_window": False, "num_key_value_heads": 4,
    },
    "Qwen2.5 with YaRN": {
        "model_type": "qwen2", "num_key_value_heads": 8, "max_position_embeddings": 32768,
        "rope_scaling": {
            "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn",
        },
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "rope_scaling": None,
        "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False,
        "num_key_value_heads": 8,
    },
    "Phi-3-mini-4k": {
        "model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "sliding_window": 2047, "rope_scaling": None,
        "original_max_position_embeddings": 4096,
    },
    "Phi-4-mini": {
        "model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
        "mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1.0,
        "num_key_value_heads": 8, "sliding_window": 262144, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", **FACTORS},
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "layer_types": ["full_attention"] * 4, "max_window_layers": 28,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2,
        "sliding_window": None, "use_sliding_window": False, "mlp_bias": False,
    },
    "granite-3.1-8b": {
        "model_type": "granite", "attention_dropout": 0.1, "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22,
        "mlp_bias": False, "rope_scaling": None, "num_key_value_heads": 8,
    },
    "ERNIE-4.5-0.3B": {
        "model_type": "ernie4_5", "head_dim": 128, "use_bias": False, "rope_theta": 500000.0,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2", "activation_function": "gelu", "mlp_type": "default",
        "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5,
        "norm_type": "layer_norm", "residual_dropout": 0.1, "embedding_dropout": 0.1,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "use_bias": True,
        "sliding_window": 4096, "rope_theta": 999999.4420358813,
    },
    "stablelm-2-12b": {
        "model_type": "stablelm", "hidden_dropout": 0.0, "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25, "qk_layernorm": True, "use_parallel_residual": True,
        "use_qkv_bias": False, "num_key_value_heads": 8, "rope_theta": 10000,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str) -> None:
    config = read_config({**SIZES, "use_cache": True, **PUBLISHED[name]})
    assert read_config(json.loads(json.dumps(config.to_hf()))) == config
    assert FAMILIES[config.model_type].param_spec(config)


def windows(hf: dict[str, Any]) -> list[int | None]:
    config = read_config({**SIZES, **hf})
    assert isinstance(config, MixedConfig)
    return [config.window(i) for i in range(4)]


def test_layers_and_their_windows() -> None:
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}
    assert windows(qwen) == [None, None, None, 4096]
    assert windows({**qwen, "use_sliding_window": False}) == [None] * 4
    listed = ["sliding_attention", *["full_attention"] * 3]
    assert windows({**qwen, "layer_types": listed}) == [4096, None, None, None]
    smol = {"model_type": "smollm3", "no_rope_layer_interval": 2, "sliding_window": 64}
    assert windows(smol) == [None] * 4
    assert windows({**smol, "use_sliding_window": True}) == [None, 64, None, 64]
    assert read_config({**SIZES, **smol}).to_hf()["no_rope_layers"] == [1, 0, 1, 0]


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_phi3_calls_longrope_by_several_names(kind: str, key: str) -> None:
    hf = {**SIZES, "model_type": "phi3", "max_position_embeddings": 131072}
    rope = read_config({**hf, "rope_scaling": {key: kind, **FACTORS}}).rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("longrope", 32.0, 4096)
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **FACTORS}}
    assert read_config({**hf, **new}).rope == rope


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_config_is_written_so_that_it_reads_the_same(case: str) -> None:
    config = read_config(published(case))
    written = json.loads(json.dumps(config.to_hf()))
    assert read_config(written) == config
    assert written["architectures"] == published(case)["architectures"]
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("case", ["phi3", "stablelm", "glm4", "gpt_neox"])
def test_shares_of_heads_are_written_whatever_is_filled_in_for_none(
    case: str, share: float
) -> None:
    key = "rotary_pct" if case == "gpt_neox" else "partial_rotary_factor"
    config = read_config(published(case, **{key: share, "head_dim": 16}))
    assert read_config(config.to_hf()) == config
    assert config.rope.partial == share


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
@pytest.mark.parametrize("case", ["phi3-longrope", "granite", "smollm3", "stablelm-parallel"])
def test_mlx_lm_reads_what_is_written(case: str, tmp_path: Any) -> None:
    model = converters.load(family_folder(case), dtype="float32")
    model.save(tmp_path / "saved")
    theirs = converters.load(tmp_path / "saved", dtype="float32", via="mlx_lm")
    golden = read_family_golden(case)
    count = golden.tokens.shape[1]
    logits = run_in_pieces(theirs, golden.tokens, [count], theirs.init_cache(1, count + 1))
    assert relative_error(logits[golden.positions], golden.logits) < 2e-5


def test_every_row_of_longrope_switches_by_itself() -> None:
    """One row ends within the original context of 256 tokens and the other one is past it."""
    model = converters.load(family_folder("phi3-longrope"), dtype="float32")
    tokens = read_family_golden("phi3-longrope").tokens
    rows, width = [tokens[:, :250], tokens[:, 200:500]], 300
    pads = [width - row.shape[1] for row in rows]
    padded = [mx.pad(row, [(0, 0), (pad, 0)]) for row, pad in zip(rows, pads, strict=True)]
    valid = mx.arange(width) >= mx.array(pads)[:, None]
    together = forward(model, mx.concatenate(padded), valid)
    for i, row in enumerate(rows):
        alone = forward(model, row, mx.ones_like(row))
        assert relative_error(together[i, pads[i] :], alone[0]) < 2e-6
    early = replace(model.config, rope=replace(model.config.rope, original_max_positions=200))
    switched = forward(Model(early, model.params), rows[0], mx.ones_like(rows[0]))
    assert relative_error(switched, together[:1, pads[0] :]) > 0.1


def forward(model: Model, tokens: mx.array, valid: mx.array) -> mx.array:
    state = model.init_cache(tokens.shape[0], tokens.shape[1] + 1)
    return model.forward(model.params, tokens, causal(valid, state), state)[0]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_sizes_are_required(kind: str, key: str) -> None:
    config = published(kind)
    wrong: list[Any] = [None, "4", 1.5, True, 0, -1, []]
    for bad in wrong:
        with pytest.raises(ConfigError):
            read_config({**config, key: bad})
    del config[key]
    with pytest.raises(ConfigError, match=f"config.json has no '{key}'"):
        read_config(config)


@pytest.mark.parametrize(
    ("case", "changes", "match"),
    [
        ("qwen2", {"attention_bias": False}, "attention_bias=False is not supported for 'qwen2'"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 4}}, "unknown: dual_chunk_att"),
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "'mrope' is not supp"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("qwen2-window", {"max_window_layers": "1"}, "wrong type"),
        ("qwen2-window", {"max_window_layers": None}, "wrong type"),
        ("qwen2-window", {"max_window_layers": -1}, "max_window_layers: expected an int32 from 0"),
        ("qwen2-window", {"use_sliding_window": "yes"}, "use_sliding_window: expected true or"),
        ("qwen2-window", {"sliding_window": 0}, "sliding_window: expected a positive"),
        ("qwen2-window", {"layer_types": ["full_attention"]}, "layer_types: expected 3 entries"),
        ("qwen2-window", {"layer_types": ["conv"] * 3}, "layer type 'conv' .* known: full_att"),
        ("qwen2-window", {"layer_types": "full_attention"}, "layer_types: expected a list"),
        ("qwen2-window", {"layer_types": [1, 2, 3]}, "layer_types: expected a string, got 1"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "but there is no sliding_window"),
        ("qwen3", {"hidden_act": "swish2"}, "activation 'swish2' is not supported; known: silu"),
        ("qwen3", {"head_dim": 15}, "head_dim must be even"),
        ("phi3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=True is not supported"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2 is not supported"),
        ("phi3", {"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ("phi3-partial", {"partial_rotary_factor": 0.4}, "head_dim must be even .* of which 3"),
        ("phi3-longrope", {"rope_scaling": "su"}, "wrong type"),
        ("phi3-longrope", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "needs short_factor"),
        ("phi3-longrope", {"rope_scaling": {"type": "su", **FACTORS}}, "expected 4 numbers"),
        ("phi3-longrope", {"original_max_position_embeddings": 0}, "positive"),
        ("phi3-longrope", {"original_max_position_embeddings": "256"}, "wrong type"),
        ("smollm3", {"no_rope_layers": [1, 1]}, r"expected 3 numbers .* got \[1, 1\]"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "each 0 or 1"),
        ("smollm3", {"no_rope_layers": 1}, "no_rope_layers: expected a list"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "wrong type"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": -5}, "positive"),
        ("granite", {"logits_scaling": 0}, "logits_scaling: expected other than 0"),
        ("granite", {"logits_scaling": None}, "logits_scaling: expected a finite number"),
        ("granite", {"residual_multiplier": "1"}, "residual_multiplier: expected a finite number"),
        ("granite", {"embedding_multiplier": float("inf")}, "embedding_multiplier"),
        ("granite", {"shared_intermediate_size": 64}, "unknown: shared_intermediate_size"),
        ("ernie4_5", {"use_bias": "no"}, "expected true or false"),
        ("ernie4_5", {"moe_num_experts": 4}, "unknown: moe_num_experts"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type='rms_norm' is not supported"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type='gated' is not supported"),
        ("starcoder2", {"norm_epsilon": 0}, "norm_epsilon: expected above 0"),
        ("stablelm", {"layer_norm_eps": "1e-5"}, "layer_norm_eps: expected a finite number"),
        ("stablelm", {"qk_layernorm": 1}, "qk_layernorm: expected true or false"),
        ("stablelm", {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused(
    case: str, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        read_config(published(case, **changes))
