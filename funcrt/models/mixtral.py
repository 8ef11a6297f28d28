"""Mixtral (arXiv:2401.04088): Mistral with two gated MLPs out of several for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from funcrt.config import setting
from funcrt.config.experts import ExpertConfig
from funcrt.layers import Experts, Linear, MoE, Network
from funcrt.models.llama import attention, layer, stack
from funcrt.ops.routing import route_softmax


@dataclass(frozen=True, kw_only=True)
class Config(ExpertConfig):
    """A Mixtral; its window may be null, which is none."""

    WINDOWED: ClassVar[bool] = True
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "num_local_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2,
    }  # fmt: skip
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {"rope_theta": 1e6}

    num_experts: int = setting("num_local_experts")


def network(config: Config) -> Network:
    """The layers of one config."""
    return stack(config, lambda i: layer(config, i, attention(config, i), moe(config, i)))


def moe(config: Config, i: int) -> MoE:
    """The experts of one layer; w1, w3 and w2 are the gate, up and down of other models."""
    name, e, x = f"model.layers.{i}.block_sparse_moe", config.hidden_size, config.num_experts
    return MoE(
        router=Linear(f"{name}.gate", e, x),
        rule=partial(route_softmax, count=config.experts_per_token, normalize=True),
        experts=Experts(
            f"{name}.experts", x, e, config.intermediate_size, config.hidden_act, ("w1", "w3", "w2")
        ),
    )
