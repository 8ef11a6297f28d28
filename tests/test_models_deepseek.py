"""DeepSeek's families and their relatives, beside the checklist: what their configs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import converters
from funcrt.errors import ConfigError
from funcrt.models import read_config
from funcrt.params import Params
from tests.families.cases import Case, run_plain
from tests.helpers import TOLERANCE, relative_error
from tests.reference.golden import family_folder

import mlx.core as mx
import pytest

SIZES = {"vocab_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
# What the configuration classes of transformers 5.24 fill in.
FILLED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "dense_layers": 0, "expert_size": 1407, "head_dim": 64, "kept_groups": None,
        "kv_lora_rank": 512, "max_positions": 2048, "norm_eps": 1e-6, "num_experts": 64,
        "num_groups": None, "num_kv_heads": 128, "num_shared": 2, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scale": 1.0,
        "topk_method": "greedy", "v_head_dim": 128,
    },
    "deepseek_v3": {
        "dense_layers": 3, "expert_size": 2048, "head_dim": 64, "kept_groups": 4,
        "kv_lora_rank": 512, "max_positions": 4096, "norm_eps": 1e-6, "normalize": True,
        "num_ahead": 1, "num_chosen": 8, "num_experts": 256, "num_groups": 8,
        "num_kv_heads": 128, "num_shared": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rope_interleave": True, "routed_scale": 2.5, "v_head_dim": 128,
    },
    "dots1": {
        "dense_layers": 0, "head_dim": 4, "kept_groups": 1, "layer_types": ("full_attention",) * 2,
        "max_positions": 2048, "max_window_layers": 62, "norm_eps": 1e-6, "normalize": False,
        "num_groups": 1, "num_kv_heads": 32, "num_shared": None, "routed_scale": 1.0,
        "sliding_window": 4096,
    },
    "ernie4_5_moe": {
        "dense_layers": 1, "expert_size": 1536, "head_dim": 4, "last_sparse": 1,
        "least_sum": 1e-12, "max_positions": 131072, "norm_eps": 1e-5, "num_chosen": 6,
        "num_experts": 64, "num_kv_heads": 4, "num_shared": 2, "sparse_every": 1,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        "dense_layers": 1, "expert_size": 1408, "head_dim": 4, "kept_groups": 1,
        "max_positions": 131072, "norm_eps": 1e-5, "normalize": True, "num_ahead": 1,
        "num_chosen": 8, "num_experts": 128, "num_groups": 1, "num_kv_heads": 8, "num_shared": 1,
        "routed_scale": 1.0, "use_qk_norm": False,
    },
    "glm4_moe_lite": {
        "dense_layers": 1, "expert_size": 1536, "kept_groups": 1, "kv_lora_rank": 512,
        "max_positions": 202752, "norm_eps": 1e-5, "normalize": True, "num_chosen": 4,
        "num_experts": 64, "num_groups": 1, "num_shared": 1, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rope_interleave": True,
        "routed_scale": 1.8, "v_head_dim": 256,
    },
    "minicpm3": {
        "dim_model_base": 256, "kv_lora_rank": 256, "max_positions": 32768, "norm_eps": 1e-5,
        "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_depth": 1.4,
        "scale_emb": 12.0, "tie_word_embeddings": True, "v_head_dim": 4,
    },
    "youtu": {
        "kv_lora_rank": 512, "max_positions": 131072, "norm_eps": 1e-6, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_interleave": True,
        "tie_word_embeddings": True, "v_head_dim": 128,
    },
}  # fmt: skip
HEADS = {"deepseek_v2": 128, "deepseek_v3": 128, "glm4_moe_lite": 20, "minicpm3": 40}
GIVEN = {
    "deepseek_v2": {"num_experts_per_tok": 8},
    "dots1": {"num_experts_per_tok": 8, "n_routed_experts": 16},
}
CASES = [
    "deepseek_v2", "deepseek_v2-lite", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe",
    "glm4_moe_lite", "minicpm3", "youtu",
]  # fmt: skip


def published(case: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((family_folder(case) / "config.json").read_text()), **changes}


@pytest.mark.parametrize("model_type", FILLED)
def test_defaults_are_those_of_transformers(model_type: str):
    heads = HEADS.get(model_type, 16)
    sizes = {**SIZES, "hidden_size": 4 * heads, "num_attention_heads": heads}
    if model_type in ("dots1", "glm4_moe"):
        sizes |= {"num_attention_heads": 32, "hidden_size": 128}
    config = read_config({"model_type": model_type, **sizes, **GIVEN.get(model_type, {})})
    assert {name: getattr(config, name) for name in FILLED[model_type]} == FILLED[model_type]
    assert config.rope.theta == (500000.0 if model_type == "ernie4_5_moe" else 10000.0)


@pytest.mark.parametrize("case", CASES)
def test_config_is_written_back(case: str):
    config = read_config(published(case))
    assert read_config(config.to_hf()) == config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_hf()["architectures"] == published(case)["architectures"]


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("deepseek_v2", {"topk_method": "gready"}, "'gready' is not supported; known: greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("deepseek_v2", {"n_group": None}, "n_group, topk_group: expected whole numbers"),
        ("deepseek_v2", {"n_group": 4}, "groups must divide the experts"),
        ("deepseek_v2", {"num_experts_per_tok": 4}, "4 of 6 experts in 1 of 2 groups"),
        ("deepseek_v2-lite", {"num_experts_per_tok": 7}, "7 of 6 experts"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "expected as many as num_attention_heads"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "must be even"),
        ("deepseek_v2", {"kv_lora_rank": "32"}, "kv_lora_rank: expected a whole number"),
        ("deepseek_v2", {"q_lora_rank": 0}, "q_lora_rank: expected a positive int32"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "no 'num_experts_per_tok'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"n_group": 6, "topk_group": 6}, "hold at least 2 each"),
        ("deepseek_v3", {"topk_group": 3}, "in 3 of 2 groups"),
        ("deepseek_v3", {"mlp_bias": True}, "mlp_bias=True"),
        ("deepseek_v3", {"routed_scaling_factor": True}, "a finite number"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("dots1", {"layer_types": ["full_attention"] * 2}, "layer_types: expected 3 entries"),
        ("dots1", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act='sigmoid'"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True"),
        ("ernie4_5_moe", {"n_group": 2}, "unknown: n_group"),
        ("ernie4_5_moe", {"moe_layer_start_index": [1, 1]}, "moe_layer_start_index: expected"),
        ("glm4_moe", {"n_routed_experts": None}, "no 'n_routed_experts'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "'dense' for some first"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "'dense' for some first"),
        ("minicpm3", {"v_head_dim": 2.5}, "v_head_dim: expected a whole number"),
        ("minicpm3", {"mlp_bias": True}, "mlp_bias=True"),
        ("youtu", {"num_key_value_heads": 2}, "expected as many as num_attention_heads"),
    ],
)
def test_config_is_refused(case: str, changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        read_config(published(case, **changes))


def test_nulls_of_minicpm3_are_factors_of_one():
    config = read_config(published("minicpm3", dim_model_base=None, scale_depth=None))
    assert config.dim_model_base == config.hidden_size
    assert config.scale_depth == config.num_layers**0.5


def test_lists_of_dense_layers_are_read():
    kinds = ["dense", "dense", "sparse"]
    config = read_config(published("glm4_moe_lite", num_hidden_layers=3, mlp_layer_types=kinds))
    assert [config.is_sparse(i) for i in range(3)] == [False, False, True]
    assert config.to_hf()["mlp_layer_types"] == kinds


@pytest.mark.parametrize("layers", [2, 46, 92])
def test_layers_that_guess_ahead_are_left_out(layers: int):
    unused = read_config(published("glm4_moe", num_hidden_layers=layers)).unused_tensors()
    assert f"model.layers.{layers}." in unused
    assert all(int(prefix.split(".")[2]) >= layers for prefix in unused)
    assert ("model.layers.46." in unused) == (layers <= 46)


def test_what_corrects_routing_stays_exact():
    model = converters.load(family_folder("deepseek_v3"), dtype="bfloat16")
    exact = {
        name
        for params in (model.params, model.prepared)
        for name, array in params.items()
        if array.dtype == mx.float32
    }
    assert exact == {"model.layers.1.mlp.gate.e_score_correction_bias"}


def swap_layers(params: Params) -> Params:
    """The first two layers in the other order."""
    numbers = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}
    return {numbers.get(name[:15], name[:15]) + name[15:]: array for name, array in params.items()}


def test_every_other_layer_has_experts(tmp_path: Path):
    """As mlx-lm and DeepSeek's own code read `moe_layer_freq`; transformers does not."""
    with Case("deepseek_v3") as case:
        # One group: of several, mlx-lm may choose from one that is not kept.
        groups = {"n_group": 1, "topk_group": 1}
        hf = {**case.hf, "first_k_dense_replace": 0, "moe_layer_freq": 2, **groups}
        (tmp_path / "config.json").write_text(json.dumps(hf))
        params = swap_layers(mx.load(str(case.folder / "model.safetensors")))
        mx.save_safetensors(str(tmp_path / "model.safetensors"), params)
        ours, theirs = (
            run_plain(converters.load(tmp_path, "float32", via=via), case.prompt)
            for via in (None, "mlx_lm")
        )
        assert relative_error(ours, theirs) < TOLERANCE
        assert relative_error(ours, case.whole) > 100 * TOLERANCE
