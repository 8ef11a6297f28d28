"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek-V3 of other sizes; a list may say which layers are dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.errors import ConfigError
from funcrt.models import deepseek_v3
from funcrt.models.deepseek_v3 import network

__all__ = ["Config", "network"]

DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v3.Config):
    """A GLM-4.7-Flash; only its first layers may be dense."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 1, "kv_lora_rank": 512, "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8,
        "topk_group": 1, "v_head_dim": 256,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **deepseek_v3.Config.FIXED, "moe_layer_freq": (None, 1),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = deepseek_v3.Config.HARMLESS | {"mlp_layer_types"}
    AHEAD: ClassVar[tuple[int, ...]] = (47,)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        kinds = hf.get("mlp_layer_types")
        if kinds is not None:
            dense = list(kinds).count(DENSE)
            if kinds != [DENSE] * dense + [SPARSE] * (hf.get("num_hidden_layers", 0) - dense):
                raise ConfigError(
                    f"config mlp_layer_types: expected {DENSE!r} for some first layers and "
                    f"{SPARSE!r} for all others, got {kinds!r}"
                )
            hf["first_k_dense_replace"] = dense
        return super().fill(hf)

    def to_hf(self) -> dict[str, Any]:
        kinds = [SPARSE if self.is_sparse(i) else DENSE for i in range(self.num_layers)]
        return {**super().to_hf(), "mlp_layer_types": kinds}
