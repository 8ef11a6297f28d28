"""A process that ends with its first token, as `benchmarks.cold` starts it.

It imports nothing but what it measures: everything here is part of the time.

    python -m benchmarks.first_token SUBJECT FOLDER IDS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping

Times = dict[str, float]


def first_of_bundle(folder: str, prompt: list[int]) -> Times:
    """Import, load a bundle, and take the first token."""
    begin = time.perf_counter()
    import funcrt

    imported = time.perf_counter()
    engine = funcrt.Engine(funcrt.load_bundle(folder))
    loaded = time.perf_counter()
    next(engine.stream([prompt], max_tokens=1))
    return _times(begin, imported, loaded)


def first_of_mlx_lm(folder: str, prompt: list[int], same_blas: bool = False) -> Times:
    """The same with mlx-lm, without a tokenizer on either side."""
    begin = time.perf_counter()
    from pathlib import Path

    if same_blas:
        from funcrt import blas

        blas.load()
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    imported = time.perf_counter()
    model, _ = load_model(Path(folder))
    loaded = time.perf_counter()
    next(iter(generate_step(mx.array(prompt), model, max_tokens=1)))
    return _times(begin, imported, loaded)


def _times(begin: float, imported: float, loaded: float) -> Times:
    return {
        "import_s": imported - begin,
        "load_s": loaded - imported,
        "compute_s": time.perf_counter() - loaded,
    }


SUBJECTS: Mapping[str, Callable[[str, list[int]], Times]] = {
    "bundle": first_of_bundle,
    "mlx-lm": first_of_mlx_lm,
    "mlx-lm-same-blas": lambda folder, prompt: first_of_mlx_lm(folder, prompt, same_blas=True),
}


if __name__ == "__main__":
    _, subject, place, ids = sys.argv
    print(
        json.dumps(SUBJECTS[subject](place, [int(token) for token in ids.split(",")])), flush=True
    )
