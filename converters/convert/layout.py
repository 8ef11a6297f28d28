"""Which tensors a converted checkpoint has, and what each is made of.

Dense checkpoints have the tensors of their family, as Hugging Face names them; both transformers
and mlx-lm read those. With packed matrices they have mlx-lm's, because its readers turn, split and
stack dense tensors only: experts stacked, gates and ups apart, matrices `[O, I]`, the taps of
convolutions last, norms around 1 in qwen3_next with the 1 added (rounded to the stored dtype, as
mlx-lm does it). `converters.mlx_names` undoes all of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from converters.functional.family import ModuleFamily
from converters.mlx_names import NUMBERED, RENAMED
from funcrt.layers import (
    Embedding,
    Experts,
    Gated,
    Linear,
    MoE,
    NetworkFamily,
    RMSNorm,
    StackedExperts,
)
from funcrt.layers.latent import LatentAttention
from funcrt.model import Model
from funcrt.packing import PARTS, Quantization, Transposed, packed_shape
from funcrt.params import Params, ParamSpec, packings

_KEEPS_LATENT = ("deepseek_v2",)
_STACKS_IN_PLACE = ("dots1", "gpt_oss")  # under the experts' own name, not in `switch_mlp`
_NAMES_ROLES = ("lfm2_moe",)  # of MLPs whose matrices have numbers
_ADDS_ONE = ("qwen3_next",)  # where mlx-lm does so only beside experts that are not stacked yet


@dataclass(frozen=True)
class Output:
    """One tensor of the output, of which a matrix may be packed.

    Attributes:
        name: with `.weight` where it has one.
        shape: dense.
        members: tensors of the family that it holds, one for each entry of its first axis if it is
            `stacked`.
        stacked: whether it has an axis more than its members.
        rows: first, end and step of those that it takes of a member; None takes all.
        swapped: members are stored with their last two axes exchanged.
        change: "taps" moves the last axis before the one before it; "one" adds 1.
        packable: whether it is a matrix that products and look-ups take packed.
    """

    name: str
    shape: tuple[int, ...]
    members: tuple[str, ...]
    stacked: bool = False
    rows: tuple[int, int, int] | None = None
    swapped: bool = False
    change: Literal["", "taps", "one"] = ""
    packable: bool = False

    @property
    def base(self) -> str:
        """Its name without `.weight`."""
        return base_of(self.name)

    @property
    def matrices(self) -> tuple[str, ...]:
        """The members as recipes call them."""
        return tuple(base_of(member) for member in self.members)


def base_of(name: str) -> str:
    """The name of a matrix: that of its tensor without `.weight`."""
    return name.removesuffix(".weight")


def family_layout(model: Model) -> tuple[list[Output], dict[str, Quantization]]:
    """The tensors of the family as they are, and how those are packed that are, by base."""
    if isinstance(model.family, ModuleFamily):
        return _module_layout(model.family, model.params)
    packable = packable_matrices(model)
    outputs = [
        Output(name, shape, (name,), packable=name in packable)
        for name, shape in model.spec.items()
    ]
    return outputs, packings(model.spec, model.params)


def mlx_layout(model: Model, outputs: list[Output]) -> list[Output]:
    """The tensors that mlx-lm reads packed, made of those of the family."""
    family = model.family
    if not isinstance(family, NetworkFamily):
        return outputs  # of a module of mlx-lm
    found = {output.name: _turned(output, model.spec) for output in outputs}
    for part in family.network(model.config).walk():
        if isinstance(part, StackedExperts):
            _split_stacks(part, _place(part, family.name), found)
        elif isinstance(part, Experts):
            _stack(part, _place(part, family.name), found)
        elif isinstance(part, RMSNorm) and part.offset and family.name in _ADDS_ONE:
            name = f"{part.name}.weight"
            found[name] = replace(found[name], change="one")
    # Its reader moves the taps of all others, packed or not.
    moves = family.name in _ADDS_ONE
    rules = RENAMED.get(family.name, ())
    if family.name in _NAMES_ROLES:
        found = {name: replace(o, name=_with_role(name)) for name, o in found.items()}
    return [
        replace(_tapped(output) if moves else output, name=_renamed(output.name, rules))
        for output in found.values()
    ]


def packable_matrices(model: Model) -> frozenset[str]:
    """Tensors that may be packed: of linear maps, embeddings and experts, but not of routers.

    Routers and the gates of shared experts are small, and what they choose changes with their
    rounding; mlx-lm packs them in some families, in others it cannot. Dense ones are read by all.
    Where mlx-lm takes the matrix of latent attention apart, it packs the pieces again, so that one
    stays dense too.
    """
    family = model.family
    assert isinstance(family, NetworkFamily)
    names: set[str] = set()
    dense: set[str] = set()
    for part in family.network(model.config).walk():
        if isinstance(part, (Linear, Embedding)):
            names.add(f"{part.name}.weight")
        elif isinstance(part, Experts):
            names |= {name for name in part.tensors() if not name.endswith("_bias")}
        if isinstance(part, MoE):
            dense |= {name for router in part.router.walk() for name in router.tensors()}
        elif isinstance(part, Gated):
            dense |= part.gate.tensors().keys()
        elif isinstance(part, LatentAttention) and family.name not in _KEEPS_LATENT:
            dense |= part.up.tensors().keys()
    return frozenset(names - dense)


def _module_layout(
    family: ModuleFamily, params: Params
) -> tuple[list[Output], dict[str, Quantization]]:
    """Names and shapes of a module of mlx-lm, which packs what it calls `to_quantized`."""
    outputs: list[Output] = []
    packed: dict[str, Quantization] = {}
    modules: dict[str, Any] = dict(family.binding.module.named_modules())  # type: ignore[no-untyped-call]
    for name, array in params.items():
        base, _, part = name.rpartition(".")
        module: Any = modules.get(base)
        bits = getattr(module, "bits", None) if f"{base}.scales" in params else None
        if bits is None:
            matrix = part == "weight" and hasattr(module, "to_quantized")
            outputs.append(Output(name, array.shape, (name,), packable=matrix))
        elif part == "weight":
            packed[base] = Quantization(bits, module.group_size, getattr(module, "mode", "affine"))
            shape = (*array.shape[:-1], array.shape[-1] * 32 // bits)
            outputs.append(Output(name, shape, (name,), packable=True))
        elif part not in PARTS:
            outputs.append(Output(name, array.shape, (name,)))
    return outputs, packed


def _turned(output: Output, spec: ParamSpec) -> Output:
    shape = spec[output.name]
    if not isinstance(shape, Transposed):
        return output
    return replace(output, shape=packed_shape(shape), swapped=True)


def _tapped(output: Output) -> Output:
    shape = output.shape
    if len(shape) != 3 or shape[1] != 1 or shape[2] == 1 or output.packable:
        return output
    return replace(output, shape=(shape[0], shape[2], shape[1]), change="taps")


def _stack(part: Experts, place: str, outputs: dict[str, Output]) -> None:
    """The matrices of single experts become one tensor for each projection."""
    for role, projection in zip(("gate", "up", "down"), part.projections, strict=True):
        members = tuple(f"{part.name}.{i}.{projection}.weight" for i in range(part.count))
        shapes = {outputs.pop(member).shape for member in members}
        name = f"{place}.{role}_proj.weight"
        shape = (part.count, *shapes.pop())
        outputs[name] = Output(name, shape, members, stacked=True, packable=True)


def _split_stacks(part: StackedExperts, place: str, outputs: dict[str, Output]) -> None:
    """A stack of gates and ups becomes two."""
    names = [name for name in part.tensors() if not name.endswith("_bias")]
    joined, down = (outputs.pop(name) for name in names)
    bias = outputs.pop(f"{part.gate_up}_bias", None), outputs.pop(f"{part.down}_bias", None)
    roles = ("gate", _half(part, 0)), ("up", _half(part, 1))
    for role, rows in roles:
        _put(outputs, replace(joined, rows=rows), f"{place}.{role}_proj.weight", part.inner, 1)
        if bias[0] is not None:
            _put(outputs, replace(bias[0], rows=rows), f"{place}.{role}_proj.bias", part.inner, 1)
    _put(outputs, down, f"{place}.down_proj.weight", down.shape[1], 1)
    if bias[1] is not None:
        _put(outputs, bias[1], f"{place}.down_proj.bias", bias[1].shape[1], 1)


def _place(part: Experts, family: str) -> str:
    """What mlx-lm calls the module of the stacks."""
    if family in _STACKS_IN_PLACE:
        return part.name
    owner = _parent(part.name) if part.name.endswith(".experts") else part.name
    return f"{owner}.switch_mlp"


def _with_role(name: str) -> str:
    module, _, number = base_of(name).rpartition(".")
    return f"{module}.{NUMBERED[number]}.weight" if number in NUMBERED else name


def _half(part: StackedExperts, which: int) -> tuple[int, int, int]:
    if part.IN_TURNS:
        return which, 2 * part.inner, 2
    return which * part.inner, (which + 1) * part.inner, 1


def _put(outputs: dict[str, Output], output: Output, name: str, size: int, axis: int) -> None:
    shape = (*output.shape[:axis], size, *output.shape[axis + 1 :])
    outputs[name] = replace(output, name=name, shape=shape)


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for theirs, ours in rules:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def shares(outputs: list[Output]) -> dict[str, int]:
    """How many outputs are made of each tensor of the family."""
    return dict(Counter(member for output in outputs for member in output.members))
