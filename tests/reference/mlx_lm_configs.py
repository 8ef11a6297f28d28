"""A tiny configuration for every module of mlx-lm, whose windows, experts and groups matter.

`RULES` gives each field a small value wherever a module has a field of that name; `SPECIAL` says
what differs for single modules. Windows and chunks are shorter than the prompts of the checks,
query heads share key heads, and experts are more than those chosen.
"""

from __future__ import annotations

import dataclasses
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

SPECIAL: dict[str, dict[str, Any]] = {}


def make_args(name: str, module: Any, **changes: Any) -> Any:
    """The `ModelArgs` of a module."""
    config = make_config(name, module) | changes
    return module.ModelArgs.from_dict(config)


def make_config(name: str, module: Any) -> dict[str, Any]:
    """The configuration of a module, as a config.json would spell it."""
    config: dict[str, Any] = {"model_type": name}
    special = SPECIAL.get(name, {})
    for field in dataclasses.fields(module.ModelArgs):
        if field.name in RULES and RULES[field.name] is not None:
            config[field.name] = RULES[field.name]
        elif field.name == "layer_types":
            config["layer_types"] = [SLIDING, FULL] * 2
    return {key: value for key, value in {**config, **special}.items() if value != "absent"}
