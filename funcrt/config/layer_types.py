"""Configs of models with layers of several types, some with a window, for example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcrt.config.base import ModelConfig
from funcrt.config.fields import setting
from funcrt.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
MOST_LAYERS = 1 << 16  # what nobody has; listing the types of 1 << 31 would take minutes


@dataclass(frozen=True, kw_only=True)
class LayeredConfig(ModelConfig):
    """A model with layers of several types.

    A family says in `layer_type` which layer is of which where config.json does not list them.

    Class attribute of a family:
        LAYER_TYPES: what a layer may be called.
    """

    LAYER_TYPES: ClassVar[tuple[str, ...]] = ()

    layer_types: tuple[str, ...] = setting("layer_types")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ", ".join(self.LAYER_TYPES)
        for kind in self.layer_types:
            if kind not in self.LAYER_TYPES:
                raise ConfigError(f"layer type {kind!r} is not supported; known: {known}")
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"config layer_types: expected {self.num_layers} entries (num_hidden_layers), "
                f"got {len(self.layer_types)}"
            )

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """See `ModelConfig`; `layer_types` too."""
        hf = super().fill(hf)
        count = hf.get("num_hidden_layers")
        if hf.get("layer_types") is None and isinstance(count, int) and count <= MOST_LAYERS:
            hf["layer_types"] = [cls.layer_type(hf, i) for i in range(count)]
        return hf

    @classmethod
    def layer_type(cls, hf: Mapping[str, Any], layer: int) -> str:
        """The type of a layer in a config.json without `layer_types`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MixedConfig(LayeredConfig):
    """A model whose layers differ in how far they look back.

    A family says in `slides` which layers have a window where config.json does not list them.
    """

    WINDOWED: ClassVar[bool] = True
    LAYER_TYPES: ClassVar[tuple[str, ...]] = (FULL, SLIDING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ConfigError(f"layer_types has {SLIDING!r}, but there is no sliding_window")

    def window(self, layer: int) -> int | None:
        """W of a layer: its queries see q - k < W; None sees everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def layer_type(cls, hf: Mapping[str, Any], layer: int) -> str:
        """See `LayeredConfig`."""
        return SLIDING if cls.slides(hf, layer) else FULL

    @classmethod
    def slides(cls, hf: Mapping[str, Any], layer: int) -> bool:
        """Whether a layer has a window in a config.json without `layer_types`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SwitchedConfig(MixedConfig):
    """A model whose window is in use only where `use_sliding_window` says so."""

    use_sliding_window: bool = setting("use_sliding_window", False)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """See `LayeredConfig`. A window that is not in use is none."""
        if not hf.get("use_sliding_window"):
            hf["sliding_window"] = None
        return super().fill(hf)
