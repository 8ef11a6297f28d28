"""DeepSeek-V3 (arXiv:2412.19437): V2 with experts chosen by corrected sigmoids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.layers import Network, Run
from funcrt.layers.latent import LatentAttention
from funcrt.layers.moe import MoE
from funcrt.models import deepseek_v2, llama
from funcrt.models.deepseek_v2 import ExpertsConfig, LatentConfig
from funcrt.ops.routing import Route, route_sigmoid
from funcrt.params import ParamSpec

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class CorrectedConfig(ExpertsConfig):
    """What models share that choose experts as DeepSeek-V3 does.

    Layers that guess further tokens ahead (§2.2) are left out: they change no logits.

    AHEAD: their numbers in published files, which transformers leaves out of shorter models too.
    """

    AHEAD: ClassVar[tuple[int, ...]] = (61,)
    GROUP_BEST: ClassVar[int] = 2
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ModelConfig.FIXED, "scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc"),
    }  # fmt: skip

    normalize: bool = setting("norm_topk_prob", True)
    num_ahead: int = setting("num_nextn_predict_layers", 0, least=0)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        if "num_mtp_layers" in hf:  # as transformers 5 spells it
            hf["num_nextn_predict_layers"] = hf.pop("num_mtp_layers")
        return super().fill(hf)

    def unused_tensors(self) -> tuple[str, ...]:
        last = self.num_layers
        ahead = (*self.AHEAD, *range(last, last + self.num_ahead))
        return tuple(f"model.layers.{i}." for i in ahead if i >= last)


@dataclass(frozen=True, kw_only=True)
class TurningConfig(LatentConfig):
    """Latent attention of which the config says whether neighbours turn together, or halves."""

    rope_interleave: bool = setting("rope_interleave", True)


@dataclass(frozen=True, kw_only=True)
class Config(TurningConfig, CorrectedConfig):
    """A DeepSeek-V3."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 3, "kv_lora_rank": 512, "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CorrectedConfig.FIXED, "mlp_bias": (None, False),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = TurningConfig.HARMLESS | CorrectedConfig.HARMLESS


@dataclass(frozen=True, kw_only=True)
class CorrectedMoE(MoE):
    """A mixture whose rule also takes a bias `[X]` (§2.1.2), the tensor `bias`."""

    FLAT = True

    rule: Callable[..., Route]
    bias: str

    def route(self, run: Run, scores: mx.array) -> Route:
        return self.rule(scores, bias=run.params[self.bias])

    def tensors(self) -> ParamSpec:
        return {self.bias: (self.experts.count,)}


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(
        config, lambda i: llama.layer(config, i, attention(config, i), mixture(config, i))
    )


def attention(config: TurningConfig, i: int) -> LatentAttention:
    """Attention of one layer."""
    rope = replace(config.rope, interleaved=config.rope_interleave)
    return replace(deepseek_v2.attention(config, i), rope=rope)


def mixture(config: CorrectedConfig, i: int) -> MoE | None:
    """The experts of one layer; None where it has an MLP."""
    if not config.is_sparse(i):
        return None
    groups, kept = config.groups
    rule = partial(
        route_sigmoid, count=config.num_chosen, groups=groups, kept=kept,
        normalize=config.normalize, scale=config.routed_scale,
    )  # fmt: skip
    bias = f"model.layers.{i}.mlp.gate.e_score_correction_bias"
    return deepseek_v2.mixture(config, i, rule, partial(CorrectedMoE, bias=bias))
