"""The `rope_parameters` of transformers 5, for modules that know the older spelling only."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from funcrt.errors import ConfigError

_KEY = "rope_parameters"
_NAMES = {  # the older spellings
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
}
_LOCK = threading.RLock()


class Translation:
    """Gives each class of arguments what it reads of a config's rotary settings.

    A module that does not know `rope_parameters` would silently use its defaults.

    Args:
        config: of a model; its `text_config` may have rotary settings of its own.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._model_type = config.get("model_type")
        self._unread: dict[str, Mapping[str, Any]] = {}
        for path, part in (("", config), ("text_config.", config.get("text_config"))):
            rope = part.get(_KEY) if isinstance(part, Mapping) else None
            if isinstance(rope, Mapping) and rope:
                self._unread[f"{path}{_KEY}"] = rope

    def fit(self, arguments: type, config: Mapping[str, Any]) -> dict[str, Any]:
        """`config` with what a class of arguments reads in the older spelling.

        Raises ConfigError where both spellings are there and disagree.
        """
        config = dict(config)
        rope, fields = config.get(_KEY), inspect.signature(arguments).parameters
        if not isinstance(rope, Mapping):
            return config
        if _KEY in fields:
            self._note(rope)
            return config
        older = _older(rope)
        if older is None or not all(_places(name, fields) for name in older):
            return config
        for name, value in older.items():
            place = _places(name, fields)[0]
            if config.get(place) is None:
                config[place] = value
            elif name != "rope_scaling" and config[place] != value:
                raise ConfigError(
                    f"{_KEY} says {name}={value!r}, {place} says {config[place]!r}; keep "
                    "the one the weights were trained with"
                )
        self._note(rope)
        scaling = fields.get("rope_scaling")
        if scaling is not None and scaling.default is inspect.Parameter.empty:
            config.setdefault("rope_scaling", None)
        return config

    @contextmanager
    def translating(self, base: type) -> Iterator[None]:
        """Within it, classes of arguments derived from `base` are made from fitted configs.

        Raises ConfigError at the end for rotary settings that none of them read.
        """
        thread = threading.get_ident()
        with _LOCK:
            original = base.__dict__["from_dict"]

            def from_dict(cls: type, params: Mapping[str, Any]) -> Any:
                mine = threading.get_ident() == thread
                return original.__func__(cls, self.fit(cls, params) if mine else params)

            base.from_dict = classmethod(from_dict)  # type: ignore[attr-defined]
            try:
                yield
            finally:
                base.from_dict = original  # type: ignore[attr-defined]
        for path, rope in self._unread.items():
            raise ConfigError(
                f"{path}: mlx-lm's module for {self._model_type!r} does not read "
                f"{dict(rope)!r}, nor the same in the older spelling (rope_theta, rope_scaling, "
                "rope_local_base_freq); its logits would be wrong"
            )

    def _note(self, rope: Mapping[str, Any]) -> None:
        self._unread = {path: other for path, other in self._unread.items() if other != rope}


def _older(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """The older spelling; None where there is none.

    One mapping for each type of layer has one only for Gemma 3's two types.
    """
    kinds = {name: part for name, part in rope.items() if isinstance(part, Mapping)}
    if not kinds:
        return _flat(rope)
    if len(kinds) < len(rope):
        return None
    first, *others = kinds.values()
    if all(other == first for other in others):
        return _flat(first)
    if kinds.keys() != {"full_attention", "sliding_attention"}:
        return None
    older, local = _flat(kinds["full_attention"]), _flat(kinds["sliding_attention"])
    theta = local.pop("rope_theta", None)
    if any(older.get(name) != value for name, value in local.items()) or "rope_scaling" in local:
        return None
    return older if theta is None else {**older, "rope_local_base_freq": theta}


def _flat(rope: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(rope)
    older = {name: rope.pop(name) for name in _NAMES if rope.get(name) is not None}
    if older.get("partial_rotary_factor") == 1:
        del older["partial_rotary_factor"]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":  # the default one takes no other settings
        older["rope_scaling"] = {**rope, "rope_type": kind, "type": kind}
    return older


def _places(name: str, fields: Mapping[str, Any]) -> list[str]:
    return [other for other in _NAMES.get(name, (name,)) if other in fields]
