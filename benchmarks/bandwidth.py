"""How fast this machine moves memory, which a decode step that reads all weights cannot beat.

    python -m benchmarks.bandwidth      # JSON: GB/s

`copy` counts bytes read and written. On a CPU all cores copy with NumPy, and `read` is a dot
product of a large array with itself; on a GPU MLX adds 1 to a large array.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np

ROUNDS = 7
CPU_BYTES, GPU_BYTES = 1 << 28, 1 << 32


def median_seconds(call: Callable[[], object]) -> float:
    """Median time of a call that has been warmed up."""
    call()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure_cpu() -> dict[str, float]:
    """GB/s of all cores together."""
    cores = os.cpu_count() or 1
    source = np.ones(CPU_BYTES // 4, np.float32)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(source, cores), np.array_split(target, cores), strict=True))
    with ThreadPoolExecutor(cores) as pool:
        copying = median_seconds(lambda: list(pool.map(lambda p: np.copyto(p[1], p[0]), parts)))
        reading = median_seconds(lambda: list(pool.map(lambda p: np.dot(p[0], p[0]), parts)))
    return {"copy": 2 * CPU_BYTES / copying / 1e9, "read": CPU_BYTES / reading / 1e9}


def measure_gpu() -> dict[str, float]:
    """GB/s of the default GPU."""
    source = mx.ones((2, GPU_BYTES // 4), mx.bfloat16)  # an axis holds fewer than 2**31
    mx.eval(source)
    copying = median_seconds(lambda: mx.eval(source + 1))
    return {"copy": 2 * GPU_BYTES / copying / 1e9}


def main() -> None:
    """Print the numbers."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    print(json.dumps(measure_gpu() if on_gpu else measure_cpu()))


if __name__ == "__main__":
    main()
