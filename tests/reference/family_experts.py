"""Family cases that choose experts."""

from __future__ import annotations

from typing import Any

from family_dense import EPS_OFF, MIXED_OFF, RMS, WINDOW_OFF
from family_weights import THETA, Case, Changes, Normal, Rules, Uniform, make_config

MIXTRAL = make_config(
    "mixtral", "MixtralForCausalLM", intermediate_size=32, max_position_embeddings=32768,
    num_experts_per_tok=2, num_local_experts=6, output_router_logits=False, rope_theta=1000000.0,
    router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False, **RMS,
)  # fmt: skip
QWEN_MOE: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "max_position_embeddings": 40960,
    "max_window_layers": 2,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    **RMS,
}
QWEN3_MOE = make_config(
    "qwen3_moe", "Qwen3MoeForCausalLM", attention_bias=False, head_dim=16, **QWEN_MOE
)
ONE: Changes = {"one expert": {"num_experts_per_tok": 1}}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8.0,
    "mscale": 1.4,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 256,
    "type": "yarn",
}


def yarn(**changes: Any) -> dict[str, Any]:
    """A change of the scaling in `YARN`."""
    return {"rope_scaling": {**YARN, **changes}}


YARN_OFF: Changes = {
    "no scaling": {"rope_scaling": None},
    "factor": yarn(factor=4.0),
    "mscale": yarn(mscale=0.7),
    "mscale_all_dim": yarn(mscale_all_dim=1.4),
    "original length": yarn(original_max_position_embeddings=2048),
    "beta_fast": yarn(beta_fast=2),
    "beta_slow": yarn(beta_slow=0.125),
}
DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "intermediate_size": 32,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rope_scaling": YARN,
    "rope_theta": 20000,
    "routed_scaling_factor": 1.6,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 8,
    **RMS,
}
DEEPSEEK_RULES: Rules = {r"(q_b_proj|q_proj|kv_a_proj_with_mqa)\.weight$": Normal(1.7)}
DEEPSEEK_V2 = make_config(
    "deepseek_v2", "DeepseekV2ForCausalLM", aux_loss_alpha=0.001, ep_size=1, norm_topk_prob=False,
    scoring_func="softmax", seq_aux=True, topk_method="group_limited_greedy", **DEEPSEEK,
)  # fmt: skip
DEEPSEEK_OFF: Changes = {
    **EPS_OFF,
    **THETA,
    **ONE,
    **YARN_OFF,
    "scale of experts": {"routed_scaling_factor": 1.0},
    "all groups": {"topk_group": 2},
}
GPT_OSS_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "rope_type": "yarn",
    "truncate": False,
}

EXPERTS: dict[str, Case] = {
    "mixtral": Case(MIXTRAL, off={**EPS_OFF, **THETA, **ONE}),
    "mixtral-window": Case({**MIXTRAL, "sliding_window": 24}, off=WINDOW_OFF),
    "qwen3_moe": Case(
        QWEN3_MOE,
        off={**EPS_OFF, **THETA, **ONE, "weights as they are": {"norm_topk_prob": False}},
    ),
    "qwen3_moe-step": Case(
        {**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False},
        off={"normalised weights": {"norm_topk_prob": True}},
    ),
    "gpt_oss": Case(
        make_config(
            "gpt_oss", "GptOssForCausalLM", attention_bias=True, experts_per_token=2, head_dim=8,
            initial_context_length=128, intermediate_size=32,
            layer_types=["sliding_attention", "full_attention"], max_position_embeddings=1024,
            num_experts_per_tok=2, num_local_experts=6, output_router_logits=False, pad_token_id=0,
            rope_scaling=GPT_OSS_YARN, rope_theta=20000, router_aux_loss_coef=0.9,
            sliding_window=24, swiglu_limit=1.0, tie_word_embeddings=False, **RMS,
        ),
        rules={
            r"sinks$": Uniform(1.0, 4.0),
            r"_bias$": Normal(0.3, axis=None),
            r"experts\.\w+_proj$": Normal(1.0, axis=1),
            r"router\.weight$": Normal(2.0),
        },
        off={
            **EPS_OFF,
            **THETA,
            **ONE,
            **MIXED_OFF,
            "limit": {"swiglu_limit": 7.0},
            "order of layers": {"layer_types": ["full_attention", "sliding_attention"]},
            "no scaling": {"rope_scaling": None},
            "truncate": {"rope_scaling": {**GPT_OSS_YARN, "truncate": True}},
        },
    ),
    "deepseek_v2": Case(DEEPSEEK_V2, rules=DEEPSEEK_RULES, off=DEEPSEEK_OFF),
    # As the Lite models are: no low rank for queries, no groups.
    "deepseek_v2-lite": Case(
        {
            **DEEPSEEK_V2,
            "n_group": 1,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "rope_scaling": None,
            "topk_method": "greedy",
        },
        rules=DEEPSEEK_RULES,
        off={**EPS_OFF, **THETA, **ONE},
    ),
    "deepseek_v3": Case(
        make_config(
            "deepseek_v3", "DeepseekV3ForCausalLM", ep_size=1, norm_topk_prob=True,
            num_nextn_predict_layers=1, scoring_func="sigmoid", topk_method="noaux_tc", **DEEPSEEK,
        ),
        rules=DEEPSEEK_RULES,
        off={
            **DEEPSEEK_OFF,
            "weights as they are": {"norm_topk_prob": False},
            "halves": {"rope_interleave": False},
        },
        ignored={"model.layers.61.eh_proj.weight": (32, 64)},
    ),
    "qwen2_moe": Case(
        make_config(
            "qwen2_moe", "Qwen2MoeForCausalLM", shared_expert_intermediate_size=32,
            **{**QWEN_MOE, "norm_topk_prob": False},
        ),
        off={**EPS_OFF, **THETA, **ONE, "normalised weights": {"norm_topk_prob": True}},
    ),
    "granitemoe": Case(
        make_config(
            "granitemoe", "GraniteMoeForCausalLM", attention_bias=False, attention_multiplier=0.2,
            embedding_multiplier=3.0, intermediate_size=32, logits_scaling=2.0,
            num_experts_per_tok=2, num_hidden_layers=1, num_local_experts=6,
            output_router_logits=False, pad_token_id=0, residual_multiplier=0.6, rope_scaling=None,
            rope_theta=1000000.0, router_aux_loss_coef=0.0, tie_word_embeddings=True, **RMS,
        ),
        rules={r"\.[qk]_proj\.weight$": Normal(2.2), r"router\.layer\.weight$": Normal(2.0)},
        off={
            **EPS_OFF,
            **THETA,
            **ONE,
            "attention": {"attention_multiplier": 8**-0.5},
            "embedding": {"embedding_multiplier": 1.0},
            "residual": {"residual_multiplier": 1.0},
            "logits": {"logits_scaling": 1.0},
        },
    ),
    "glm4_moe": Case(
        make_config(
            "glm4_moe", "Glm4MoeForCausalLM", attention_bias=True, eos_token_id=[2, 3],
            first_k_dense_replace=1, head_dim=16, intermediate_size=32, moe_intermediate_size=32,
            n_group=1, n_routed_experts=6, n_shared_experts=1, norm_topk_prob=True,
            num_experts_per_tok=2, num_nextn_predict_layers=1, pad_token_id=0,
            partial_rotary_factor=0.5, rope_scaling=None, rope_theta=1000000,
            routed_scaling_factor=1.6, tie_word_embeddings=False, topk_group=1, use_qk_norm=True,
            **RMS,
        ),
        off={
            **EPS_OFF,
            **THETA,
            **ONE,
            "partial": {"partial_rotary_factor": 1.0},
            "scale of experts": {"routed_scaling_factor": 1.0},
            "weights as they are": {"norm_topk_prob": False},
        },
    ),
}  # fmt: skip
