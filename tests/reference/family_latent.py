"""Family cases with latent attention, or with DeepSeek's experts, beside DeepSeek's own."""

from __future__ import annotations

from typing import Any

from family_dense import EPS_OFF, LONG, RMS, SHORT
from family_experts import DEEPSEEK_RULES, ONE
from family_weights import THETA, Case, Normal, make_config

LATENT_SIZES: dict[str, Any] = {
    "kv_lora_rank": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    **RMS,
}
EXPERTS: dict[str, Any] = {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.6,
    "tie_word_embeddings": False,
    "topk_group": 1,
}
EXPERTS_OFF = {
    **EPS_OFF,
    **THETA,
    **ONE,
    "scale of experts": {"routed_scaling_factor": 1.0},
    "weights as they are": {"norm_topk_prob": False},
}
HALVES = {"halves": {"rope_interleave": False}}
SHARP = {r"(q_b_proj|kv_a_proj_with_mqa)\.weight$": Normal(2.2)}
LONGROPE = {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}

LATENT: dict[str, Case] = {
    "youtu": Case(
        make_config(
            "youtu", "YoutuForCausalLM", attention_bias=True, embedding_initializer_range=0.04,
            mlp_bias=False, rope_interleave=True, rope_scaling=None, rope_theta=20000,
            tie_word_embeddings=True, **LATENT_SIZES,
        ),
        rules=SHARP,
        off={**EPS_OFF, **THETA, **HALVES},
    ),
    # Its published file has no v_head_dim and no tie_word_embeddings.
    "minicpm3": Case(
        make_config(
            "minicpm3", "MiniCPM3ForCausalLM", dim_model_base=16, scale_depth=1.0, scale_emb=3,
            rope_theta=20000.0,
            rope_scaling={**LONGROPE, "original_max_position_embeddings": 640},
            **{**LATENT_SIZES, "v_head_dim": ...},
        ),
        rules=SHARP,
        off={
            **EPS_OFF,
            **THETA,
            "logits": {"dim_model_base": None},
            "residual": {"scale_depth": None},
            "embedding": {"scale_emb": 1},
            "no scaling": {"rope_scaling": None},
        },
    ),
    "dots1": Case(
        make_config(
            "dots1", "Dots1ForCausalLM", max_window_layers=1, moe_layer_freq=1,
            num_hidden_layers=3, pretraining_tp=1, rope_scaling=None, rope_theta=1000000,
            scoring_func="noaux_tc", sliding_window=24, **EXPERTS, **RMS,
        ),
        off={
            **EXPERTS_OFF,
            "window - 1": {"sliding_window": 23},
            "window + 1": {"sliding_window": 25},
            "windows from": {"max_window_layers": 2},
        },
    ),
    "glm4_moe_lite": Case(
        make_config(
            "glm4_moe_lite", "Glm4MoeLiteForCausalLM", eos_token_id=[2, 3], pad_token_id=0,
            num_nextn_predict_layers=1, partial_rotary_factor=1.0, rope_scaling=None,
            rope_theta=1000000, topk_method="noaux_tc", **EXPERTS, **LATENT_SIZES,
        ),
        rules=DEEPSEEK_RULES,
        off={**EXPERTS_OFF, **HALVES},
        ignored={"model.layers.47.eh_proj.weight": (32, 64)},
    ),
    "ernie4_5_moe": Case(
        make_config(
            "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", attention_dropout=..., head_dim=16,
            intermediate_size=32, moe_capacity=[6, 6, 6], moe_gate="topk",
            moe_intermediate_size=32, moe_k=2, moe_layer_end_index=2, moe_layer_interval=1,
            moe_layer_start_index=1, moe_num_experts=6, moe_num_shared_experts=1,
            moe_use_aux_free=True, num_hidden_layers=3, num_nextn_predict_layers=1,
            pad_token_id=0, rope_theta=20000.0, tie_word_embeddings=True, use_bias=False, **RMS,
        ),
        off={
            **EPS_OFF,
            **THETA,
            "one expert": {"moe_k": 1},
            "divisor": {"moe_norm_min": 2.0},
        },
        ignored={"model.mtp_linear_proj.0.weight": (32, 64)},
    ),
}  # fmt: skip
