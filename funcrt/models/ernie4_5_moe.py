"""ERNIE 4.5, the sparse models (Baidu, 2025): experts chosen by softmax and a correcting bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.layers import MoE, Network
from funcrt.models import deepseek_v2, ernie4_5, llama
from funcrt.models.deepseek_v2 import ExpertsConfig
from funcrt.models.deepseek_v3 import CorrectedMoE
from funcrt.ops.routing import route_corrected_softmax
from funcrt.params import ParamSpec


@dataclass(frozen=True, kw_only=True)
class Config(ernie4_5.Config, ExpertsConfig):
    """An ERNIE 4.5 with experts from one layer to another; -1 stands for the last one."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "eos_token_id": 2, "max_position_embeddings": 131072, "moe_intermediate_size": 1536,
        "moe_k": 6, "moe_layer_end_index": -1, "moe_layer_start_index": 1, "moe_norm_min": 1e-12,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ModelConfig.FIXED,
        "moe_gate": (None, "topk"),
        "moe_gate_act": (None, "softmax"),
        "use_bias": (None, False),  # with biases, the last projection would have one too
    }
    HARMLESS: ClassVar[frozenset[str]] = ExpertsConfig.HARMLESS | {
        "moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers",
    }  # fmt: skip

    dense_layers: int = setting("moe_layer_start_index", least=0)
    last_sparse: int = setting("moe_layer_end_index", least=0)
    sparse_every: int = setting("moe_layer_interval", 1)
    expert_size: int = setting("moe_intermediate_size")
    num_experts: int = setting("moe_num_experts")
    num_shared: int | None = setting("moe_num_shared_experts", least=0)
    num_chosen: int = setting("moe_k")
    num_groups: int | None = 1
    kept_groups: int | None = 1
    routed_scale: float = 1.0
    least_sum: float = setting("moe_norm_min")

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        if hf["moe_layer_end_index"] == -1 and isinstance(hf.get("num_hidden_layers"), int):
            hf["moe_layer_end_index"] = hf["num_hidden_layers"] - 1
        return super().fill(hf)

    def is_sparse(self, i: int) -> bool:
        return self.dense_layers <= i <= self.last_sparse and (i + 1) % self.sparse_every == 0

    def unused_tensors(self) -> tuple[str, ...]:
        return ("model.mtp_",)  # layers that guess further tokens ahead


@dataclass(frozen=True, kw_only=True)
class ErnieMoE(CorrectedMoE):
    """A mixture whose bias is stored as a row."""

    def tensors(self) -> ParamSpec:
        return {self.bias: (1, self.experts.count)}


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(
        config, lambda i: llama.layer(config, i, llama.attention(config, i), mixture(config, i))
    )


def mixture(config: Config, i: int) -> MoE | None:
    """The experts of one layer; None where it has an MLP."""
    if not config.is_sparse(i):
        return None
    rule = partial(route_corrected_softmax, count=config.num_chosen, least=config.least_sum)
    bias = f"model.layers.{i}.mlp.moe_statics.e_score_correction_bias"
    return deepseek_v2.mixture(config, i, rule, partial(ErnieMoE, bias=bias))
