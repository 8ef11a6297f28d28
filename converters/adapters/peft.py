"""Adapters as PEFT writes them: adapter_config.json, adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from converters.adapters.places import Places, check_pairs, rest, scaled
from funcrt.adapters import Adapter, Change
from funcrt.errors import ConfigError, ParamsError
from funcrt.params import Params

WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
_MAGNITUDE = ".lora_magnitude_vector"
# Settings with which the sum is another one, or the base another.
_REFUSED = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias",
    "megatron_config", "monteclora_config", "target_parameters", "trainable_token_indices",
    "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
# Ways to begin that take a part out of the base, which is then another.
_CHANGES_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")


def read(name: str, config: Mapping[str, Any], tensors: Params, places: Places) -> Adapter:
    """The adapter in some tensors. Raises ConfigError, ParamsError: see `adapters.read`."""
    _check_config(name, config)
    check_pairs(name, tensors, _A, _B)
    check_pairs(name, tensors, _EMBEDDING_A, _EMBEDDING_B)
    changes: dict[str, Change] = {}
    used: set[str] = set()
    for tensor, a in tensors.items():
        if not tensor.endswith((_A, _EMBEDDING_A)):
            continue
        is_embedding = tensor.endswith(_EMBEDDING_A)
        ends = (_EMBEDDING_A, _EMBEDDING_B) if is_embedding else (_A, _B)
        base = tensor.removesuffix(ends[0])
        b = tensors[base + ends[1]]
        magnitude = next(
            (f for f in (_MAGNITUDE, f"{_MAGNITUDE}.weight") if base + f in tensors), ""
        )
        used |= {tensor, base + ends[1], base + magnitude}
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ParamsError(
                f"adapter {name}: {tensor} {list(a.shape)} and {base + ends[1]} {list(b.shape)} "
                "are not [r, I] and [O, r]"
            )
        module = base.removeprefix(_PREFIX)
        scale = _scale(name, config, module, a.shape[0])
        matrix = places.matrix(module)
        if is_embedding:
            _check_embedding(name, matrix, places)
            a, b = b.swapaxes(0, 1), a.swapaxes(0, 1)  # the table is [V, E], and so turned around
        changes[matrix] = Change(
            a, scaled(b, scale), tensors[base + magnitude] if magnitude else None
        )
    whole = _whole(config, {t: a for t, a in tensors.items() if t not in used}, places)
    if left := rest(tensors, {*used, *(tensor for tensor, _ in whole)}):
        raise ParamsError(f"adapter {name}: tensors that are not read: {left}")
    if _goes_to_the_end(config):
        places.check_depth(name, changes)
    replaced = {places.name(model_name): tensors[tensor] for tensor, model_name in whole}
    return Adapter(name, changes, replaced, (_note(name, config, changes),))


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"adapter {name}: peft_type {kind!r} is not supported; LORA is")
    if found := [key for key in _REFUSED if config.get(key)]:
        listed = ", ".join(f"{key}={config[key]!r}" for key in found)
        raise ConfigError(f"adapter {name}: not supported: {listed}")
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"adapter {name}: init_lora_weights={begin!r} changes the base too; save it as plain "
            "LoRA (PEFT: save_pretrained(path_initial_model_for_weight_conversion=...))"
        )


def _scale(name: str, config: Mapping[str, Any], module: str, rank: int) -> float:
    """`alpha / r`, or `alpha / sqrt(r)` (arXiv:2312.03732); patterns name modules by their ends."""
    expected = _pattern(config, "rank_pattern", module, config.get("r"))
    alpha = _pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    if expected != rank:
        raise ParamsError(f"adapter {name}: {module} is of rank {rank}, its config says {expected}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise ConfigError(f"adapter {name}: lora_alpha: expected a number, got {alpha!r}")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _pattern(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _check_embedding(name: str, matrix: str, places: Places) -> None:
    if places.is_tied:
        raise ParamsError(
            f"adapter {name}: changes {matrix} as an embedding only, but this base has it as the "
            "last projection too"
        )


def _whole(config: Mapping[str, Any], tensors: Params, places: Places) -> list[tuple[str, str]]:
    """Tensors that replace the base's, and their modules' names: `modules_to_save`."""
    found = []
    for tensor in tensors:
        module = tensor.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if places.name(module) in places.names:
            found.append((tensor, module))
    return found


def _goes_to_the_end(config: Mapping[str, Any]) -> bool:
    """Whether every layer with matrices of these kinds is adapted, as far as the config tells."""
    targets = config.get("target_modules")
    chosen = any(config.get(key) for key in ("layers_to_transform", "exclude_modules"))
    if isinstance(targets, str):
        return targets == "all-linear"
    return not chosen and bool(targets) and not any("." in str(target) for target in targets or ())


def _note(name: str, config: Mapping[str, Any], changes: Mapping[str, Change]) -> str:
    base = config.get("base_model_name_or_path") or "a base that it does not name"
    kind = "DoRA" if any(c.magnitude is not None for c in changes.values()) else "LoRA"
    return f"adapter {name}: {kind} of {len(changes)} matrices (PEFT), made for {base}"
