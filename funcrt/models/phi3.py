"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (arXiv:2404.14219, 2412.08905, 2503.01743).

Llama with one stored matrix for queries, keys and values, and one for gate and up. The models for
long contexts turn by other frequencies once a text is longer than the original context
(LongRoPE, arXiv:2402.13753); Phi-4-mini turns a part of each head only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import ModelConfig
from funcrt.layers import Attention, Linear, Network, PreNorm
from funcrt.layers.mlp import joined_gated_mlp
from funcrt.models import llama

_LONGROPE = ("su", "yarn")  # what older files call it


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A Phi-3."""

    WINDOWED: ClassVar[bool] = True
    PARTIAL_ROTARY: ClassVar[bool] = True
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "eos_token_id": 32000,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attention_bias": (None, False), "mlp_bias": (None, False), "lm_head_bias": (None, False),
        "full_attn_mod": (None, 1), "interpolate_factor": (None, 1),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = frozenset({"embd_pdrop", "resid_pdrop"})

    @classmethod
    def ropes(cls, hf: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """See `ModelConfig`."""
        places = [key for key in ("rope_scaling", "rope_parameters") if hf.get(key)]
        return {"rope": {**hf, **{key: _renamed(hf[key]) for key in places}}}

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        hf = super().to_hf()
        if self.rope.kind == "longrope":  # in the places where mlx-lm looks for it
            hf["original_max_position_embeddings"] = self.rope.original_max_positions
            hf["rope_scaling"]["type"] = hf["rope_scaling"].pop("rope_type")
        return hf


def _renamed(rope: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ("type", "rope_type")
    return {
        key: "longrope" if key in kinds and value in _LONGROPE else value
        for key, value in rope.items()
    }


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(config, lambda i: layer(config, i))


def layer(config: Config, i: int) -> PreNorm:
    """One layer."""
    sizes = config.hidden_size, config.intermediate_size
    mlp = joined_gated_mlp(f"model.layers.{i}.mlp", *sizes, config.hidden_act)
    return llama.layer(config, i, attention(config, i), mlp)


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer."""
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = Linear(f"model.layers.{i}.self_attn.qkv_proj", config.hidden_size, rows)
    return replace(llama.attention(config, i), qkv=qkv)
