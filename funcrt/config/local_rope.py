"""Configs of models whose layers with a window turn by a rope of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from funcrt.config.layer_types import FULL, SLIDING
from funcrt.config.patterns import PatternConfig
from funcrt.config.rope import RopeConfig
from funcrt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LocalRopeConfig(PatternConfig):
    """A model of which only the layers that see everything turn slower for longer contexts.

    In the newer spelling `rope_parameters` has an entry for each layer type. In the older one
    `rope_scaling` means the layers that see everything.

    Attributes:
        local_rope: of the layers with a window; `rope` is that of the others.
    """

    local_rope: RopeConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.local_rope.check_width(self.head_dim)
        if self.local_rope.kind != "default":
            raise ConfigError(
                f"rope type {self.local_rope.kind!r} of {SLIDING!r} is not supported for "
                f"{self.model_type!r}: only {FULL!r} may scale"
            )

    @classmethod
    def ropes(cls, hf: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """See `ModelConfig`. Raises ConfigError for `rope_parameters` that are not by type."""
        given = hf.get("rope_parameters") or {}
        if wrong := sorted(given.keys() - {FULL, SLIDING}):
            raise ConfigError(
                f"rope_parameters: expected an entry for {FULL!r} and one for {SLIDING!r}, "
                f"got {', '.join(wrong)}"
            )
        local = {**hf, "rope_theta": cls.local_theta(hf), "rope_scaling": None}
        return {
            "rope": {**hf, "rope_parameters": given.get(FULL)},
            "local_rope": {**local, "rope_parameters": given.get(SLIDING)},
        }

    @classmethod
    def local_theta(cls, hf: Mapping[str, Any]) -> Any:
        """The older spelling of the base of `local_rope`; or None."""
        raise NotImplementedError

    def ropes_by_type(self) -> dict[str, dict[str, Any]]:
        """Both ropes as `rope_parameters` has them."""
        spelled = {}
        for kind, rope in ((FULL, self.rope), (SLIDING, self.local_rope)):
            hf = rope.to_hf()
            scaling = hf["rope_scaling"] or {"rope_type": "default"}
            spelled[kind] = {**scaling, "rope_theta": hf["rope_theta"]}
        return spelled
