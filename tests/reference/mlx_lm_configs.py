"""A tiny configuration for every module of mlx-lm, whose windows, experts and groups matter.

`RULES` gives each field a small value wherever a module has a field of that name; `SPECIAL` says
what differs for single modules. Windows and chunks are shorter than the prompts of the checks,
query heads share key heads, and experts are more than those chosen.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

WINDOW = 8
FULL, SLIDING = "full_attention", "sliding_attention"

RULES: dict[str, Any] = {
    "vocab_size": 101, "num_vocab": 101, "vocab_size_per_layer_input": 101,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "model_dim": 64, "hidden_dim": 64,
    "block_dim": 64,
    "intermediate_size": 96, "n_inner": 96, "ffn_hidden_size": 96, "ff_intermediate_size": 96,
    "block_ff_dim": 96, "intermediate_size_mlp": 80, "shared_intermediate_size": 48,
    "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "share_expert_dim": 32,
    "num_hidden_layers": 4, "num_layers": 4, "n_layers": 4, "n_layer": 4,
    "num_transformer_layers": 4,
    "num_attention_heads": 4, "n_heads": 4, "n_head": 4, "num_heads": 4,
    "num_swa_attention_heads": 4, "swa_num_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "n_kv_heads": 2,
    "num_swa_key_value_heads": 2, "swa_num_key_value_heads": 2, "num_attention_groups": 2,
    "head_dim": 16, "swa_head_dim": 16, "swa_v_head_dim": 16, "kv_channels": 16,
    "global_head_dim": 16, "hidden_size_per_head": 16,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5,
    "layernorm_epsilon": 1e-5, "norm_epsilon": 1e-5,
    "rope_theta": 10000.0, "rotary_emb_base": 10000, "swa_rope_theta": 5000.0,
    "rope_local_base_freq": 5000.0, "rope_local_theta": 5000,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "model_max_length": 256,
    "block_size": 256, "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.5, "rotary_pct": 0.5, "rotary_dim": 8,
    "global_partial_rotary_factor": 0.5,
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "attention_window_size": WINDOW,
    "window_size": WINDOW, "loop_window_size": WINDOW, "attention_chunk_size": WINDOW,
    "sliding_window_pattern": 2,
    "num_experts": 6, "n_routed_experts": 8, "num_local_experts": 6, "moe_num_experts": 6,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_top_k": 2, "moe_k": 2, "top_k_experts": 2,
    "num_experts_per_token": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "num_shared_expert": 1, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "n_group": 2, "topk_group": 1,
    "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": [1],
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 6,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qk_norm": True,
    "use_conv_bias": True, "conv_bias": True,
    "tie_word_embeddings": False,
    "logits_scaling": 2.0, "attention_multiplier": 0.25, "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "conv_kernel": 4, "conv_L_cache": 3, "state_size": 16, "ssm_state_size": 16,
    "time_step_rank": 8, "time_step_limit": [0.001, 100.0], "n_groups": 2,
    "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_group_size": 2, "group_norm_size": 2, "full_attention_interval": 2,
    "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 4.0,
    "zero_expert_num": 2, "zero_expert_type": "identity", "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "attention_method": "MLA",
    "rope_scaling": None, "rope_parameters": None,
}  # fmt: skip


def _fields(module: str, kind: str = "ModelArgs", **changes: Any) -> dict[str, Any]:
    """`RULES` for the fields of a class of arguments."""
    source = importlib.import_module(f"mlx_lm.models.{module}")
    config: dict[str, Any] = {}
    for field in dataclasses.fields(getattr(source, kind)):
        if RULES.get(field.name) is not None:
            config[field.name] = RULES[field.name]
        elif field.name == "layer_types":
            config["layer_types"] = [SLIDING, FULL] * 2
    return {**config, **changes}


def _text(module: str, kind: str = "ModelArgs", **changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"text_config": _fields(module, kind, model_type=module, **changes)}


LFM2: dict[str, Any] = {
    "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", FULL] * 2,
}  # fmt: skip
KDA = {
    "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16,
    "short_conv_kernel_size": 4,
}  # fmt: skip
BY_TYPE = {
    FULL: {"rope_theta": 10000.0, "rope_type": "default"},
    SLIDING: {"rope_theta": 5000.0, "rope_type": "default"},
}
LLAMA4_SCALE = {
    "rope_theta": 10000.0, "rope_type": "default", "llama_4_scaling_beta": 0.3,
    "original_max_position_embeddings": 8,
}  # fmt: skip
Special = dict[str, Any] | Callable[[], dict[str, Any]]
SPECIAL: dict[str, Special] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 6, "moe_top_k": 2},
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
    },
    "deepseek_v2": {
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.7,
        },
    },
    "exaone4": {
        "sliding_window_pattern": "LG",
        "rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3": _text("gemma3_text"),
    "gemma3n": _text(
        "gemma3n", "TextConfig", num_kv_shared_layers=2, num_hidden_layers=6,
        layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, FULL], final_logit_softcapping=30.0,
        intermediate_size=[96] * 6, activation_sparsity_pattern=[0.5, 0.5, 0, 0, 0, 0],
        hidden_size_per_layer_input=16, altup_num_inputs=3, altup_coef_clip=120.0,
        altup_correct_scale=True, altup_active_idx=0, laurel_rank=8,
    ),
    "gemma4": _text(
        "gemma4_text", hidden_size_per_layer_input=16, num_kv_shared_layers=0,
        num_global_key_value_heads=2, enable_moe_block=False,
    ),
    "gemma4_text": {
        "hidden_size_per_layer_input": 16, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "layer_types": [SLIDING, FULL] * 3, "num_global_key_value_heads": 2,
    },
    "kimi_k25": _text("deepseek_v3"),
    "kimi_vl": _text("kimi_vl", "TextArgs"),
    "llama4": _text(
        "llama4", "TextArgs", num_experts_per_tok=1, interleave_moe_layer_step=2, floor_scale=4,
        attn_scale=0.1, attn_temperature_tuning=4, rope_scaling=None,
    ),
    "mistral3": _text("llama"),
    "pixtral": _text("llama"),
    "prism_hadamard_qwen35": lambda: {
        **_text("qwen3_5", "TextModelArgs", hidden_size=128, num_experts=0)(),
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": f"model.layers.{i}.mlp.{part}_proj", "embedding": False, "block": 0,
             "dtype": "float16"}
            for i in range(4) for part in ("gate", "up")
        ],
    },
    "qwen2_vl": _text("qwen2"),
    "qwen3_vl": _text("qwen3"),
    "qwen3_vl_moe": _text("qwen3_moe"),
    "qwen3_5": _text("qwen3_5", "TextModelArgs", num_experts=0),
    "qwen3_5_moe": _text("qwen3_5", "TextModelArgs"),
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {"use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 100.0, "factor": 1.0}},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": _text("kimi_k3", "TextArgs", linear_attn_config=KDA, q_lora_rank=24,
                     attn_res_block_size=2, num_expert_group=1, activation_situ_beta=1.0),
    "kimi_linear": {"linear_attn_config": KDA, "num_expert_group": 1},
    "lfm2": LFM2,
    "lfm2-vl": _text("lfm2", **LFM2),
    "lfm2_moe": {"use_expert_bias": True, "layer_types": ["conv", FULL] * 2},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"num_layers": 2},  # two attentions each; more of them amplify rounding
    "longcat_flash_ngram": {"num_layers": 2},
    "mellum": {"rope_parameters": BY_TYPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "moe_layer_freq": [0, 1, 1, 1],
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope", "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 2.0, 3.0],
        },
    },
    "minimax_m3_vl": _text(
        "minimax_m3_vl", "TextArgs", layer_types=[FULL, "sparse", FULL, "sparse"],
        dense_intermediate_size=96, index_block_size=4, index_topk_blocks=2,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    ),
    "ministral3": {"rope_parameters": LLAMA4_SCALE},
    "mistral4": {"rope_parameters": LLAMA4_SCALE | {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }},
    "muse_spark": _text(
        "muse_spark", "TextArgs", post_norm_eps=1e-6, rope_parameters={"rope_theta": 10000.0},
        layer_rope_theta=[10000.0, 0.0] * 2, final_logit_softcapping=20.0,
        output_multiplier=0.5, moe_hidden_size=32, num_shared_experts=0,
    ),
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
        ],
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {"layer_types": ["mamba", "attention", "mlp", "moe"]},
    "olmo_hybrid": {
        "linear_allow_neg_eigval": True, "layer_types": ["linear_attention", FULL] * 2,
    },
    "openelm": {
        "ffn_dim_divisor": 8, "num_query_heads": [4, 4, 4, 4], "num_kv_heads": [2, 2, 2, 2],
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {
        "vocab_size": 100352, "blocksparse_block_size": 64, "blocksparse_vert_stride": 2,
        "blocksparse_num_local_blocks": 1,
       "dense_attention_every_n_layers": 2, "gegelu_limit": 20.0},
    "plamo": {"n_shared_head": 2},
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "spark2_5": {"rope_parameters": BY_TYPE},
    "stablelm": {"use_qkv_bias": True},
}  # fmt: skip


def make_args(name: str, module: Any, **changes: Any) -> Any:
    """The `ModelArgs` of a module."""
    return module.ModelArgs.from_dict(make_config(name) | changes)


def make_config(name: str) -> dict[str, Any]:
    """The configuration of a module, as a config.json would spell it."""
    special = SPECIAL.get(name, {})
    return {
        **_fields(name), "model_type": name,
        **(special() if callable(special) else special),
    }  # fmt: skip
