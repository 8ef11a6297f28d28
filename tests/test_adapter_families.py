"""In every family each matrix that may have a change beside it does multiply by it."""

from __future__ import annotations

import converters
from funcrt import adapters
from funcrt.adapters import Adapter, Change
from funcrt.model import Model
from funcrt.models import FAMILIES
from funcrt.packing import packed_shape
from funcrt.storage import load_json
from tests.helpers import TOLERANCE, relative_error
from tests.reference import golden

import mlx.core as mx
import numpy as np
import pytest

TOKENS = [5, 17, 33, 2, 80, 41, 9, 64, 11, 3]
CASES = [
    case
    for case in golden.family_cases()
    if load_json(golden.family_folder(case) / "config.json")["model_type"] in FAMILIES
]


def make_adapter(model: Model, seed: int, rank: int, *, by_row: bool) -> Adapter:
    """A small change of every matrix that can have one: routers still choose as they did."""
    rng = np.random.default_rng(seed)
    places = model.family.adaptable(model.config)
    changes = {}
    for name, shape in model.spec.items():
        base = name.removesuffix(".weight")
        if base in (places.by_row if by_row else places.shared):
            outputs, inputs = packed_shape(shape)
            a = rng.normal(0, inputs**-0.5, (rank, inputs)).astype(np.float32)
            b = rng.normal(0, 0.02, (outputs, rank)).astype(np.float32)
            changes[base] = Change(mx.array(a), mx.array(b))
    return Adapter(f"made {seed}", changes)


@pytest.mark.parametrize("case", CASES)
def test_kept_and_stacked_are_fused(case):
    base = converters.load(golden.family_folder(case), "float32")
    whole = make_adapter(base, 1, 3, by_row=False)
    matrices = {n.removesuffix(".weight") for n, shape in base.spec.items() if len(shape) == 2}
    left = matrices - whole.changes.keys()
    vectors = ("_norm", "e_score_correction_bias")  # stored with two axes by some
    assert all(".experts." in name or name.endswith(vectors) for name in left), left
    expected = adapters.fuse(base, whole)([TOKENS])[0]
    assert relative_error(expected, base([TOKENS])[0]) > 1e-3
    assert relative_error(adapters.keep(base, whole)([TOKENS])[0], expected) < TOLERANCE

    two = [make_adapter(base, seed, seed, by_row=True) for seed in (2, 4)]
    model = adapters.stack(base, two)
    state = model.init_cache(3, 32)
    state["adapter"] = mx.array([2, 0, 1], dtype=mx.int32)
    first, state = model([TOKENS[:6]] * 3, cache=state)
    rest, _ = model([TOKENS[6:]] * 3, cache=state)
    rows = mx.concatenate([first, rest], axis=1)
    for row, fused in enumerate([adapters.fuse(base, two[1]), base, adapters.fuse(base, two[0])]):
        assert relative_error(rows[row], fused([TOKENS])[0][0]) < TOLERANCE
