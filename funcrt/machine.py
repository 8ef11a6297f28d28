"""Facts about the machine and the process: its device, memory taken, memory left."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import mlx.core as mx


def available_memory() -> int:
    """Bytes that a process may still take: of the GPU with CUDA, without swapping elsewhere.

    All of the memory where nothing tells.
    """
    if is_on_cuda() and "free_memory" in (device := mx.device_info()):
        return int(device["free_memory"]) + mx.get_cache_memory()
    free = _read_proc("/proc/meminfo", "MemAvailable:")
    return free or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_on_gpu() -> bool:
    """Whether MLX's default device is a GPU."""
    return mx.default_device().type == mx.DeviceType.gpu


def device_name() -> str:
    """What MLX calls the default device, such as "NVIDIA H200", or the name of the processor."""
    import platform  # slow to import, and seldom needed

    name = mx.device_info(mx.default_device()).get("device_name")
    return str(name or platform.processor() or platform.machine())


def is_on_cuda() -> bool:
    """Whether that is one that MLX runs through CUDA."""
    return is_on_gpu() and not mx.metal.is_available()


def peak_memory() -> int:
    """Most bytes used so far: by the process on CPU, by MLX's allocator on a GPU."""
    if is_on_gpu():
        return mx.get_peak_memory()
    # Not ru_maxrss, which begins at the size of the process that started this one.
    peak = _read_proc("/proc/self/status", "VmHWM:")
    if peak is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes elsewhere


def _read_proc(path: str, key: str) -> int | None:
    """Bytes that Linux reports as `KEY n kB`, or None."""
    try:
        with Path(path).open() as lines:
            for line in lines:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
