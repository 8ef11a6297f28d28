"""Qwen3-MoE (arXiv:2505.09388 §2): Qwen3 with fine-grained experts, none of them shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.layers import Network
from funcrt.models import llama, qwen3
from funcrt.models.qwen2_moe import SparseConfig, moe


@dataclass(frozen=True, kw_only=True)
class Config(qwen3.Config, SparseConfig):
    """A Qwen3-MoE; all layers have the window if it is in use."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **qwen3.Config.DEFAULTS,
        "num_key_value_heads": 4, "head_dim": None, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }  # fmt: skip
    # Keys of other models that some files have beside their own.
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **qwen3.Config.FIXED,
        "qkv_bias": (None, False), "use_qk_norm": (None, True),
        "shared_expert_intermediate_size": (None, 0),
    }  # fmt: skip

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """See `ModelConfig`; transformers 5 writes the number of experts under another name."""
        count = hf.pop("num_local_experts", None)
        hf.setdefault("num_experts", 128 if count is None else count)
        return super().fill(hf)

    @classmethod
    def slides(cls, hf: Mapping[str, Any], layer: int) -> bool:
        """See `MixedConfig`."""
        return hf["sliding_window"] is not None


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(
        config, lambda i: llama.layer(config, i, qwen3.attention(config, i), moe(config, i))
    )
