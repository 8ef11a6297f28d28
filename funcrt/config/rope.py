"""`RopeConfig`: how a model's rotary position embedding turns, read from a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from funcrt.config.fields import settle
from funcrt.errors import ConfigError

_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}  # fmt: skip
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("factor", "short_factor", "long_factor"),
}
KINDS = tuple(_KEYS)
_STRETCHED = ("llama3", "yarn", "longrope")  # kinds that read the context length of pretraining


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and length scaling, spelled as in Hugging Face configs.

    Attributes:
        theta: the base.
        kind: how frequencies are scaled for longer contexts.
        factor: of that scaling.
        original_max_positions: context length of pretraining, in tokens.
        low_freq_factor, high_freq_factor: turns over that length that bound the blend (llama3).
        attention_factor: multiplies cos and sin (yarn, longrope); None derives it as in the papers
            (arXiv:2309.00071 §3.4, arXiv:2402.13753 §3.2).
        beta_fast, beta_slow, mscale, mscale_all_dim, truncate: of yarn.
        short_factor, long_factor: divisors of each plane's frequency, for sequences up to the
            original length and for longer ones (longrope).
        partial: share of each head's width that turns; the rest is left as it is.
        interleaved: whether neighbours form the planes, not the two halves.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        settle(self)

    @classmethod
    def from_hf(
        cls,
        hf: Mapping[str, Any],
        partial: bool = False,
        interleaved: bool = False,
        defaults: Mapping[str, Any] | None = None,
    ) -> RopeConfig:
        """Read either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

        Args:
            hf: the config.
            partial: whether the model knows heads of which only a part turns.
            interleaved: see the class.
            defaults: of `rope_theta` and `partial_rotary_factor`, where the config has neither
                spelling of them.

        Raises:
            ConfigError: the two disagree, or a kind or key is not supported.
        """
        rope = {**(defaults or {}), **_merge(hf)}
        if "factor" in rope and "rope_type" not in rope:
            raise ConfigError(
                f"rope scaling has a factor ({rope['factor']!r}) but no rope_type; "
                f"known: {', '.join(KINDS)}"
            )
        kind = rope.pop("rope_type", "default") or "default"
        theta = rope.pop("rope_theta", 10000.0)
        if kind not in KINDS:
            raise ConfigError(f"rope type {kind!r} is not supported; known: {', '.join(KINDS)}")
        original = _original_length(hf, rope.pop("original_max_position_embeddings", None), kind)
        share = rope.pop("partial_rotary_factor", None)
        share = 1.0 if share is None else share
        if share != 1.0 and not partial:
            raise ConfigError(f"partial_rotary_factor={share!r} is not supported for this model")
        unset = {"beta_fast": (None, 0), "beta_slow": (None, 0)}  # 0 stands for the default
        rope = {k: v for k, v in rope.items() if v not in unset.get(k, (None,))}
        if kind in ("yarn", "longrope") and "factor" not in rope:
            rope["factor"] = hf.get("max_position_embeddings", 2048) / (original or 1)
        if kind == "default":
            rope.pop("factor", None)
        _check(kind, {**rope, "rope_theta": theta, "partial_rotary_factor": share}, original)
        for key in ("short_factor", "long_factor"):
            if key in rope:
                rope[key] = tuple(float(value) for value in rope[key])
        return cls(
            theta=float(theta),
            kind=kind,
            original_max_positions=int(original),
            partial=float(share),
            interleaved=interleaved,
            **rope,
        )

    def check_width(self, width: int) -> None:
        """Raise ConfigError unless heads of this width can turn so."""
        dims = int(width * self.partial)
        if dims % 2 or not dims:
            raise ConfigError(
                f"head_dim must be even for rotary embedding, got {width}"
                + (f", of which {dims} turn" if self.partial != 1.0 else "")
            )
        if self.kind == "dynamic" and dims < 4:
            raise ConfigError(f"rope type 'dynamic' needs a head_dim of at least 4, got {dims}")
        for key in ("short_factor", "long_factor"):
            count = len(getattr(self, key))
            if self.kind == "longrope" and count != dims // 2:
                raise ConfigError(
                    f"rope {key}: expected {dims // 2} numbers for a head_dim of {width}, "
                    f"got {count}"
                )

    def to_hf(self, partial: bool = False) -> dict[str, Any]:
        """The older spelling, which both mlx-lm and transformers read.

        `partial` is as in `from_hf`: such models may fill in less than whole heads.
        """
        share = {"partial_rotary_factor": self.partial} if partial else {}
        if self.kind == "default":
            return {"rope_theta": self.theta, "rope_scaling": None, **share}
        values = {key: getattr(self, key) for key in sorted(_KEYS[self.kind])}
        scaling: dict[str, Any] = {
            "rope_type": self.kind,
            **{
                key: list(value) if isinstance(value, tuple) else value
                for key, value in values.items()
                if value is not None
            },
        }
        if self.kind in _STRETCHED:
            scaling["original_max_position_embeddings"] = self.original_max_positions
        return {"rope_theta": self.theta, "rope_scaling": scaling, **share}


def _merge(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a config says about rope, in the newer spelling."""
    old = dict(hf.get("rope_scaling") or {})
    new = dict(hf.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in new.values()):
        raise ConfigError("rope_parameters per layer type are not supported for this model")
    for spelling in (old, new):
        if "type" in spelling:
            kind = spelling.pop("type")
            if spelling.setdefault("rope_type", kind) != kind:
                raise ConfigError(
                    f"rope scaling names two kinds: type={kind!r} and "
                    f"rope_type={spelling['rope_type']!r}; keep one"
                )
    for key in ("rope_theta", "partial_rotary_factor"):
        if hf.get(key) is not None:
            old[key] = hf[key]
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            raise ConfigError(
                f"rope_parameters says {key}={new[key]!r}, the older spelling says "
                f"{old[key]!r}; keep the one the weights were trained with"
            )
    return {**old, **new}


def _original_length(hf: Mapping[str, Any], original: Any, kind: str) -> Any:
    # `dynamic` stretches from max_position_embeddings whatever else the config says.
    if kind in _STRETCHED:
        outer = hf.get("original_max_position_embeddings")
        original = original if outer is None else outer
    if original is None or kind == "dynamic":
        original = hf.get("max_position_embeddings", 2048)
    return original


def _check(kind: str, rope: Mapping[str, Any], original: Any) -> None:
    unknown = sorted(rope.keys() - _KEYS[kind] - {"rope_theta", "partial_rotary_factor"})
    if unknown:
        raise ConfigError(f"rope type {kind!r} does not take {', '.join(unknown)}")
    missing = [key for key in _REQUIRED[kind] if key not in rope]
    if missing:
        raise ConfigError(f"rope type {kind!r} needs {', '.join(missing)}")
    for key, value in rope.items():
        values = list(value) if key in ("short_factor", "long_factor") else [value]
        if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
            raise ConfigError(f"rope {key}: expected a finite number, got {value!r}")
    positive = [original, rope.get("factor", 1.0), *rope.get("short_factor", ())]
    positive += rope.get("long_factor", ())
    if rope["rope_theta"] <= 1 or any(value <= 0 for value in positive):
        raise ConfigError("rope theta must be above 1, factors and original length positive")
    if not 0 < rope["partial_rotary_factor"] <= 1:
        raise ConfigError(
            "rope partial_rotary_factor: expected above 0 and at most 1, "
            f"got {rope['partial_rotary_factor']!r}"
        )
