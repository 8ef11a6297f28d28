"""Facts about the machine and the process: memory taken, memory left."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import mlx.core as mx


def available_memory() -> int:
    """Bytes that a process may still take without swapping (total memory where unknown)."""
    try:
        with Path("/proc/meminfo").open() as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory() -> int:
    """Most bytes used so far: by the process on CPU, by MLX's allocator on a GPU."""
    if mx.default_device().type == mx.DeviceType.gpu:
        return mx.get_peak_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes elsewhere
