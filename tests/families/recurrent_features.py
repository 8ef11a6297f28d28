"""Features of families with a state instead of keys and values, see `features`."""

from __future__ import annotations

from typing import Any

_ONE = {"one expert": {"num_experts_per_tok": 1}}

EXTRA: dict[str, dict[str, dict[str, Any]]] = {
    "mamba2": {"a bound of the steps": {"time_step_limit": [0.1, 0.5]}},
    "mamba2-bias": {
        "no bound from above": {"time_step_limit": [0.05, float("inf")]},
        "no bound from below": {"time_step_limit": [0.0, 0.4]},
    },
    "lfm2_moe": _ONE,
    "qwen3_next": _ONE,
    "qwen3_5_moe": {"one expert": {"text_config.num_experts_per_tok": 1}},
    "qwen3_5_moe_text": _ONE,
}

_MAMBA2 = {
    # Of the scan in pieces, of training, or what transformers does not read either.
    "chunk_size", "norm_before_gate", "rescale_prenorm_residual", "time_step_floor",
    "time_step_max", "time_step_min", "time_step_rank",
    "residual_in_fp32",  # in float32 there is nothing else
    "time_step_limit",  # see above
}  # fmt: skip
_LFM2 = {
    # What transformers does not read, or of training.
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads",
    "block_multiple_of",  # 64 and 32 of these sizes are the same
}  # fmt: skip
_LISTED = {"full_attention_interval"}  # `layer_types` says more
_LOSSES = {"output_router_logits", "router_aux_loss_coef"}
_QWEN3_5 = {*_LISTED, "rope_parameters.mrope_interleaved"}
_TRAINING = {"attention_dropout", "initializer_range", "use_cache"}
_BOUNDS = {"bos_token_id", "eos_token_id", "max_position_embeddings"}
_VISION = {"depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size"}
_MARKS = {"image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id"}


def _with_images(idle: set[str]) -> set[str]:
    """The same where config.json has a `text_config`."""
    inside = idle | _TRAINING | _BOUNDS
    return {
        *_MARKS,
        *(f"text_config.{key}" for key in inside),
        *(f"vision_config.{key}" for key in _VISION),
    }


IDLE: dict[str, set[str]] = {
    "mamba2": _MAMBA2,
    "lfm2": _LFM2,
    "qwen3_next": {*_LOSSES, "use_sliding_window"},
    "qwen3_5": _with_images(_QWEN3_5),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _with_images(_QWEN3_5 | _LOSSES),
    "qwen3_5_moe_text": _QWEN3_5 | _LOSSES,
}
