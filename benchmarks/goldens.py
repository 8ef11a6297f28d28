"""How far the default device is from transformers' float32 logits, on the committed tiny llamas.

python -m benchmarks.goldens
MLX_ENABLE_TF32=0 python -m benchmarks.goldens    # CUDA: float32 products in all their bits
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import funcrt
from tests.reference import golden

import mlx.core as mx


def main() -> None:
    """Print the largest difference over the largest logit, and how many cases choose otherwise."""
    worst, differing = 0.0, 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in golden.CASES:
            expected = golden.read_golden(name)
            folder = golden.make_folder(name, Path(scratch) / name)
            logits = funcrt.load_model(folder, "float32")(expected.tokens)[0][0]
            error = mx.max(mx.abs(logits[expected.positions] - expected.logits))
            worst = max(worst, float((error / mx.max(mx.abs(expected.logits))).item()))
            differing += not mx.array_equal(mx.argmax(logits, axis=-1), expected.argmax).item()
    print(f"{mx.default_device()}, MLX_ENABLE_TF32={os.environ.get('MLX_ENABLE_TF32', 'unset')}")
    print(f"largest difference / largest logit: {worst:.1e}")
    print(f"cases with another likeliest token somewhere: {differing} of {len(golden.CASES)}")


if __name__ == "__main__":
    main()
