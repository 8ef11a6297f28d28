"""Family cases with a state instead of keys and values in some layers."""

from __future__ import annotations

from typing import Any

from family_dense import EPS_OFF, RMS
from family_weights import (
    EPS,
    NEW,
    NORM,
    OFFSET_NORM,
    THETA,
    Case,
    Changes,
    Normal,
    Rules,
    Uniform,
    make_config,
)

MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "bos_token_id": 0,
    "chunk_size": 64,
    "conv_kernel": 4,
    "eos_token_id": 0,
    "expand": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.1,
    "layer_norm_epsilon": EPS,
    "model_type": "mamba2",
    "n_groups": 2,
    "norm_before_gate": False,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 16,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 2,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 96,
}
# Decays from a few tokens to hundreds.
SCAN_RULES: Rules = {
    r"A_log$": Uniform(-1.5, 1.5),
    r"dt_bias$": Uniform(-4.0, 0.0),
    r"\.D$": Uniform(0.2, 1.8),
}
MAMBA2_OFF: Changes = {"layer_norm_epsilon": {"layer_norm_epsilon": 1e-5}}
LFM2 = make_config(
    "lfm2", "Lfm2ForCausalLM", attention_dropout=..., block_auto_adjust_ff_dim=True, block_dim=32,
    block_ff_dim=96, block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=32,
    block_norm_eps=EPS, block_out_init_scale=1.0, block_use_swiglu=True,
    block_use_xavier_init=True, conv_L_cache=3, conv_bias=False, conv_dim=32, conv_dim_out=32,
    conv_use_xavier_init=True, full_attn_idxs=[1], hidden_act=..., intermediate_size=...,
    norm_eps=EPS, num_heads=4, num_hidden_layers=3, pad_token_id=0, rope_theta=1000000.0,
    use_pos_enc=True,
)  # fmt: skip
LFM2_OFF: Changes = {
    **THETA,
    "norm_eps": {"norm_eps": 1e-5},
}
DELTA: dict[str, Any] = {
    "attention_bias": False,
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": False,
    **RMS,
}
DELTA_RULES: Rules = {
    **SCAN_RULES,
    r"linear_attn\.norm\.weight$": NORM,
    r"\.[qk]_norm\.weight$": Uniform(0.0, 1.4),
    r"norm\.weight$": OFFSET_NORM,
    r"in_proj_(ba|b|a)\.weight$": Normal(1.5),
    r"\.out_proj\.weight$": Normal(0.7),
}
QWEN3_5_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "rope_type": "default",
}
QWEN3_5 = {
    **make_config(
        "qwen3_5_text", "Qwen3_5ForCausalLM", attn_output_gate=True,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        mamba_ssm_dtype="float32", num_hidden_layers=3, rope_parameters=QWEN3_5_ROPE,
        torch_dtype=..., **DELTA,
    ),
    **NEW,
}  # fmt: skip
QWEN3_5_MOE = {
    **QWEN3_5,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 32,
}
del QWEN3_5_MOE["intermediate_size"]
QWEN3_5_OFF: Changes = {
    **EPS_OFF,
    "theta": {"rope_parameters": {**QWEN3_5_ROPE, "rope_theta": 10000}},
    "partial": {"rope_parameters": {**QWEN3_5_ROPE, "partial_rotary_factor": 1.0}},
}
TEXT_AND_IMAGES: dict[str, Any] = {
    "renamed": {r"^model\.(language_model\.)?": "model.language_model."},
    "ignored": {"mtp.norm.weight": (32,), "model.visual.merger.norm.weight": (32,)},
}


def with_images(text: dict[str, Any], model_type: str, architecture: str) -> dict[str, Any]:
    """config.json of a checkpoint for text and images whose text part is `text`."""
    return {
        "architectures": [architecture],
        "image_token_id": 90,
        "model_type": model_type,
        "text_config": {k: v for k, v in text.items() if k not in ("architectures", *NEW)},
        "tie_word_embeddings": False,
        "video_token_id": 91,
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "model_type": model_type,
            "num_heads": 4,
            "out_hidden_size": 32,
        },
        "vision_end_token_id": 93,
        "vision_start_token_id": 92,
        **NEW,
    }


RECURRENT: dict[str, Case] = {
    "mamba2": Case(MAMBA2, rules=SCAN_RULES, off=MAMBA2_OFF),
    # A step of one token ignores the limit in transformers: none is fed.
    "mamba2-bias": Case(
        {**MAMBA2, "use_bias": True, "use_conv_bias": False, "time_step_limit": [0.05, 0.4]},
        rules=SCAN_RULES,
        off={**MAMBA2_OFF, "limit": {"time_step_limit": [0.0, float("inf")]}},
        chunks=(200, 24, 7, 309),
    ),
    "lfm2": Case(LFM2, off=LFM2_OFF),
    # As later ones are: which layer does what is spelled out, and so is the size of the MLP.
    "lfm2-bias": Case(
        {
            **{k: v for k, v in LFM2.items() if not k.startswith(("block_", "full_"))},
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "intermediate_size": 64,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        off=LFM2_OFF,
    ),
    "qwen3_next": Case(
        make_config(
            "qwen3_next", "Qwen3NextForCausalLM", decoder_sparse_step=1, mlp_only_layers=[0],
            moe_intermediate_size=32, norm_topk_prob=True, num_experts=6, num_experts_per_tok=2,
            output_router_logits=False, partial_rotary_factor=0.5, rope_scaling=None,
            rope_theta=1000000, router_aux_loss_coef=0.001, shared_expert_intermediate_size=32,
            use_sliding_window=False, **DELTA,
        ),
        rules=DELTA_RULES,
        off={
            **EPS_OFF,
            **THETA,
            "one expert": {"num_experts_per_tok": 1},
            "weights as they are": {"norm_topk_prob": False},
            "partial": {"partial_rotary_factor": 1.0},
        },
        ignored={"mtp.norm.weight": (32,)},
    ),
    "qwen3_5": Case(
        with_images(QWEN3_5, "qwen3_5", "Qwen3_5ForConditionalGeneration"),
        rules=DELTA_RULES,
        **TEXT_AND_IMAGES,
    ),
    "qwen3_5_text": Case(QWEN3_5, rules=DELTA_RULES, off=QWEN3_5_OFF),
    "qwen3_5_moe": Case(
        with_images(QWEN3_5_MOE, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
        rules=DELTA_RULES,
        stacked=True,
        **TEXT_AND_IMAGES,
    ),
    "qwen3_5_moe_text": Case(
        QWEN3_5_MOE,
        rules=DELTA_RULES,
        stacked=True,
        off={**QWEN3_5_OFF, "one expert": {"num_experts_per_tok": 1}},
    ),
}  # fmt: skip
