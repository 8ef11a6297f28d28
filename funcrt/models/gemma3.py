"""Gemma 3, its text model (arXiv:2503.19786): Gemma 2 with query and key norms for soft caps.

Five of six layers have a window, q - k < W, and turn by another base than the rest; only the rest
turns slower for longer contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import setting
from funcrt.config.layer_types import SLIDING
from funcrt.config.local_rope import LocalRopeConfig
from funcrt.layers import Attention, Network, RMSNorm
from funcrt.models import gemma, gemma2

LOCAL_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class Config(gemma2.Config, LocalRopeConfig):
    """The text model of a Gemma 3."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **gemma2.Config.DEFAULTS, "max_position_embeddings": 131072,
    }  # fmt: skip
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **gemma2.Config.FIXED, "attn_logit_softcapping": (None,),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        # The last one is read by `local_theta`.
        {"_sliding_window_pattern", "cache_implementation", "rope_local_base_freq"}
    )
    ROPE_DEFAULTS: ClassVar[dict[str, Any]] = {"rope_theta": 1000000.0}
    PATTERN: ClassVar[int] = 6
    PATTERN_KEYS: ClassVar[tuple[str, ...]] = ("sliding_window_pattern",)

    attention_softcap: float | None = setting("attn_logit_softcapping", None)
    logit_softcap: float | None = setting("final_logit_softcapping", None)

    @classmethod
    def local_theta(cls, hf: Mapping[str, Any]) -> Any:
        """See `LocalRopeConfig`."""
        theta, given = hf.get("rope_local_base_freq"), hf.get("rope_parameters") or {}
        if theta is None and (given.get(SLIDING) or {}).get("rope_theta") is None:
            return LOCAL_THETA
        return theta

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`. Without a period, mlx-lm cannot read it, and says so."""
        return {
            **super().to_hf(),
            "architectures": list(self.architectures) or ["Gemma3ForCausalLM"],
            "rope_local_base_freq": self.local_rope.theta,
            "sliding_window_pattern": self.period,
        }


def network(config: Config) -> Network:
    """The layers of one config."""
    layers = gemma.stack(config, lambda i: gemma2.layer(config, i, attention(config, i)))
    return replace(layers, softcap=config.logit_softcap)


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer."""
    name, d, eps = f"model.layers.{i}.self_attn", config.head_dim, config.norm_eps
    return replace(
        gemma2.attention(config, i),
        rope=config.rope if config.window(i) is None else config.local_rope,
        q_norm=RMSNorm(f"{name}.q_norm", d, eps, offset=1.0),
        k_norm=RMSNorm(f"{name}.k_norm", d, eps, offset=1.0),
    )
