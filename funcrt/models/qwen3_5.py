"""Qwen3.5 (Qwen team, 2026): Qwen3-Next with a projection for each thing, and a plain MLP.

Its text part alone: positions of images, which turn planes of a head apart, are those of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.layers import Network
from funcrt.layers.delta import GatedDelta
from funcrt.models.qwen3_next import DeltaConfig, delta_parts, layer, stack

_IMAGES = ("mrope_interleaved", "mrope_section")


@dataclass(frozen=True, kw_only=True)
class Config(DeltaConfig):
    """The text part of a Qwen3.5."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **DeltaConfig.DEFAULTS, "intermediate_size": 12288, "num_key_value_heads": 4,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **DeltaConfig.FIXED, "mamba_ssm_dtype": (None, "float32"), "mlp_only_layers": (None, []),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
    )

    @classmethod
    def ropes(cls, hf: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        rope = hf.get("rope_parameters") or {}
        plain = {key: value for key, value in rope.items() if key not in _IMAGES}
        return {"rope": {**hf, "rope_parameters": plain}}

    def to_hf(self) -> dict[str, Any]:
        hf = super().to_hf()
        scaling = hf.pop("rope_scaling") or {"rope_type": "default"}
        keys = ("rope_theta", "partial_rotary_factor")
        rope = {key: hf.pop(key) for key in keys if key in hf}
        return {**hf, "rope_parameters": {**scaling, **rope}}


def network(config: Config) -> Network:
    """The layers of one config."""
    return stack(config, lambda i: layer(config, i, delta(config, i), None))


def delta(config: DeltaConfig, i: int) -> GatedDelta:
    """The gated delta rule of one layer."""
    heads, conv = config.value_heads, 2 * config.keys + config.values
    widths = {"in_proj_qkv": conv, "in_proj_z": config.values, "in_proj_b": heads}
    return GatedDelta(**delta_parts(config, i, {**widths, "in_proj_a": heads}))
