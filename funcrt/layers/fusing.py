"""What comes before and after a product, done with it where one node can."""

from __future__ import annotations

from typing import Any

from funcrt.layers.basic import Linear, RMSNorm, Stacked
from funcrt.layers.part import Part, Run, apply
from funcrt.low_rank import LORA_A
from funcrt.machine import is_on_gpu
from funcrt.ops import few_rows
from funcrt.ops.heads import Waves

import mlx.core as mx

_BESIDE = (".scales", LORA_A)  # of matrices that are packed, or changed


def normed(run: Run, norm: Part, part: Part, x: mx.array) -> mx.array:
    """`part(norm(x))`, `[..., E]` -> `[..., O]`."""
    out = _multiply(run, part, x, norm)
    return part(run, apply(run, norm, x)) if out is None else out


def normed_silu(run: Run, norm: Part, part: Part, x: mx.array) -> mx.array | None:
    """The first half of `normed` through SiLU, times the other; None if no kernel does it."""
    return _multiply(run, part, x, norm, gated=True)


def added(run: Run, part: Part, x: mx.array, to: mx.array) -> mx.array:
    """`to + part(x)`."""
    out = _multiply(run, part, x, residual=to)
    if out is not None:
        return out
    weight = _plain_weight(run, part)
    if weight is None or f"{_name_of(part)}.bias" in run.params or not _adds_at_once(x):
        return to + part(run, x)
    return mx.addmm(to, x, weight.astype(x.dtype).T)


def normed_heads(
    run: Run, norm: Part, part: Part, x: mx.array, heads: int, kv_heads: int, waves: Waves
) -> tuple[mx.array, mx.array, mx.array] | None:
    """`normed`, split and turned as `ops.heads.split` does; None if no kernel does it all."""
    operands = _find_operands(run, part, x, norm)
    if operands is None:
        return None
    weight, more = operands
    if not few_rows.supports_heads(weight.shape[0] // (heads + 2 * kv_heads), waves):
        return None
    return few_rows.multiply_heads(x, weight, heads, kv_heads, waves, **more)


def _adds_at_once(x: mx.array) -> bool:
    """Whether a product by the BLAS that ends in a sum saves a node. It rounds as the two do."""
    return not is_on_gpu() and x.dtype == mx.float32


def _plain_weight(run: Run, part: Part) -> mx.array | None:
    """The matrix `[O, I]` of a part that multiplies with one, neither packed nor changed."""
    name = _name_of(part)
    if name is None or any(name + beside in run.params for beside in _BESIDE):
        return None
    return run.params.get(f"{name}.weight")  # what could not be stacked is not there


def _name_of(part: Part) -> str | None:
    """Of a matrix that is multiplied with and nothing else: subclasses do more."""
    if isinstance(part, (Linear, Stacked)) and type(part) in (Linear, Stacked):
        return part.name
    return None


def _multiply(
    run: Run,
    part: Part,
    x: mx.array,
    norm: Part | None = None,
    *,
    gated: bool = False,
    residual: mx.array | None = None,
) -> mx.array | None:
    """In one kernel; None if there is none for such parts, weights or rows."""
    operands = _find_operands(run, part, x, norm)
    if operands is None:
        return None
    weight, more = operands
    if gated and more["bias"] is not None:
        return None
    return few_rows.multiply(x, weight, gated=gated, residual=residual, **more)


def _find_operands(
    run: Run, part: Part, x: mx.array, norm: Part | None
) -> tuple[mx.array, dict[str, Any]] | None:
    """The matrix of a part, then its bias and those of the norm, if the kernel is for them."""
    weight = _plain_weight(run, part)
    if not run.fuses or weight is None or not few_rows.supports(x, weight):
        return None
    bias = run.params.get(f"{_name_of(part)}.bias")
    more: dict[str, Any] = {"bias": None if bias is None else bias.astype(x.dtype)}
    if norm is not None:
        if type(norm) is not RMSNorm or norm.offset:
            return None
        more |= {"norm": run.params[f"{norm.name}.weight"].astype(x.dtype), "eps": norm.eps}
    return weight, more
