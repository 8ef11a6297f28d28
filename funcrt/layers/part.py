"""`Part`, what every layer is, and `Run`, what the parts of one call share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from funcrt import low_rank
from funcrt.attention import Attend
from funcrt.cache import (
    CacheLayout,
    CacheSpec,
    CacheState,
    Placement,
    Sight,
    check_recurrent,
    kind_of,
    place,
    zero_padding,
)
from funcrt.config.rope import RopeConfig
from funcrt.low_rank import ROWS
from funcrt.ops.heads import Waves, make_waves
from funcrt.ops.rotary import Rotary, make_rotary
from funcrt.params import Fusions, Params, ParamSpec

import mlx.core as mx


class Run:
    """One call, as the parts of a network see it. Tokens are packed (see `Placement`).

    Args:
        params: stored or prepared.
        mask: bool `[B, 1, T, S]` in the caller's token order, or what is placed already.
        state: before the call.
        positions: int32 `[B, T]` in the caller's order, or None.
        dtype: of activations.

    Attributes:
        call: where the tokens go.
        attend: attention over the cache; it holds the new state.
        by_row: rows choose among changes of matrices.
        flat: activations are `[B, E]`, of one token for each row, see `Network.hidden`.
        fuses: parts may do several things at once, in kernels that do not differentiate. They are
            flat then.
    """

    def __init__(
        self,
        params: Params,
        mask: Sight,
        state: CacheState,
        positions: mx.array | None,
        dtype: mx.Dtype,
    ) -> None:
        self.by_row = ROWS in state
        self.params = low_rank.choose(params, state[ROWS]) if self.by_row else params
        self.dtype = dtype
        self.flat = self.fuses = False
        self.call: Placement = place(mask, state["lengths"], positions)
        if any(kind_of(name) == "recurrent" for name in state):
            check_recurrent(self.call)
        self.attend = Attend(self.call, state)
        self._rotaries: dict[tuple[RopeConfig, int], Rotary] = {}
        self._waves: dict[tuple[RopeConfig, int], Waves | None] = {}

    def rotary(self, rope: RopeConfig, width: int) -> Rotary:
        """Rotary embedding of heads of this width; layers alike share one."""
        key = (rope, width)
        if key not in self._rotaries:
            call = self.call
            tokens = call.real.shape[1]
            self._rotaries[key] = make_rotary(
                rope, width, call.offset, call.lengths, tokens, call.positions
            )
        return self._rotaries[key]

    def waves(self, rope: RopeConfig, width: int) -> Waves | None:
        """The same for `ops.heads`, if it is for this embedding."""
        key = (rope, width)
        if key not in self._waves:
            self._waves[key] = make_waves(self.rotary(rope, width))
        return self._waves[key]

    @property
    def positions(self) -> mx.array:
        """Int32 `[B, T]`: the position of every packed token, 0 for padding."""
        call = self.call
        if call.positions is not None:
            return call.positions
        step = mx.arange(call.real.shape[1], dtype=mx.int32)
        return mx.where(call.real, call.offset[:, None] + step, 0)

    def zero_padding(self, x: mx.array) -> mx.array:
        """Packed `x [B, T, ...]` with zeros at padding."""
        return zero_padding(x, self.call)


@dataclass(frozen=True)
class Part:
    """A layer or a piece of one: its tensors, its cache arrays, and what it computes.

    What a part is made of are its fields that are parts, or tuples of parts; they come in the order
    of the fields. Parts are called with a `Run` and packed activations.

    Class attributes:
        FLAT: whether this very class takes activations without an axis of tokens, too, if the parts
            that it is made of do. Subclasses say so for themselves.
    """

    FLAT: ClassVar[bool] = False

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        """What the part computes, `[B, T, ...]` -> `[B, T, ...]`; without T where `run.flat`."""
        raise NotImplementedError

    def branch(self, run: Run, norm: Part, x: mx.array) -> mx.array:
        """`x + self(norm(x))` where `run.flat`, which some parts do with fewer nodes."""
        return x + self(run, apply(run, norm, x))

    @cached_property
    def takes_flat(self) -> bool:
        """Whether it can be called where `run.flat`; `apply` calls all parts."""
        return all(part.is_flat for part in self.walk())

    @property
    def is_flat(self) -> bool:
        """`FLAT` of this very class, whatever it is made of."""
        return bool(vars(type(self)).get("FLAT"))

    def tensors(self) -> ParamSpec:
        """Name -> dense shape of the tensors that are this part's own."""
        return {}

    def fused(self) -> Fusions:
        """Matrices of this part that `prepare` stacks into one."""
        return {}

    def adaptable(self) -> tuple[str, ...]:
        """Matrices of this part that can have a change beside them, see `funcrt.low_rank`."""
        return ()

    def entries(self, dtype: str, layout: CacheLayout) -> CacheSpec:
        """This part's own arrays of a cache state."""
        return ()

    def windows(self) -> bool:
        """Whether this part looks back through a window only."""
        return False

    def walk(self) -> Iterator[Part]:
        """This part, then all that it is made of."""
        yield self
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Part):
                    yield from part.walk()


def apply(run: Run, part: Part, x: mx.array) -> mx.array:
    """`part(x)`; parts that need an axis of tokens get one where activations have none."""
    if not run.flat or part.takes_flat:
        return part(run, x)
    fuses, run.flat, run.fuses = run.fuses, False, False
    out = part(run, x[:, None])
    run.flat, run.fuses = True, fuses
    return out.squeeze(1)


PartT = TypeVar("PartT", bound=Part)


def rename(part: PartT, old: str, new: str) -> PartT:
    """The same part, with `new` for `old` in front of the names of tensors."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, str) and value.startswith(old):
            changed[field.name] = new + value.removeprefix(old)
        elif isinstance(value, Part):
            changed[field.name] = rename(value, old, new)
        elif isinstance(value, tuple) and any(isinstance(item, Part) for item in value):
            changed[field.name] = tuple(rename(item, old, new) for item in value)
    return dataclasses.replace(part, **changed)
