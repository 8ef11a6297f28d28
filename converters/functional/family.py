"""A module as a model family: the functions that `funcrt.models` has for each of its own."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from converters.functional.binding import Binding
from converters.functional.caches import Call
from converters.functional.head import Watch
from converters.functional.layout import Layout, MakeCaches, record
from converters.functional.pure import pure
from funcrt.cache import (
    CacheLayout,
    CacheSpec,
    CacheState,
    Placement,
    Sight,
    check_call,
    check_recurrent,
    pack,
    place,
    unpack,
)
from funcrt.config import ModelConfig
from funcrt.errors import CacheError, FuncrtError, InputError, ModuleError
from funcrt.low_rank import Places
from funcrt.params import Fusions, Params, ParamSpec

import mlx.core as mx

_NOT_WHILE_TRACED = "during function transformations"


class ModuleFamily:
    """`param_spec`, `cache_spec`, `fusions`, `hidden` and `unembed` of one module.

    Args:
        binding: of the module.
        make_caches: its stand-ins.
        params: whose dtypes decide those of the caches.
        by_token: run a call token by token, for modules whose recurrent layers do not leave
            padding out.
    """

    def __init__(
        self, binding: Binding, make_caches: MakeCaches, params: Params, by_token: bool
    ) -> None:
        self.binding = binding
        self.make_caches = make_caches
        self.by_token = by_token
        self.layout: Layout = self._record(params)

    def _record(self, params: Params) -> Layout:
        found: list[Layout] = []

        def run(params: Params) -> mx.array:
            with self.binding.bound(params) as module, _named_lines(module):
                found.append(record(module, self.make_caches))
            return mx.array(0)

        mx.compile(run)(params)  # traced only: nothing is computed, and no value can be read
        return found[0]

    def param_spec(self, config: ModelConfig) -> ParamSpec:
        """Name -> shape, as the module has them."""
        return {name: array.shape for name, array in self.binding.params().items()}

    def cache_spec(self, config: ModelConfig, layout: CacheLayout) -> CacheSpec:
        """What the module's caches keep. Raises CacheError for packed ones."""
        if layout.kv_bits is not None:
            raise CacheError(f"kv_bits={layout.kv_bits}: a module of mlx-lm cannot pack its cache")
        return self.layout.entries

    def fusions(self, config: ModelConfig) -> Fusions:
        """None: the module's code multiplies what it has."""
        return {}

    def adaptable(self, config: ModelConfig) -> Places:
        """None: the module's code multiplies what it has."""
        return Places()

    def hidden(
        self,
        config: ModelConfig,
        params: Params,
        tokens: mx.array,
        mask: Sight,
        cache_state: CacheState,
        positions: mx.array | None = None,
    ) -> tuple[mx.array, CacheState]:
        """What the last projection takes; the logits, where a module does more after it.

        Raises InputError for positions.
        """
        check_call(tokens, mask, cache_state, positions)
        if positions is not None:
            raise InputError(
                "positions: a module of mlx-lm counts them from its cache and cannot take others; "
                "leave them out, or use a family of funcrt.models"
            )
        call = place(mask, cache_state["lengths"])
        if self.layout.recurrent:
            check_recurrent(call)
        ids = mx.where(call.real, pack(tokens, call), 0)  # whatever stands at padding
        if self.by_token and tokens.shape[1] > 1:
            x, state = self._run_by_token(params, ids, call, cache_state)
        else:
            x, state = self._run(params, ids, call, cache_state)
        return unpack(x, call), state

    def unembed(self, config: ModelConfig, params: Params, x: mx.array) -> mx.array:
        """The last projection; nothing where the logits are there already."""
        if self.layout.head is None:
            return x
        with self.binding.bound(params):
            return self.layout.head(x)

    def _run(
        self, params: Params, ids: mx.array, placement: Placement, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        call, head, watch = Call(placement, state), self.layout.head, Watch()
        with self.binding.bound(params) as module, pure(call), _named_lines(module):  # noqa: SIM117
            with watch.watching():
                x = module(ids, cache=self.make_caches(call))
        if head is not None:
            if not head.is_same(watch.head_of(x)) or watch.x is None:
                raise ModuleError(
                    f"{type(module).__module__}: its logits come from another layer in one call "
                    "than in another; the last projection has to be the same"
                )
            x = watch.x  # the logits are not computed
        return x, call.state()

    def _run_by_token(
        self, params: Params, ids: mx.array, call: Placement, state: CacheState
    ) -> tuple[mx.array, CacheState]:
        outputs = []
        for t in range(ids.shape[1]):
            here = slice(t, t + 1)
            offset = state["lengths"]
            one = call._replace(
                order=None,
                back=None,
                real=call.real[:, here],
                slots=call.slots[:, here],
                visible=call.visible[:, :, here],
                offset=offset,
                lengths=offset + call.real[:, t].astype(mx.int32),
            )
            x, state = self._run(params, ids[:, here], one, state)
            outputs.append(x)
        return mx.concatenate(outputs, axis=1), state


@contextmanager
def _named_lines(module: Any) -> Iterator[None]:
    """Name the line of a module that cannot be traced."""
    try:
        yield
    except (FuncrtError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if _NOT_WHILE_TRACED in text or "length-1 arrays" in text:
            what = (
                "reads the value of an array while it is traced; what it decides there has to "
                "become arrays (mx.where), or a setting"
            )
        elif "metal_kernel" in text:
            what = "runs a Metal kernel of its own, and has no other form for this device"
        else:
            text = f"{type(error).__name__}: {text}"
            what = f"cannot be called with arrays as offsets and masks ({text})"
        raise ModuleError(f"{type(module).__module__} {what}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """The innermost line of Python that is not ours."""
    ours = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if not f.filename.startswith(ours)), frames[-1])
    return f"{frame.filename}:{frame.lineno} `{frame.line}`"
