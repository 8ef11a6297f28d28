"""dots.llm1 (arXiv:2506.05767): the attention of Qwen3, and experts chosen as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.config import setting
from funcrt.config.layer_types import MixedConfig
from funcrt.layers import Network
from funcrt.models import llama, qwen3
from funcrt.models.deepseek_v3 import CorrectedConfig, mixture


@dataclass(frozen=True, kw_only=True)
class Config(MixedConfig, CorrectedConfig):
    """A dots.llm1; layers from `max_window_layers` on have the window, if there is one."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 0, "max_window_layers": 62, "moe_intermediate_size": 1408,
        "n_group": 1, "n_shared_experts": None, "norm_topk_prob": False,
        "num_key_value_heads": 32, "routed_scaling_factor": 1.0, "sliding_window": 4096,
        "topk_group": 1,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CorrectedConfig.FIXED,
        "mlp_bias": (None, False),
        "moe_layer_freq": (None, 1),
        "scoring_func": (None, "sigmoid", "noaux_tc"),  # published files have the latter
    }
    AHEAD: ClassVar[tuple[int, ...]] = ()

    max_window_layers: int = setting("max_window_layers", 62, least=0)

    @classmethod
    def slides(cls, hf: Mapping[str, Any], layer: int) -> bool:
        return hf["sliding_window"] is not None and layer >= hf["max_window_layers"]


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(
        config, lambda i: llama.layer(config, i, qwen3.attention(config, i), mixture(config, i))
    )
