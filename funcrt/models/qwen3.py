"""Qwen3 (arXiv:2505.09388): Llama with RMS norms of every query and key head before they turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig
from funcrt.config.fields import setting
from funcrt.config.layer_types import MixedConfig
from funcrt.layers import Attention, Network, RMSNorm
from funcrt.models import llama, qwen2


@dataclass(frozen=True, kw_only=True)
class Config(qwen2.Config):
    """A Qwen3; its windows are those of Qwen2."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {**qwen2.Config.DEFAULTS, "head_dim": 128}
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ModelConfig.FIXED, "mlp_bias": (None, False),
    }  # fmt: skip

    attention_bias: bool = setting("attention_bias", False)


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(config, lambda i: llama.layer(config, i, attention(config, i)))


def attention(config: MixedConfig, i: int) -> Attention:
    """Attention of one layer."""
    name, d, eps = f"model.layers.{i}.self_attn", config.head_dim, config.norm_eps
    return replace(
        llama.attention(config, i),
        window=config.window(i),
        q_norm=RMSNorm(f"{name}.q_norm", d, eps),
        k_norm=RMSNorm(f"{name}.k_norm", d, eps),
    )
