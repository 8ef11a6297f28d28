"""What each module of mlx-lm is checked for. One process per module:

python -m tests.reference.mlx_lm_checks NAME
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import converters
from funcrt import cache, masks
from funcrt.model import Model
from tests.reference.mlx_lm_configs import make_args
from tests.reference.mlx_lm_exports import Sizes, run_exported
from tests.reference.muse_spark_kernels import KERNELS, of_zeros

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

TOLERANCE = 2e-5  # float32, as a share of the largest logit
PROMPT, STEPS, CAPACITY = SIZES = Sizes(23, 3, 40)
COLUMNS = ("eager", "compiled", "exported", "ragged_left", "ragged_right", "dtype")

_ROUNDS = (
    "the module rounds to bfloat16 before its last projection, so that logits in float32 differ by "
    "more than 2e-5 between batches; without that they do not (test_functional_pure.py)"
)
REASONS = {("muse_spark", "ragged_left"): _ROUNDS}


def make_module(
    name: str, dtype: mx.Dtype = mx.float32, seed: int = 0, **changes: Any
) -> nn.Module:
    """A tiny random module, large enough in its scores for attention to be peaked."""
    source = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    module = source.Model(make_args(name, source, **changes))
    module.eval()
    rng = np.random.default_rng(seed)
    keep = getattr(module, "cast_predicate", lambda _: True)
    params = []
    for path, array in tree_flatten(module.parameters()):
        if array.dtype in (mx.uint8, mx.uint32):  # packed weights
            packed = rng.integers(0, 256, (*array.shape, array.dtype.size)).astype(np.uint8)
            if array.dtype == mx.uint8:  # four of 0, 1, 2 (bitnet)
                packed = (rng.integers(0, 3, (*packed.shape, 4)) << [0, 2, 4, 6]).sum(-1)
                packed = packed.astype(np.uint8)
            params.append((path, mx.array(packed).view(array.dtype)[..., 0]))
            continue
        if not mx.issubdtype(array.dtype, mx.floating):
            continue
        old = np.array(array.astype(mx.float32))
        if "weight_scale" in path:  # of ternary weights
            new = np.full(old.shape, 0.1)
        elif array.ndim < 2 or "conv" in path:
            new = old + rng.normal(0, 0.2, old.shape)
        else:
            spread = 1.0 if "embed" in path or "wte" in path else 1.0 / np.sqrt(old.shape[-1])
            new = rng.normal(0, spread, old.shape)
        kind = dtype if keep(path) else mx.float32
        params.append((path, mx.array(new.astype(np.float32)).astype(kind)))
    module.update(tree_unflatten(params))
    mx.eval(module.parameters())
    return module


def tokens_of(row: int, count: int) -> list[int]:
    """Ids of a prompt and the steps after it."""
    return np.random.default_rng([row, 7]).integers(1, 100, count).tolist()


def make_prompt_cache(module: nn.Module) -> list[Any]:
    """mlx-lm's own caches."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(module))


def run_module(module: nn.Module, ids: list[int], prompt: int) -> mx.array:
    """mlx-lm's own logits `[T, V]`: a prompt, then token by token."""
    caches = make_prompt_cache(module)
    pieces = [ids[:prompt], *([token] for token in ids[prompt:])]
    with without_metal():
        out = [module(mx.array([piece]), cache=caches)[0] for piece in pieces]
        return mx.concatenate(out)


@contextmanager
def without_metal(values: bool = True) -> Iterator[None]:
    """BitNet's product and Muse Spark's kernels in numpy: they have only Metal ones for them."""
    from mlx_lm.models.bitlinear_layers import BitLinear

    def multiply(self: Any, x: mx.array, packed: mx.array) -> mx.array:
        quarters = [((np.array(packed) >> shift) & 3).astype(float) - 1 for shift in (0, 2, 4, 6)]
        scale = np.array(self.weight_scale.astype(mx.float32)).astype(float)
        product = np.array(x.astype(mx.float32)).astype(float) @ np.concatenate(quarters).T
        product = product / scale if self.invert_weight_scales else product * scale
        return mx.array(product.astype(np.float32)).astype(x.dtype)

    original = BitLinear.execute_matmul_kernel
    muse: Any = sys.modules.get("mlx_lm.models.muse_spark")
    kernels = {k.__name__: k if values else of_zeros(k) for k in KERNELS if muse is not None}
    originals = {name: getattr(muse, name) for name in kernels}
    BitLinear.execute_matmul_kernel = multiply
    if muse is not None:
        vars(muse).update(kernels)
    try:
        yield
    finally:
        BitLinear.execute_matmul_kernel = original
        if muse is not None:
            vars(muse).update(originals)


def cache_dtypes(name: str, kept: Any) -> dict[str, mx.Dtype]:
    """The dtypes of mlx-lm's own caches, under the names that a cache state has."""
    if isinstance(kept, mx.array):
        return {name: mx.int32 if kept.dtype == mx.int64 else kept.dtype}  # token ids
    if isinstance(kept, (list, tuple)):
        parts = [(f"{name}.{i}", part) for i, part in enumerate(kept)]
    elif hasattr(kept, "caches"):
        return cache_dtypes(name, kept.caches)
    elif hasattr(kept, "cache"):
        parts = [(f"{name}.entry{i}", part) for i, part in enumerate(kept.cache)]
    else:
        parts = [(f"{name}.{key}", getattr(kept, key, None)) for key in ("keys", "values")]
    found: dict[str, mx.Dtype] = {}
    for path, part in parts:
        found |= cache_dtypes(path, part) if part is not None else {}
    return found


Forward = Callable[..., Any]


def run_model(
    model: Model, forward: Forward, rows: list[list[int]], prompts: list[int], left: bool
) -> list[mx.array]:
    """Logits `[T, V]` of rows that are one batch: padded prompts, then steps."""
    width = max(prompts)
    state = model.init_cache(len(rows), CAPACITY)
    valid, ids = [], []
    for row, prompt in zip(rows, prompts, strict=True):
        pad = width - prompt
        real, empty = row[:prompt], [77] * pad
        ids.append(empty + real if left else real + empty)
        valid.append([0] * pad + [1] * prompt if left else [1] * prompt + [0] * pad)
    calls = [(ids, valid)]
    calls += [
        ([[row[prompt + step]] for row, prompt in zip(rows, prompts, strict=True)],
         [[1]] * len(rows))
        for step in range(STEPS)
    ]  # fmt: skip
    found: list[list[mx.array]] = [[] for _ in rows]
    for tokens, real in calls:
        mask = masks.causal(mx.array(real), state["lengths"], cache.state_size(state)[1])
        logits, state = forward(model.params, mx.array(tokens, dtype=mx.int32), mask, state)
        mx.eval(logits, state)
        for i, row in enumerate(real):
            found[i] += [logits[i, t] for t, one in enumerate(row) if one]
    assert state["lengths"].tolist() == [prompt + STEPS for prompt in prompts]
    return [mx.stack(row) for row in found]


def distance(ours: mx.array, theirs: mx.array) -> float:
    """Largest difference over the largest magnitude."""
    a, b = (np.array(x.astype(mx.float32), dtype=np.float64) for x in (ours, theirs))
    both = np.isneginf(b) & (a == b) if a.shape == b.shape else False  # ids that never come
    a, b = np.where(both, 0, a), np.where(both, 0, b)
    if a.shape != b.shape or not np.isfinite(b).all():
        return float("nan")
    return float(np.abs(a - b).max() / np.abs(b).max())


def check(name: str) -> dict[str, Any]:
    """The row of one module; `reason` names the first column that is not true."""
    row: dict[str, Any] = {"module": name, **dict.fromkeys(COLUMNS, False), "reason": ""}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            module = make_module(name)
    except BaseException as error:  # noqa: BLE001 (SystemExit too)
        why = " ".join(said.getvalue().split()) or _short(error)
        row["reason"] = f"mlx-lm itself cannot make it here: {why}"
        row["trace"] = traceback.format_exc()
        return row
    prompts = [PROMPT, 9, 1]
    rows = [tokens_of(i, n + STEPS) for i, n in enumerate(prompts)]
    shared: dict[str, Any] = {}

    def passes(found: float, what: str) -> None:
        row[f"{what}_error"] = found
        if not found <= TOLERANCE:
            raise ArithmeticError(f"differs by {found:.1e}")

    def eager() -> None:
        # What mlx-lm computes; it may change the module itself.
        theirs, whole, steps = (
            run_module(module, rows[0], count) for count in (PROMPT, len(rows[0]), 1)
        )
        before = dict(tree_flatten(module.parameters()))
        model = shared["model"] = converters.functionalize(module)
        ours = run_model(model, model.forward, rows[:1], prompts[:1], False)[0]
        shared["eager"] = ours
        for other, note in (
            (whole, "mlx-lm's own steps differ from its own prompts; equal to these"),
            (steps, "mlx-lm's own prompts differ from its own steps; equal to these"),
        ):
            if distance(theirs, other) > 0.001 and distance(ours, other) <= TOLERANCE:
                theirs, row["reason"] = other, note
        passes(distance(ours, theirs), "eager")
        after = dict(tree_flatten(module.parameters()))
        assert before.keys() == after.keys()
        assert all(after[key] is before[key] for key in before), "the module was changed"

    def compiled() -> None:
        model = shared["model"]
        ours = run_model(model, mx.compile(model.forward), rows[:1], prompts[:1], False)[0]
        passes(distance(ours, shared["eager"]), "compiled")

    def exported() -> None:
        with tempfile.TemporaryDirectory() as folder:
            ours = run_exported(shared["model"], rows[0], SIZES, Path(folder))
        passes(distance(ours, shared["eager"]), "exported")

    def ragged(left: bool) -> Callable[[], None]:
        def run() -> None:
            model = shared["model"]
            solo = shared.get("solo")
            if solo is None:
                solo = shared["solo"] = [
                    run_model(model, model.forward, [r], [p], False)[0]
                    for r, p in zip(rows, prompts, strict=True)
                ]
            together = run_model(model, model.forward, rows, prompts, left)
            worst = max(distance(a, b) for a, b in zip(together, solo, strict=True))
            passes(worst, "left" if left else "right")

        return run

    def dtype() -> None:
        half = make_module(name, mx.bfloat16)
        model = converters.functionalize(half)
        state = model.init_cache(1, CAPACITY)
        mask = mx.zeros((1, 1, 5, cache.state_size(state)[1]), mx.bool_)
        ids = mx.array([rows[0][:5]], dtype=mx.int32)
        logits, after = model.forward(model.params, ids, mask, state)
        caches = make_prompt_cache(half)
        with without_metal(values=False):
            theirs = half(ids, cache=caches).dtype  # lazy: a CPU has no 16-bit gathered product
        if logits.dtype != theirs:
            raise ArithmeticError(f"{logits.dtype} instead of {theirs}")
        kept = cache_dtypes("layers", caches)
        for key, array in state.items():
            if {array.dtype, after[key].dtype, kept.get(key, array.dtype)} != {array.dtype}:
                raise ArithmeticError(f"{key}: {after[key].dtype} instead of {kept.get(key)}")
        assert kept.keys() & state.keys()

    parts = (eager, compiled, exported, ragged(True), ragged(False), dtype)
    for column, part in zip(COLUMNS, parts, strict=True):
        try:
            part()
            row[column] = True
        except BaseException as error:  # noqa: BLE001 (SystemExit too)
            why = REASONS.get((name, column), _short(error))
            row["reason"] = row["reason"] or f"{column}: {why}"
            row.setdefault("trace", traceback.format_exc())
            if "model" not in shared:
                break
    return row


def _short(error: BaseException) -> str:
    """One line, without where the package is installed."""
    text = re.sub(r"/\S*/mlx_lm/", "mlx_lm/", " ".join(str(error).split()))
    if text == "[metal_kernel] No Metal back-end.":
        return "mlx-lm itself cannot run it here: its kernels exist for Metal only"
    return f"{type(error).__name__}: {text}"[:300]


def main() -> None:
    print("ROW " + json.dumps(check(sys.argv[1])))


if __name__ == "__main__":
    main()
