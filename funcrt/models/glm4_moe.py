"""GLM-4.5 (arXiv:2508.06471): grouped-query attention, and experts chosen as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import setting
from funcrt.layers import Attention, Network, RMSNorm
from funcrt.models import llama
from funcrt.models.deepseek_v3 import CorrectedConfig, mixture


@dataclass(frozen=True, kw_only=True)
class Config(CorrectedConfig):
    """A GLM-4.5; the norms of heads are left out of the smaller model."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 1, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0,
        "topk_group": 1,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CorrectedConfig.FIXED, "mlp_bias": (None, False), "moe_layer_freq": (None, 1),
    }  # fmt: skip
    AHEAD: ClassVar[tuple[int, ...]] = (46, 92)
    PARTIAL_ROTARY: ClassVar[bool] = True
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.5}

    use_qk_norm: bool = setting("use_qk_norm", False)


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(
        config, lambda i: llama.layer(config, i, attention(config, i), mixture(config, i))
    )


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer: no bias in its output, norms of heads if the config says so."""
    name, d = f"model.layers.{i}.self_attn", config.head_dim
    plain = llama.attention_with_plain_output(config, i)
    if not config.use_qk_norm:
        return plain
    norms = (RMSNorm(f"{name}.{part}_norm", d, config.norm_eps) for part in "qk")
    return replace(plain, q_norm=next(norms), k_norm=next(norms))
