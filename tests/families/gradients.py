"""Gradients through `f`: finite, and the slopes that central differences measure."""

from __future__ import annotations

from collections.abc import Callable

from funcrt.params import Params
from tests.families.cases import Case, run_plain
from tests.families.results import Result, worst
from tests.helpers import to_numpy

import mlx.core as mx
import numpy as np

COUNT = 12  # tokens of the text
STEPS = (0.08, 0.02, 0.005, 0.00125)  # by how much the loss should change; noise is some 1e-6
ALLOWED = 0.01  # relative
FLAT = 1e-5  # a slope below it counts as none


def gradients(case: Case) -> Result:
    """Along the gradient of each tensor, the loss rises by its norm.

    Richardson's extrapolation of two central differences; where a step crosses a kink (another
    expert is chosen, a clamp bites), a smaller one is right.
    """
    text = case.tokens(COUNT + 1, 5)
    params = case.model.params

    def loss(params: Params) -> mx.array:
        logits = run_plain(case.model, text[:-1], params)
        chosen = mx.take_along_axis(logits, mx.array(text[1:])[:, None], axis=-1)[:, 0]
        return mx.mean(mx.logsumexp(logits, axis=-1) - chosen)

    def value(name: str, array: mx.array) -> float:
        """The loss with one tensor replaced; the last sums in float64."""
        logits = to_numpy(run_plain(case.model, text[:-1], {**params, name: array}))
        top = logits.max(-1)
        total = np.log(np.exp(logits - top[:, None]).sum(-1)) + top
        return float((total - logits[np.arange(COUNT), text[1:]]).mean())

    found = mx.grad(loss)(params)
    assert list(found) == list(params), "gradients of some tensors are missing"
    results, rng = [], np.random.default_rng(0)
    for name, gradient in found.items():
        if not np.isfinite(to_numpy(gradient)).all():
            return Result(float("nan"), ALLOWED, name)
        norm = float(np.linalg.norm(to_numpy(gradient)))
        flat = norm < FLAT
        direction = rng.normal(size=gradient.shape) if flat else to_numpy(gradient)
        unit = mx.array((direction / np.linalg.norm(direction)).astype(np.float32))
        sizes = [1e-3] if flat else [change / norm for change in STEPS]
        slopes = [_slope(value, name, params[name], unit, size) for size in sizes]
        scale = 1.0 if flat else norm
        error = min(abs(slope - norm) for slope in slopes) / scale
        results.append(Result(error, ALLOWED, name))
    return worst(results)


def _slope(
    value: Callable[[str, mx.array], float], name: str, array: mx.array, unit: mx.array, size: float
) -> float:
    def central(step: float) -> float:
        ahead, behind = value(name, array + step * unit), value(name, array - step * unit)
        return (ahead - behind) / (2 * step)

    return (4 * central(size / 2) - central(size)) / 3
