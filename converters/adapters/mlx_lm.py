"""Adapters as mlx-lm writes them: adapter_config.json, adapters.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from converters.adapters.places import Places, check_pairs, rest, scaled
from funcrt.adapters import Adapter, Change
from funcrt.errors import ConfigError, ParamsError
from funcrt.layers.moe import Experts, StackedExperts
from funcrt.params import Params

import mlx.core as mx

WEIGHTS = "adapters.safetensors"

_A, _B, _MAGNITUDE = ".lora_a", ".lora_b", ".m"
_KINDS = ("lora", "dora", "full")
_ROLES = ("gate", "up", "down")
_EMBEDDING = re.compile(r"(^|\.)(\w*emb\w*|wte|wpe)$")


def read(name: str, config: Mapping[str, Any], tensors: Params, places: Places) -> Adapter:
    """The adapter in some tensors. Raises ConfigError, ParamsError: see `adapters.read`."""
    kind = config.get("fine_tune_type", "lora")
    if kind not in _KINDS:
        raise ConfigError(
            f"adapter {name}: fine_tune_type {kind!r} is not supported; {', '.join(_KINDS)} are"
        )
    base = config.get("model") or "a base that it does not name"
    note = f"adapter {name}: fine_tune_type {kind} (mlx-lm), made for {base}"
    if kind == "full":
        return Adapter(name, {}, places.whole(tensors), (note,))
    scale = (config.get("lora_parameters") or {}).get("scale")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise ConfigError(
            f"adapter {name}: lora_parameters.scale: expected a number, got {scale!r}"
        )
    check_pairs(name, tensors, _A, _B)
    ends = (_A, _B, _MAGNITUDE) if kind == "dora" else (_A, _B)
    modules = list(dict.fromkeys(t.removesuffix(_A) for t in tensors if t.endswith(_A)))
    if left := rest(tensors, {module + end for module in modules for end in ends}):
        raise ParamsError(f"adapter {name}: tensors that are not read: {left}")
    if kind == "dora" and (bare := [m for m in modules if m + _MAGNITUDE not in tensors]):
        raise ParamsError(f"adapter {name} is incomplete: it lacks {bare[0]}{_MAGNITUDE}")
    changes, stacks = {}, {}
    for module in modules:
        a, b = tensors[module + _A], tensors[module + _B]
        if a.ndim == 3:
            stacks[module] = Change(a, scaled(b, scale))
            continue
        _check_shapes(name, module, a, b)
        a, b = a.swapaxes(0, 1), b.swapaxes(0, 1)
        if _EMBEDDING.search(module):  # the table is [V, E], and so turned around
            a, b = b.swapaxes(0, 1), a.swapaxes(0, 1)
        magnitude = tensors.get(module + _MAGNITUDE)
        changes[places.matrix(module)] = Change(a, scaled(b, scale), magnitude)
    for part in places.experts():
        changes |= _expert_changes(part, stacks)
    changes |= {places.matrix(module): change for module, change in stacks.items()}
    places.check_depth(name, changes)
    return Adapter(name, changes, notes=(f"{note}, {len(changes)} matrices",))


def _check_shapes(name: str, module: str, a: mx.array, b: mx.array) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ParamsError(
            f"adapter {name}: {module}{_A} {list(a.shape)} and {module}{_B} {list(b.shape)} are "
            "not [I, r] and [r, O]"
        )


# --- experts, which mlx-lm stacks ----------------------------------------------------------------


def _expert_changes(part: Experts, stacks: dict[str, Change]) -> dict[str, Change]:
    """Changes of the matrices that a family has for its experts; taken out of `stacks`."""
    parent = part.name.rpartition(".")[0]
    changes: dict[str, Change] = {}
    for place in (f"{part.name}.switch_mlp", f"{parent}.switch_mlp", part.name):
        found = {
            role: stacks.pop(f"{place}.{role}_proj")
            for role in _ROLES
            if f"{place}.{role}_proj" in stacks
        }
        if isinstance(part, StackedExperts):
            changes |= _stacked(part, found)
            continue
        projections = dict(zip(_ROLES, part.projections, strict=True))
        for role, change in found.items():
            for expert in range(change.a.shape[0]):
                matrix = f"{part.name}.{expert}.{projections[role]}"
                changes[matrix] = Change(change.a[expert], change.b[expert])
    return changes


def _stacked(part: StackedExperts, found: dict[str, Change]) -> dict[str, Change]:
    """Those of gate and up are one stack here: their A on top of each other, their B in blocks."""
    changes = {part.down: found["down"]} if "down" in found else {}
    halves = [found.get(role) for role in ("gate", "up")]
    present = [half for half in halves if half is not None]
    if not present:
        return changes
    total = sum(half.a.shape[1] for half in present)
    blocks, before = [], 0
    for half in halves:
        if half is None:
            like = present[0].b
            blocks.append(mx.zeros((*like.shape[:2], total), like.dtype))
            continue
        rank = half.b.shape[2]
        blocks.append(mx.pad(half.b, [(0, 0), (0, 0), (before, total - before - rank)]))
        before += rank
    count = blocks[0].shape[0]
    joined = (
        mx.stack(blocks, axis=2).reshape(count, -1, total)
        if part.IN_TURNS
        else mx.concatenate(blocks, axis=1)
    )
    changes[part.gate_up] = Change(mx.concatenate([half.a for half in present], axis=1), joined)
    return changes
