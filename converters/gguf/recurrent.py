"""Configs of GGUF architectures with layers that remember otherwise than by keys, see `dense`."""

from __future__ import annotations

from converters.gguf.config import EPSILON, FULL, Config
from converters.gguf.metadata import Metadata


def lfm2(own: Metadata) -> Config:
    """LFM2, whose layers without key heads are convolutions."""
    layers = own.count("block_count")
    own.check_layers(layers)
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


def mamba2(own: Metadata) -> Config:
    """Mamba-2."""
    layers, hidden = own.count("block_count"), own.count("embedding_length")
    own.check_layers(layers)
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
