"""16-bit floats: kept from end to end, and no further from float32 than a plain run."""

from __future__ import annotations

import converters
from funcrt.cache import kind_of
from funcrt.model import Model
from tests.families.batches import run_together, texts
from tests.families.cases import Case, causal, run_plain
from tests.families.results import TOLERANCE, Result, worst
from tests.helpers import ROUNDING, relative_error

import mlx.core as mx
import numpy as np


def float16(case: Case) -> Result:
    """See the module."""
    return _half(case, "float16")


def bfloat16(case: Case) -> Result:
    """See the module."""
    return _half(case, "bfloat16")


def _half(case: Case, dtype: str) -> Result:
    model = converters.load(case.folder, dtype=dtype)
    _check_dtypes(model, getattr(mx, dtype))
    rows, exact = texts(case), model.in_float32()
    reference = np.concatenate([run_plain(exact, row) for row in rows])
    plain = np.concatenate([run_plain(model, row).astype(mx.float32) for row in rows])
    allowed = max(ROUNDING * relative_error(plain, reference), TOLERANCE)
    results = []
    for layout in case.layouts():
        for name, params in (("stored", model.params), ("prepared", model.prepared)):
            logits = run_together(case, model, layout, left=True, params=params).logits
            error = relative_error(np.concatenate(logits), reference)
            results.append(Result(error, allowed, name))
    return worst(results)


def _check_dtypes(model: Model, dtype: mx.Dtype) -> None:
    """Raise TypeError where anything but a recurrent state is wider, or changes its dtype."""
    state = model.init_cache(1, 4)
    ids = mx.array([[1, 2]], dtype=mx.int32)
    mask = causal(mx.ones_like(ids), state)
    for params in (model.params, model.prepared):
        logits, after = model.forward(params, ids, mask, state)
        if logits.dtype != dtype:
            raise TypeError(f"logits are {logits.dtype}")
        for name, array in after.items():
            kept = kind_of(name) in ("row", "positions", "recurrent") or array.dtype == dtype
            if not kept or array.dtype != state[name].dtype:
                raise TypeError(f"{name} is {array.dtype}, was {state[name].dtype}")
