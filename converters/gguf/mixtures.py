"""Configs of GGUF architectures with experts, see `dense`."""

from __future__ import annotations

from converters.gguf.config import EPSILON, Config, expert_count, layer_types, plain
from converters.gguf.dense import granite
from converters.gguf.metadata import Metadata
from converters.gguf.rope import rope_scaling

_SIGMOID = 2  # value of expert_gating_func


def qwen2_moe(own: Metadata) -> Config:
    """Qwen1.5-MoE and Qwen2-MoE."""
    return {
        **plain(own, "qwen2_moe"),
        "num_experts": expert_count(own),
        "num_experts_per_tok": own.count("expert_used_count"),
        **shared_expert(own),
        "norm_topk_prob": False,
    }


def granitemoe(own: Metadata) -> Config:
    """Granite 3 with experts."""
    return {
        **granite(own),
        "model_type": "granitemoe",
        "num_local_experts": expert_count(own),
        "num_experts_per_tok": own.count("expert_used_count"),
    }


def qwen3_moe(own: Metadata) -> Config:
    """Qwen3-MoE."""
    return {
        **plain(own, "qwen3_moe"),
        "attention_bias": own.has("blk.0.attn_q.bias"),
        "num_experts": expert_count(own),
        "num_experts_per_tok": own.count("expert_used_count"),
        "moe_intermediate_size": expert_width(own),
        "norm_topk_prob": True,
    }


def shared_expert(own: Metadata) -> Config:
    """The widths of experts, and of the one that all tokens go through."""
    return {
        "moe_intermediate_size": expert_width(own),
        "shared_expert_intermediate_size": own.count(
            "expert_shared_feed_forward_length", own.rows("blk.0.ffn_gate_shexp.weight")
        ),
    }


def expert_width(own: Metadata) -> int:
    """F of one expert."""
    stacks = (t.shape[1] for n, t in own.tensors.items() if n.endswith(".ffn_gate_exps.weight"))
    return own.count("expert_feed_forward_length", next(stacks, None))


def gpt_oss(own: Metadata) -> Config:
    """gpt-oss."""
    config = plain(own, "gpt_oss")
    if config["rope_scaling"]:
        config["rope_scaling"]["truncate"] = False
    return {
        **config,
        "intermediate_size": expert_width(own),
        "num_local_experts": expert_count(own),
        "num_experts_per_tok": own.count("expert_used_count"),
        "sliding_window": own.count("attention.sliding_window"),
        "layer_types": layer_types(own, config["num_hidden_layers"], 2),
    }


def glm4_moe(own: Metadata) -> Config:
    """GLM-4.5, whose last blocks may predict further ahead."""
    config = plain(own, "glm4_moe")
    if (gating := own.get("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise own.unusable("expert_gating_func", str(_SIGMOID), gating)
    return {
        **config,
        **_routed(own),
        "num_hidden_layers": config["num_hidden_layers"] - (own.get("nextn_predict_layers") or 0),
        "attention_bias": own.has("blk.0.attn_q.bias"),
        "use_qk_norm": own.has("blk.0.attn_q_norm.weight"),
        "norm_topk_prob": bool(own.get("expert_weights_norm", True)),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def deepseek(own: Metadata) -> Config:
    """DeepSeek-V2, or V3 where experts are scored by sigmoids."""
    dims, latent = own.count("rope.dimension_count"), own.count("attention.kv_lora_rank")
    keys = own.count("attention.key_length_mla", own.get("attention.key_length"))
    values = own.count("attention.value_length_mla", own.get("attention.value_length"))
    corrected = own.get("expert_gating_func") == _SIGMOID
    layers, heads = own.layers(), own.count("attention.head_count")
    if heads * values != (columns := own.tensors["blk.0.attn_output.weight"].shape[-1]):
        raise own.unusable("attention.head_count", f"heads of {values} in {columns}", heads)
    own.get("attention.head_count_kv")  # 1 or as many: latents are shared by all heads
    theta = own.number("rope.freq_base", 10000.0)
    config = {
        "model_type": "deepseek_v3" if corrected else "deepseek_v2",
        "vocab_size": own.count("vocab_size", own.rows("token_embd.weight")),
        "hidden_size": own.count("embedding_length"),
        "intermediate_size": own.count("feed_forward_length"),
        "num_hidden_layers": layers - (own.get("nextn_predict_layers") or 0),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": own.number(EPSILON),
        "max_position_embeddings": own.count("context_length"),
        "tie_word_embeddings": not own.has("output.weight"),
        "q_lora_rank": own.get("attention.q_lora_rank"),
        "kv_lora_rank": latent,
        "qk_rope_head_dim": dims,
        "qk_nope_head_dim": keys - dims,
        "v_head_dim": values,
        "rope_theta": theta,
        "rope_scaling": _yarn_of_latents(own, theta, dims),
        **_routed(own),
    }
    if corrected:
        return {**config, "norm_topk_prob": bool(own.get("expert_weights_norm"))}
    own.get("expert_weights_norm")
    greedy = config["n_group"] == 1
    return {**config, "topk_method": "greedy" if greedy else "group_limited_greedy"}


def _yarn_of_latents(own: Metadata, theta: float, dims: int) -> Config | None:
    scaling = rope_scaling(own, theta, dims)
    # A tenth of what multiplies the logarithm, in scores; in cos and sin nothing is left of it.
    if not own.get("rope.scaling.yarn_log_multiplier") or scaling is None:
        return scaling
    rounded = float(f"{own.number('rope.scaling.yarn_log_multiplier') * 10:.6g}")
    return {**scaling, "mscale": rounded, "mscale_all_dim": rounded}


def _routed(own: Metadata) -> Config:
    groups = own.get("expert_group_count") or 1
    return {
        "n_routed_experts": expert_count(own),
        "n_shared_experts": own.count("expert_shared_count"),
        "num_experts_per_tok": own.count("expert_used_count"),
        "moe_intermediate_size": expert_width(own),
        "first_k_dense_replace": own.get("leading_dense_block_count") or 0,
        "routed_scaling_factor": own.get("expert_weights_scale") or 1.0,
        "n_group": groups,
        "topk_group": own.get("expert_group_used_count") or 1,
    }
