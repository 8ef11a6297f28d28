"""Qwen3.5 (Qwen team, 2026): Qwen3-Next with a projection for each thing, and a plain MLP.

Only what reads and writes text. Published files also hold what looks at images; there the config is
in `text_config` and names begin with `model.language_model`. Without images all three numbers of a
position are the same, and their turns those of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.errors import ConfigError
from funcrt.layers import Network
from funcrt.layers.delta import GatedDelta
from funcrt.layers.part import rename
from funcrt.models.qwen3_next import DeltaConfig, delta_parts, layer, stack

_TEXT = "_text"  # ends the model_type of what holds nothing else
# What need not be the same in a `text_config` and outside of it.
_OUTSIDE = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "model_type", "pad_token_id",
    "torch_dtype", "transformers_version",
}  # fmt: skip
_IMAGE_ROPE = ("mrope_interleaved", "mrope_section")


@dataclass(frozen=True, kw_only=True)
class Config(DeltaConfig):
    """The text part of a Qwen3.5.

    Class attribute of a family:
        ARCHITECTURE: how the names of its classes begin.
    """

    ARCHITECTURE: ClassVar[str] = "Qwen3_5"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **DeltaConfig.DEFAULTS, "intermediate_size": 12288, "num_key_value_heads": 4,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **DeltaConfig.FIXED, "mamba_ssm_dtype": (None, "float32"), "mlp_only_layers": (None, []),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = frozenset({
        "image_token_id", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
        "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id",
    })  # fmt: skip

    @property
    def has_images(self) -> bool:
        """Whether the checkpoint is one that also holds what looks at images."""
        return not self.model_type.endswith(_TEXT)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        text = hf.pop("text_config", None)
        if text is None:
            return super().fill(hf)
        own = {key: hf[key] for key in hf if key in _OUTSIDE}
        given = {key: value for key, value in hf.items() if cls.DEFAULTS.get(key) != value}
        expected = {**given, **own, "model_type": hf["model_type"] + _TEXT}
        for key in sorted(text.keys() & expected.keys() - _OUTSIDE | {"model_type"}):
            if text.get(key) != expected[key]:
                raise ConfigError(
                    f"config text_config: expected {key} {expected[key]!r}, as outside of it, "
                    f"got {text.get(key)!r}"
                )
        return super().fill({**hf, **text, **own})

    @classmethod
    def ropes(cls, hf: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        rope = hf.get("rope_parameters") or {}
        plain = {key: value for key, value in rope.items() if key not in _IMAGE_ROPE}
        return {"rope": {**hf, "rope_parameters": plain}}

    def unused_tensors(self) -> tuple[str, ...]:
        return (*super().unused_tensors(), "model.visual.")

    def to_hf(self) -> dict[str, Any]:
        hf = super().to_hf()
        scaling = hf.pop("rope_scaling") or {"rope_type": "default"}
        keys = ("rope_theta", "partial_rotary_factor")
        rope = {key: hf.pop(key) for key in keys if key in hf}
        hf["rope_parameters"] = {**scaling, **rope}  # mlx-lm reads no other spelling
        task = "ForConditionalGeneration" if self.has_images else "ForCausalLM"
        hf["architectures"] = list(self.architectures) or [self.ARCHITECTURE + task]
        if not self.has_images:
            return hf
        outside = {key: hf.pop(key) for key in ("architectures", "model_type")}
        return {**outside, "text_config": {**hf, "model_type": self.model_type + _TEXT}}


def network(config: Config) -> Network:
    """The layers of one config."""
    return place(config, stack(config, lambda i: layer(config, i, delta(config, i), None)))


def place(config: Config, text: Network) -> Network:
    """The network with tensors named as in its checkpoint."""
    return rename(text, "model.", "model.language_model.") if config.has_images else text


def delta(config: DeltaConfig, i: int) -> GatedDelta:
    """The gated delta rule of one layer."""
    heads, conv = config.value_heads, 2 * config.keys + config.values
    widths = {"in_proj_qkv": conv, "in_proj_z": config.values, "in_proj_b": heads}
    return GatedDelta(**delta_parts(config, i, {**widths, "in_proj_a": heads}))
