"""GLM-4 (arXiv:2406.12793 §2): Llama with biased queries, keys, values; half a head turns.

Neighbours turn together; gate and up projection are one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.layers import GatedMLP, Network
from funcrt.layers.mlp import joined_gated_mlp
from funcrt.models import llama


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A GLM-4 of either architecture."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07, "eos_token_id": [151329, 151336, 151338],
    }  # fmt: skip
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {"mlp_bias": (None, False)}
    PARTIAL_ROTARY: ClassVar[bool] = True
    INTERLEAVED: ClassVar[bool] = True
    ROPE_DEFAULTS: ClassVar[dict[str, Any]] = {"partial_rotary_factor": 0.5}

    attention_bias: bool = setting("attention_bias", True)


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(
        config,
        lambda i: llama.layer(
            config, i, llama.attention_with_plain_output(config, i), mlp(config, i)
        ),
    )


def mlp(config: Config, i: int) -> GatedMLP:
    """The MLP of one layer."""
    sizes = config.hidden_size, config.intermediate_size
    return joined_gated_mlp(f"model.layers.{i}.mlp", *sizes, config.hidden_act)
