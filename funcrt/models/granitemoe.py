"""Granite 3 MoE (IBM): Granite with gated MLPs that a router chooses from, stored as stacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from funcrt.config import setting
from funcrt.config.experts import ExpertConfig
from funcrt.layers import Linear, MoE, Network, PreNorm, StackedExperts
from funcrt.models import granite
from funcrt.ops.routing import route_top_softmax
from funcrt.params import Params, ParamSpec


@dataclass(frozen=True, kw_only=True)
class Config(granite.Config, ExpertConfig):
    """A Granite with experts."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **granite.Config.DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip

    num_experts: int = setting("num_local_experts")


@dataclass(frozen=True, kw_only=True)
class InputOutputExperts(StackedExperts):
    """Experts whose stacks are called `input_linear` and `output_linear`; they may be packed."""

    FLAT = True

    @property
    def gate_up(self) -> str:
        return f"{self.name}.input_linear"

    @property
    def down(self) -> str:
        return f"{self.name}.output_linear"

    def stacks(self, params: Params) -> Params:
        return params

    def tensors(self) -> ParamSpec:
        return {f"{name}.weight": shape for name, shape in super().tensors().items()}


def network(config: Config) -> Network:
    """The layers of one config."""
    plain = granite.network(config)
    layers = tuple(layer(config, i) for i in range(config.num_layers))
    return replace(plain, layers=layers)


def layer(config: Config, i: int) -> PreNorm:
    """Granite's layer, with experts in place of its MLP."""
    name, e, x = f"model.layers.{i}.block_sparse_moe", config.hidden_size, config.num_experts
    moe = MoE(
        router=Linear(f"{name}.router.layer", e, x),
        rule=partial(route_top_softmax, count=config.experts_per_token),
        experts=InputOutputExperts(name, x, e, config.intermediate_size, config.hidden_act),
    )
    return replace(granite.layer(config, i), mlp=moe)
