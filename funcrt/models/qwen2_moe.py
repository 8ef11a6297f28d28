"""Qwen2-MoE (arXiv:2407.10671 §2.2.2): fine-grained experts beside a gated one for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from funcrt.config import setting
from funcrt.config.experts import ExpertConfig
from funcrt.layers import Experts, Gated, Linear, MoE, Network
from funcrt.layers.mlp import gated_mlp
from funcrt.models import llama, qwen2
from funcrt.ops.routing import route_softmax


@dataclass(frozen=True, kw_only=True)
class SparseConfig(ExpertConfig):
    """What Qwen's models with experts share: which layers have them, and how they are weighed."""

    moe_intermediate_size: int = setting("moe_intermediate_size")
    decoder_sparse_step: int = setting("decoder_sparse_step", 1)
    mlp_only_layers: tuple[int, ...] = setting("mlp_only_layers", ())
    norm_topk_prob: bool = setting("norm_topk_prob", False)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts; others have one MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """See `ModelConfig`."""
        if hf.get("mlp_only_layers") is None:
            hf["mlp_only_layers"] = []
        return super().fill(hf)


@dataclass(frozen=True, kw_only=True)
class SharedConfig(SparseConfig):
    """The same with an expert that all tokens go through."""

    shared_expert_intermediate_size: int = setting("shared_expert_intermediate_size")


@dataclass(frozen=True, kw_only=True)
class Config(qwen2.Config, SharedConfig):
    """A Qwen2-MoE; every second of the first `max_window_layers` has the window if it is in use."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **qwen2.Config.DEFAULTS,
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    }  # fmt: skip

    attention_bias: bool = setting("qkv_bias", True)

    @classmethod
    def slides(cls, hf: Mapping[str, Any], layer: int) -> bool:
        """See `MixedConfig`."""
        first = layer < hf["max_window_layers"]
        return hf["sliding_window"] is not None and first and layer % 2 == 0


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(
        config, lambda i: llama.layer(config, i, qwen2.attention(config, i), mlp(config, i))
    )


def mlp(config: SharedConfig, i: int) -> MoE | None:
    """Experts of one layer beside the one that is shared; None where it has a plain MLP."""
    mixture = moe(config, i)
    if mixture is None:
        return None
    name, e = f"model.layers.{i}.mlp", config.hidden_size
    shared = gated_mlp(
        f"{name}.shared_expert", e, config.shared_expert_intermediate_size, config.hidden_act
    )
    return replace(mixture, shared=Gated(shared, Linear(f"{name}.shared_expert_gate", e, 1)))


def moe(config: SparseConfig, i: int) -> MoE | None:
    """Experts of one layer; None where it has a plain MLP."""
    if not config.is_sparse(i):
        return None
    name, e, x = f"model.layers.{i}.mlp", config.hidden_size, config.num_experts
    return MoE(
        router=Linear(f"{name}.gate", e, x),
        rule=partial(
            route_softmax, count=config.experts_per_token, normalize=config.norm_topk_prob
        ),
        experts=Experts(f"{name}.experts", x, e, config.moe_intermediate_size, config.hidden_act),
    )
