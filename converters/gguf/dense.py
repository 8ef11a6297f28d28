"""Configs of GGUF architectures whose layers all have one MLP.

Keys that a converter leaves out take the value that llama.cpp assumes for the architecture.
"""

from __future__ import annotations

from converters.gguf.config import FULL, SLIDING, Config, expert_count, layer_types, plain, without
from converters.gguf.metadata import Metadata


def llama(own: Metadata) -> Config:
    """Llama and Mistral, or Mixtral where there are experts."""
    config = plain(own, "llama")
    if own.get("expert_count"):
        used = own.count("expert_used_count")
        return {
            **config, "model_type": "mixtral", "num_local_experts": expert_count(own),
            "num_experts_per_tok": used, "sliding_window": None,
        }  # fmt: skip
    return {
        **config,
        "hidden_act": "silu",
        "attention_bias": own.has("blk.0.attn_q.bias"),
        "mlp_bias": own.has("blk.0.ffn_gate.bias"),
    }


def qwen2(own: Metadata) -> Config:
    """Qwen2 and Qwen2.5."""
    return plain(own, "qwen2")


def qwen3(own: Metadata) -> Config:
    """Qwen3."""
    return {**plain(own, "qwen3"), "attention_bias": own.has("blk.0.attn_q.bias")}


def ernie(own: Metadata) -> Config:
    """ERNIE 4.5."""
    return {**plain(own, "ernie4_5"), "use_bias": own.has("blk.0.attn_q.bias")}


def granite(own: Metadata) -> Config:
    """Granite 3. Those of Granite 4 say `finetuned` where nothing turns."""
    if own.get("rope.scaling.finetuned", True) is False:
        raise own.unusable("rope.scaling.finetuned", "true, for a model that turns", False)
    head_dim = own.count("embedding_length") // own.count("attention.head_count")
    return {
        **plain(own, "granite"),
        "attention_multiplier": own.get("attention.scale") or head_dim**-0.5,
        "embedding_multiplier": own.get("embedding_scale") or 1.0,
        "residual_multiplier": own.get("residual_scale") or 1.0,
        "logits_scaling": own.number("logit_scale"),
        "attention_bias": own.has("blk.0.attn_q.bias"),
        "mlp_bias": own.has("blk.0.ffn_gate.bias"),
    }


def smollm3(own: Metadata) -> Config:
    """SmolLM3, of which every fourth layer does not turn."""
    return {**plain(own, "smollm3"), "no_rope_layer_interval": 4}


def glm4(own: Metadata) -> Config:
    """GLM-4-0414."""
    return {**plain(own, "glm4"), "attention_bias": own.has("blk.0.attn_q.bias")}


def glm(own: Metadata) -> Config:
    """GLM-4 of 2024, whose heads are as wide as their tensors."""
    heads = own.count("attention.head_count")
    config = plain(own, "glm", head_dim=(own.rows("blk.0.attn_q.weight") or 0) // heads or None)
    fused = own.has("blk.0.attn_qkv.bias")
    return {
        **config,
        "attention_bias": fused or own.has("blk.0.attn_q.bias"),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def phi3(own: Metadata) -> Config:
    """Phi-3 and Phi-4."""
    original = own.get("rope.scaling.original_context_length")
    return {
        **plain(own, "phi3"),
        "sliding_window": own.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original or own.count("context_length"),
    }


def olmo2(own: Metadata) -> Config:
    """OLMo 2, or 3 where there are windows."""
    config = plain(own, "olmo2")
    window = own.get("attention.sliding_window")
    if not window:
        return config
    local = own.number("rope.freq_base_swa", config["rope_theta"])
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    return {
        **without(config, "rope_theta", "rope_scaling"),
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(own, config["num_hidden_layers"], 4),
        "rope_parameters": {
            FULL: {**scaling, "rope_theta": config["rope_theta"]},
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def exaone4(own: Metadata) -> Config:
    """EXAONE 4.0."""
    config, window = plain(own, "exaone4"), own.get("attention.sliding_window")
    count = config["num_hidden_layers"]
    types = layer_types(own, count, 4) if window else [FULL] * count
    return {**config, "sliding_window": window or None, "layer_types": types}


def cohere(own: Metadata) -> Config:
    """Command R."""
    return {
        **without(plain(own, "cohere", "layer_norm_eps"), "head_dim"),
        "logit_scale": own.number("logit_scale"),
        "use_qk_norm": own.has("blk.0.attn_q_norm.weight"),
    }


def cohere2(own: Metadata) -> Config:
    """Command R7B and A."""
    config = plain(own, "cohere2", "layer_norm_eps")
    return {
        **config,
        "logit_scale": own.number("logit_scale"),
        "sliding_window": own.count("attention.sliding_window"),
        "layer_types": layer_types(own, config["num_hidden_layers"], 4),
    }


def gemma(own: Metadata) -> Config:
    """Gemma."""
    return plain(own, "gemma")


def gemma2(own: Metadata) -> Config:
    """Gemma 2."""
    return {
        **_gemma(own, "gemma2", largest=46),
        "attn_logit_softcapping": own.get("attn_logit_softcapping") or None,
        "sliding_window": own.count("attention.sliding_window", 4096),
        "layer_types": layer_types(own, own.layers(), 2),
    }


def gemma3(own: Metadata) -> Config:
    """The text model of Gemma 3."""
    count, window = own.layers(), own.get("attention.sliding_window")
    types = layer_types(own, count, 6) if window else [FULL] * count
    return {
        **_gemma(own, "gemma3_text", largest=62),
        "rope_local_base_freq": own.number("rope.freq_base_swa", 10000.0),
        "sliding_window": window or None,
        "layer_types": types,
    }


def _gemma(own: Metadata, model_type: str, largest: int) -> Config:
    """Scores are scaled by the head size, but in the model of `largest` layers by E / H."""
    config = plain(own, model_type)
    wide = config["hidden_size"] // config["num_attention_heads"]
    last = config["num_hidden_layers"] == largest
    return {
        **config,
        "query_pre_attn_scalar": wide if last else config["head_dim"],
        "final_logit_softcapping": own.get("final_logit_softcapping") or None,
    }


# --- GPTs ----------------------------------------------------------------------------------------


def gpt2(own: Metadata) -> Config:
    """GPT-2, whose config has its own spelling."""
    config = plain(own, "gpt2", "layer_norm_epsilon")
    return {
        "model_type": "gpt2",
        "vocab_size": config["vocab_size"],
        "n_embd": config["hidden_size"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_positions": config["max_position_embeddings"],
        "layer_norm_epsilon": config["layer_norm_epsilon"],
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def gpt_neox(own: Metadata) -> Config:
    """GPT-NeoX and Pythia."""
    config = plain(own, "gpt_neox", "layer_norm_eps")
    return {
        **without(config, "rope_theta", "partial_rotary_factor"),
        "rotary_emb_base": config["rope_theta"],
        "rotary_pct": config.get("partial_rotary_factor", 1.0),
        "use_parallel_residual": bool(own.get("use_parallel_residual", True)),
        "attention_bias": own.has("blk.0.attn_qkv.bias"),
    }


def stablelm(own: Metadata) -> Config:
    """StableLM."""
    own.get("use_parallel_residual")  # the norms tell: parallel layers have one
    config = plain(own, "stablelm", "layer_norm_eps")
    return {
        **config,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "use_parallel_residual": not own.has("blk.0.ffn_norm.weight"),
        "use_qkv_bias": own.has("blk.0.attn_q.bias"),
        "qk_layernorm": own.has("blk.0.attn_q_norm.weight"),
    }


def starcoder2(own: Metadata) -> Config:
    """StarCoder 2."""
    return {
        **plain(own, "starcoder2", "norm_epsilon"),
        "use_bias": own.has("blk.0.attn_q.bias"),
        "sliding_window": own.get("attention.sliding_window") or None,
    }
