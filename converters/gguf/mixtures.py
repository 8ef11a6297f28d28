"""Configs of GGUF architectures with experts, see `dense`."""

from __future__ import annotations

from converters.gguf.config import EPSILON, Config, expert_count, layer_types, plain
from converters.gguf.dense import granite
from converters.gguf.metadata import Metadata
from converters.gguf.rope import rope_scaling

SIGMOID = 2  # value of expert_gating_func


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
    if (gating := own.get("expert_gating_func", SIGMOID)) != SIGMOID:
        raise own.unusable("expert_gating_func", str(SIGMOID), gating)
    return {
        **config,
        **_routed(own),
        "num_hidden_layers": config["num_hidden_layers"] - (own.get("nextn_predict_layers") or 0),
        "attention_bias": own.has("blk.0.attn_q.bias"),
        "use_qk_norm": own.has("blk.0.attn_q_norm.weight"),
        "norm_topk_prob": bool(own.get("expert_weights_norm", True)),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def dots1(own: Metadata) -> Config:
    """dots.llm1."""
    if (gating := own.get("expert_gating_func", SIGMOID)) != SIGMOID:
        raise own.unusable("expert_gating_func", str(SIGMOID), gating)
    return {
        **plain(own, "dots1"),
        **_routed(own),
        "norm_topk_prob": bool(own.get("expert_weights_norm")),
        "sliding_window": None,
    }


def ernie_moe(own: Metadata) -> Config:
    """ERNIE 4.5 with experts."""
    own.get("expert_shared_feed_forward_length")  # the tensors tell
    width = expert_width(own)
    shared = next(
        (t.shape[0] for n, t in own.tensors.items() if n.endswith(".ffn_gate_shexp.weight")), 0
    )
    own.get("expert_shared_count")
    return {
        **plain(own, "ernie4_5_moe"),
        "use_bias": own.has("blk.0.attn_q.bias"),
        "moe_num_experts": expert_count(own),
        "moe_k": own.count("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared // width,
        "moe_layer_start_index": own.get("leading_dense_block_count") or 0,
        "moe_layer_interval": own.count("interleave_moe_layer_step", 1),
    }


def deepseek(own: Metadata) -> Config:
    """DeepSeek-V2, or V3 where experts are scored by sigmoids; without experts either is the same.

    GLM-4.7-Flash and Youtu are written so too.
    """
    gating = own.get("expert_gating_func")
    corrected = any(name.endswith(".exp_probs_b.bias") for name in own.tensors)
    mixture = _routed(own) if own.get("expert_count") else _dense_layers(own)
    later = gating == SIGMOID or (not gating and corrected) or not own.get("expert_count")
    config = {
        "model_type": "deepseek_v3" if later else "deepseek_v2",
        **latent(own),
        **mixture,
    }
    norm = bool(own.get("expert_weights_norm"))
    if later:
        return {**config, "norm_topk_prob": norm}
    greedy = mixture["n_group"] == 1
    return {**config, "topk_method": "greedy" if greedy else "group_limited_greedy"}


def _dense_layers(own: Metadata) -> Config:
    """What a config with experts says where no layer has any."""
    for key in ("expert_shared_count", "expert_feed_forward_length", "leading_dense_block_count"):
        own.get(key)
    return {
        "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1,
        "moe_intermediate_size": own.count("feed_forward_length"),
        "first_k_dense_replace": own.layers(), "n_group": 1, "topk_group": 1,
    }  # fmt: skip


def minicpm3(own: Metadata) -> Config:
    """MiniCPM3, of which llama.cpp knows one, with its scales."""
    return {
        "model_type": "minicpm3", **latent(own),
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    }  # fmt: skip


def latent(own: Metadata) -> Config:
    """What models with latent attention share."""
    dims, rank = own.count("rope.dimension_count"), own.count("attention.kv_lora_rank")
    heads, layers = own.count("attention.head_count"), own.layers()
    output = own.tensors.get("blk.0.attn_output.weight")
    wide = output.shape[-1] if output is not None else heads
    keys = own.count("attention.key_length_mla", own.get("attention.key_length"))
    values = own.count(
        "attention.value_length_mla", own.get("attention.value_length", wide // heads or None)
    )
    own.get("attention.key_length")
    own.get("attention.value_length")  # of latents, where there are the others
    if heads * values != wide:
        raise own.unusable("attention.head_count", f"heads of {values} in {wide}", heads)
    own.get("attention.head_count_kv")  # 1 or as many: latents are shared by all heads
    theta = own.number("rope.freq_base", 10000.0)
    return {
        "vocab_size": own.count("vocab_size", own.rows("token_embd.weight")),
        "hidden_size": own.count("embedding_length"),
        "intermediate_size": own.count("feed_forward_length"),
        "num_hidden_layers": layers - (own.get("nextn_predict_layers") or 0),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": own.number(EPSILON),
        "max_position_embeddings": own.count("context_length"),
        "tie_word_embeddings": not own.has("output.weight"),
        "attention_bias": own.has("blk.0.attn_output.bias"),
        "q_lora_rank": own.get("attention.q_lora_rank"),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": dims,
        "qk_nope_head_dim": keys - dims,
        "v_head_dim": values,
        "rope_theta": theta,
        "rope_scaling": _yarn_of_latents(own, theta, dims),
    }


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
