"""SmolLM3 (Hugging Face, 2025): Llama in which every fourth layer does not turn.

Layers without positions are from arXiv:2501.18795.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config.fields import setting
from funcrt.config.layer_types import SwitchedConfig
from funcrt.errors import ConfigError
from funcrt.layers import Attention, Network
from funcrt.models import llama


@dataclass(frozen=True, kw_only=True)
class Config(SwitchedConfig):
    """A SmolLM3; layers that do not turn have the window if `use_sliding_window`.

    Attributes:
        no_rope_layers: for every layer whether it turns, 1 or 0 (the name says the contrary).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "architectures": ("SmolLM3ForCausalLM",), "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "tie_word_embeddings": True, "eos_token_id": 128001,
        "no_rope_layer_interval": 4,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    HARMLESS: ClassVar[frozenset[str]] = frozenset({"max_window_layers", "no_rope_layer_interval"})
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {"rope_theta": 2000000.0}

    no_rope_layers: tuple[int, ...] = setting("no_rope_layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.no_rope_layers) != self.num_layers or {*self.no_rope_layers} - {0, 1}:
            raise ConfigError(
                f"config no_rope_layers: expected {self.num_layers} numbers (num_hidden_layers), "
                f"each 0 or 1, got {list(self.no_rope_layers)}"
            )

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """See `SwitchedConfig`. Without a list, every `no_rope_layer_interval`th layer stays."""
        count, interval = hf.get("num_hidden_layers"), hf["no_rope_layer_interval"]
        if hf.get("no_rope_layers") is None and isinstance(count, int):
            hf["no_rope_layers"] = [int((i + 1) % interval != 0) for i in range(count)]
        return super().fill(hf)

    @classmethod
    def slides(cls, hf: Mapping[str, Any], layer: int) -> bool:
        """See `MixedConfig`."""
        return hf["sliding_window"] is not None and not hf["no_rope_layers"][layer]


def network(config: Config) -> Network:
    """The layers of one config."""
    return llama.stack(config, lambda i: llama.layer(config, i, attention(config, i)))


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer."""
    rope = config.rope if config.no_rope_layers[i] else None
    return replace(llama.attention(config, i), rope=rope, window=config.window(i))
