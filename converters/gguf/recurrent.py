"""Configs of GGUF architectures with layers that remember otherwise than by keys, see `dense`."""

from __future__ import annotations

from converters.gguf.config import EPSILON, FULL, Config, expert_count, plain, without
from converters.gguf.metadata import Metadata
from converters.gguf.mixtures import SIGMOID, expert_width, shared_expert


def lfm2(own: Metadata) -> Config:
    """LFM2, whose layers without key heads are convolutions."""
    layers = own.layers()
    kv_heads = own.get("attention.head_count_kv")
    listed = kv_heads if isinstance(kv_heads, list) else [kv_heads] * layers
    present = sorted({count for count in listed if count})
    if len(listed) != layers or len(present) != 1:
        raise own.unusable("attention.head_count_kv", f"0 or one number, {layers} times", kv_heads)
    hidden, heads = own.count("embedding_length"), own.count("attention.head_count")
    if heads > hidden:
        raise own.unusable("attention.head_count", f"at most {hidden}", heads)
    return {
        "model_type": "lfm2",
        "vocab_size": own.count("vocab_size", own.rows("token_embd.weight")),
        "hidden_size": hidden,
        "intermediate_size": own.count("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": present[0],
        "norm_eps": own.number(EPSILON),
        "max_position_embeddings": own.count("context_length"),
        "tie_word_embeddings": not own.has("output.weight"),
        "rope_theta": own.number("rope.freq_base", 10000.0),
        "conv_L_cache": own.count("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in own.tensors),
        "layer_types": [FULL if count else "conv" for count in listed],
    }


def lfm2_moe(own: Metadata) -> Config:
    """LFM2 with experts after the first layers."""
    if (gating := own.get("expert_gating_func")) != SIGMOID:
        raise own.unusable("expert_gating_func", str(SIGMOID), gating)
    return {
        **without(lfm2(own), "block_auto_adjust_ff_dim"),
        "model_type": "lfm2_moe",
        "num_experts": expert_count(own),
        "num_experts_per_tok": own.count("expert_used_count"),
        "moe_intermediate_size": expert_width(own),
        "num_dense_layers": own.get("leading_dense_block_count") or 0,
        "routed_scaling_factor": own.get("expert_weights_scale") or 1.0,
    }


def mamba2(own: Metadata) -> Config:
    """Mamba-2."""
    layers, hidden = own.layers(), own.count("embedding_length")
    inner, heads = own.count("ssm.inner_size"), own.count("ssm.time_step_rank")
    for key in ("attention.head_count", "feed_forward_length"):
        own.get(key)  # written as 0
    return {
        "model_type": "mamba2",
        "vocab_size": own.rows("token_embd.weight"),
        "hidden_size": hidden,
        "expand": inner // hidden,
        "num_hidden_layers": layers,
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": own.count("ssm.group_count"),
        "state_size": own.count("ssm.state_size"),
        "conv_kernel": own.count("ssm.conv_kernel"),
        "layer_norm_epsilon": own.number(EPSILON),
        "max_position_embeddings": own.count("context_length"),
        "tie_word_embeddings": not own.has("output.weight"),
        "use_bias": own.has("blk.0.ssm_in.bias"),
        "use_conv_bias": own.has("blk.0.ssm_conv1d.bias"),
        "time_step_limit": None,
    }


def qwen3_next(own: Metadata) -> Config:
    """Qwen3-Next."""
    return {**_delta(own, "qwen3_next"), **_choosing(own), "norm_topk_prob": True}


def qwen3_5(own: Metadata) -> Config:
    """The text model of Qwen3.5."""
    return _delta(own, "qwen3_5_text")


def qwen3_5_moe(own: Metadata) -> Config:
    """The text model of Qwen3.5 with experts."""
    return {**_delta(own, "qwen3_5_moe_text"), **_choosing(own)}


def _delta(own: Metadata, model_type: str) -> Config:
    own.get("rope.dimension_sections")  # of images
    config = plain(own, model_type, width=model_type != "qwen3_5_moe_text")
    layers = config["num_hidden_layers"] - (own.get("nextn_predict_layers") or 0)
    interval = own.count("full_attention_interval", 4)
    recurrent = own.flags("attention.recurrent_layers", layers)
    if not isinstance(recurrent, list):
        recurrent = [bool((i + 1) % (recurrent or interval)) for i in range(layers)]
    heads = own.count("ssm.time_step_rank")
    return {
        **config,
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if flag else FULL for flag in recurrent],
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "linear_conv_kernel_dim": own.count("ssm.conv_kernel"),
        "linear_key_head_dim": own.count("ssm.state_size"),
        "linear_num_key_heads": own.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": own.count("ssm.inner_size") // heads,
    }


def _choosing(own: Metadata) -> Config:
    return {
        "num_experts": expert_count(own),
        "num_experts_per_tok": own.count("expert_used_count"),
        **shared_expert(own),
    }
