"""What the configs of many GGUF architectures have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from converters.gguf.metadata import Metadata
from converters.gguf.rope import rope_scaling
from funcrt.errors import ParamsError

Config = dict[str, Any]
Reader = Callable[[Metadata], Config]

EPSILON = "attention.layer_norm_rms_epsilon"
MEAN_EPSILON = "attention.layer_norm_epsilon"
FULL, SLIDING = "full_attention", "sliding_attention"


def plain(
    own: Metadata,
    model_type: str,
    norm: str = "rms_norm_eps",
    width: bool = True,
    head_dim: int | None = None,
) -> Config:
    """What nearly all architectures have.

    Args:
        own: the metadata.
        model_type: of the result.
        norm: key of the norm's epsilon.
        width: whether there is an MLP besides experts.
        head_dim: where the metadata has none; None is E / H.

    Raises ConfigError or ParamsError for what is missing or impossible.
    """
    layers = own.layers()
    heads, hidden = own.count("attention.head_count"), own.count("embedding_length")
    rows = own.rows("blk.0.attn_q.weight") or own.rows("blk.0.attn_output.weight") or heads
    if heads > rows:
        raise own.unusable("attention.head_count", f"at most {rows}", heads)
    head_dim = own.count("attention.key_length", head_dim or hidden // heads or None)
    if own.count("attention.value_length", head_dim) != head_dim:
        raise own.unusable(
            "attention.value_length", f"{head_dim} as keys have", own.get("attention.value_length")
        )
    return {
        "model_type": model_type,
        "vocab_size": own.count("vocab_size", own.rows("token_embd.weight")),
        "hidden_size": hidden,
        **({"intermediate_size": own.count("feed_forward_length")} if width else {}),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": own.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        norm: own.number(EPSILON if norm == "rms_norm_eps" else MEAN_EPSILON),
        "max_position_embeddings": own.count("context_length"),
        "tie_word_embeddings": not own.has("output.weight"),
        **_rope(own, head_dim),
    }


def _rope(own: Metadata, head_dim: int) -> Config:
    theta = own.number("rope.freq_base", 10000.0)
    dims = own.count("rope.dimension_count", head_dim)
    if dims > head_dim:
        raise own.unusable("rope.dimension_count", f"at most the head size {head_dim}", dims)
    config = {"rope_theta": theta, "rope_scaling": rope_scaling(own, theta, dims)}
    return config if dims == head_dim else {**config, "partial_rotary_factor": dims / head_dim}


def layer_types(own: Metadata, count: int, default: int) -> list[str]:
    """Which layers have the window: all but each n-th, or as a list says."""
    pattern = own.flags("attention.sliding_window_pattern", count) or default
    if isinstance(pattern, list):
        return [SLIDING if slides else FULL for slides in pattern]
    return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]


def expert_count(own: Metadata) -> int:
    """How many experts there are. Raises ConfigError or ParamsError."""
    count = own.count("expert_count")
    stacks = [t.shape[0] for name, t in own.tensors.items() if name.endswith("_exps.weight")]
    if any(stack != count for stack in stacks) or (not stacks and count > len(own.tensors)):
        raise ParamsError(
            f"{own.path}: config has {count} experts, but the tensors are of "
            f"{sorted({*stacks}) or 'none'}"
        )
    return count


def without(config: Config, *keys: str) -> Config:
    """The config without some keys."""
    return {key: value for key, value in config.items() if key not in keys}
