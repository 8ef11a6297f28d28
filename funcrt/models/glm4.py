"""GLM-4-0414 (Zhipu, 2025): GLM-4 with norms before and after attention and MLP."""

from __future__ import annotations

from funcrt.layers import Network, Part, RMSNorm, Sandwich
from funcrt.models import glm, llama
from funcrt.models.glm import Config

__all__ = ["Config", "network"]


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(config, lambda i: layer(config, i))


def layer(config: Config, i: int) -> Part:
    """One layer."""

    def norm(member: str) -> RMSNorm:
        return RMSNorm(f"model.layers.{i}.{member}", config.hidden_size, config.norm_eps)

    return Sandwich(
        mix_norm=norm("input_layernorm"),
        mix=llama.attention_with_plain_output(config, i),
        mix_post_norm=norm("post_self_attn_layernorm"),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=glm.mlp(config, i),
        mlp_post_norm=norm("post_mlp_layernorm"),
    )
