"""Tensors as mlx-lm writes them, under the names and in the layout that their family has.

mlx-lm stacks experts, names MLPs alike, turns the taps of convolutions around, takes a matrix of
latent attention apart, and adds 1 to some norms before it writes a checkpoint. All of this is
undone here without loss, packed or not, and lazily: nothing is computed before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from funcrt.config import ModelConfig
from funcrt.errors import ParamsError
from funcrt.layers import Part, RMSNorm
from funcrt.layers.latent import LatentAttention
from funcrt.layers.moe import Experts, StackedExperts
from funcrt.models import FAMILIES
from funcrt.packing import PARTS, Transposed, dequantize, quantization_of
from funcrt.params import Params, ParamSpec

import mlx.core as mx

# Family file -> what names begin with there and here.
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt2": (("model.", ""),),
    "gpt_neox": (
        ("model.h.", "gpt_neox.layers."), ("model.embed_out.", "embed_out."),
        ("model.", "gpt_neox."),
    ),
    "qwen3_5": (
        ("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."),
    ),
}  # fmt: skip
RENAMED["qwen3_5_moe"] = RENAMED["qwen3_5"]
_ONE_ADDED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # to norms around 1 + weight
_ROLES = ("gate", "up", "down")

# What MLPs of some families call their matrices -> what mlx-lm calls all of them.
NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ALL_PARTS = (*PARTS, "bias")


def restore(config: ModelConfig, params: Mapping[str, mx.array]) -> Params:
    """Tensors under the names of the family of `config`; what is there already stays as it is.

    A matrix that mlx-lm takes apart and packs along both of its axes (`kv_b_proj` of latent
    attention) comes back as a dense float32 one, which holds the same numbers.

    Raises ParamsError for stacks of another number of experts, or that do not go together.
    """
    family = FAMILIES[config.model_type]
    spec = family.param_spec(config)
    found = _rename(family.name, spec, params)
    renamed = found.keys() != params.keys()
    parts = list(family.network(config).walk())
    for part in parts:
        if isinstance(part, Experts):
            _restore_experts(part, spec, found)
        elif isinstance(part, LatentAttention):
            _restore_latent(part, found)
    _restore_numbered(spec, found)
    moved = _restore_taps(spec, found)
    if moved and family.name in _ONE_ADDED:
        _restore_norms(parts, found)
    if renamed:
        _restore_transposed(spec, found)
    return found


def renamed(name: str) -> list[str]:
    """What families may call a tensor that mlx-lm calls so, as far as names alone tell."""
    rules = {rule for family in RENAMED.values() for rule in family}
    return sorted(new + name.removeprefix(old) for old, new in rules if name.startswith(old))


def _rename(family: str, spec: ParamSpec, params: Mapping[str, mx.array]) -> Params:
    rules = RENAMED.get(family, ())
    if any(name.startswith(old) for old, _ in rules for name in spec):
        return dict(params)
    renamed = {}
    for name, array in params.items():
        old, new = next((rule for rule in rules if name.startswith(rule[0])), ("", ""))
        renamed[new + name.removeprefix(old)] = array
    return renamed


# --- experts -------------------------------------------------------------------------------------


def _restore_experts(part: Experts, spec: ParamSpec, params: Params) -> None:
    parent = part.name.rpartition(".")[0]
    places = (f"{part.name}.switch_mlp", f"{parent}.switch_mlp", part.name)
    place = next((name for name in places if f"{name}.gate_proj.weight" in params), None)
    if place is None:
        return
    stacks = [_pop_stack(params, f"{place}.{role}_proj", part.count) for role in _ROLES]
    if isinstance(part, StackedExperts):
        gate_up = _join(f"{place}.gate_proj", stacks[0], stacks[1], in_turns=part.IN_TURNS)
        params |= _stored_stack(part.gate_up, spec, gate_up)
        params |= _stored_stack(part.down, spec, stacks[2])
        return
    for projection, stack in zip(part.projections, stacks, strict=True):
        for expert in range(part.count):
            for piece, array in stack.items():
                params[f"{part.name}.{expert}.{projection}.{piece}"] = array[expert]


def _pop_stack(params: Params, name: str, count: int) -> Params:
    stack = {p: params.pop(f"{name}.{p}") for p in _ALL_PARTS if f"{name}.{p}" in params}
    for piece, array in stack.items():
        if array.ndim == 0 or array.shape[0] != count:
            raise ParamsError(
                f"{name}.{piece}: expected {count} matrices, got shape {array.shape}; "
                "the config is of another number of experts or heads"
            )
    return stack


def _join(name: str, gate: Params, up: Params, *, in_turns: bool) -> Params:
    """One stack of both, gate and up rows in turns or one after the other."""
    if {p: a.shape for p, a in gate.items()} != {p: a.shape for p, a in up.items()}:
        raise ParamsError(
            f"{name} and its up_proj belong into one tensor, but are packed differently or differ "
            "in shape; pack them alike, or dequantize them (mlx_lm.convert --dequantize)"
        )
    joined = {}
    for piece, array in gate.items():
        pair = [array, up[piece]]
        joined[piece] = (
            mx.stack(pair, axis=2).reshape(array.shape[0], -1, *array.shape[2:])
            if in_turns
            else mx.concatenate(pair, axis=1)
        )
    return joined


def _stored_stack(name: str, spec: ParamSpec, stack: Params) -> Params:
    """The tensors of the stack `name`, which is `[X, O, I]` here, as the family stores it."""
    stored = {f"{name}.{p}": array for p, array in stack.items() if p != "bias"}
    if "bias" in stack:
        stored[f"{name}_bias"] = stack["bias"]
    if name in spec and f"{name}.scales" not in stored:
        dense = stored.pop(f"{name}.weight")
        stored[name] = dense.swapaxes(-1, -2) if isinstance(spec[name], Transposed) else dense
    return stored


# --- single tensors ------------------------------------------------------------------------------


def _restore_latent(part: LatentAttention, params: Params) -> None:
    """`embed_q` `[H, C, D]` and `unembed_out` `[H, value_dim, C]` -> `kv_b_proj`."""
    place = part.up.name.rpartition(".")[0]
    names = (f"{place}.embed_q", f"{place}.unembed_out")
    if any(f"{name}.weight" not in params for name in names):
        return
    stacks = [_pop_stack(params, name, part.heads) for name in names]
    widths = (part.head_dim, part.rank)
    if any("scales" in stack for stack in stacks):
        stacks = [_expand(stack, width) for stack, width in zip(stacks, widths, strict=True)]
    keys, values = (stack["weight"] for stack in stacks)
    shapes = ((part.rank, part.head_dim), (part.value_dim, part.rank))
    for name, array, shape in zip(names, (keys, values), shapes, strict=True):
        if array.shape[1:] != shape:
            raise ParamsError(
                f"{name}.weight: expected {shape} for each head, got {array.shape[1:]}"
            )
    joined = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
    params[f"{part.up.name}.weight"] = joined.reshape(-1, part.rank)


def _expand(stack: Params, inputs: int) -> Params:
    named = {f"w.{piece}": array for piece, array in stack.items()}
    packing = quantization_of(named, "w", inputs)
    weight = (
        stack["weight"].astype(mx.float32) if packing is None else dequantize(named, "w", packing)
    )
    return {"weight": weight}


def _restore_numbered(spec: ParamSpec, params: Params) -> None:
    """`gate_proj`, `up_proj` and `down_proj` of an MLP -> `w1`, `w3` and `w2`."""
    for name in spec:
        place, _, last = name.removesuffix(".weight").rpartition(".")
        theirs = f"{place}.{NUMBERED.get(last, '')}"
        if name in params or f"{theirs}.weight" not in params:
            continue
        for piece in _ALL_PARTS:
            if f"{theirs}.{piece}" in params:
                params[f"{place}.{last}.{piece}"] = params.pop(f"{theirs}.{piece}")


def _restore_taps(spec: ParamSpec, params: Params) -> bool:
    """Taps `[C, K, 1]` of convolutions -> `[C, 1, K]`; whether there were any."""
    moved = False
    for name, shape in spec.items():
        array = params.get(name)
        if array is None or len(shape) != 3 or shape[1] != 1 or shape[2] == 1:
            continue
        if array.shape == (shape[0], shape[2], 1):
            params[name] = array.swapaxes(1, 2)
            moved = True
    return moved


def _restore_norms(parts: list[Part], params: Params) -> None:
    """In float32, which holds what is left of a sum that was rounded to 16 bits."""
    for part in parts:
        name = f"{part.name}.weight" if isinstance(part, RMSNorm) else ""
        if isinstance(part, RMSNorm) and part.offset and name in params:
            params[name] = params[name].astype(mx.float32) - part.offset


def _restore_transposed(spec: ParamSpec, params: Params) -> None:
    for name, shape in spec.items():
        packed = f"{name.removesuffix('.weight')}.scales" in params
        if isinstance(shape, Transposed) and name in params and not packed:
            params[name] = params[name].swapaxes(-1, -2)
