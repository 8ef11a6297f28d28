"""CUDA kernels from their source, which MLX compiles when they first run and keeps on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx


@lru_cache
def cuda_kernel(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    source: str,
    *,
    header: str = "",
    shared_memory: int = 0,
    ensure_row_contiguous: bool = True,
) -> Callable[..., Any]:
    """`mx.fast.cuda_kernel`, called `funcrt_NAME`, without comments and indentation.

    Every node of an exported graph has its source, which is hashed each time that the node runs.
    """
    kernel: Callable[..., Any] = mx.fast.cuda_kernel(  # type: ignore[assignment]
        name=f"funcrt_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=_shorten(source),
        header=_shorten(header),
        ensure_row_contiguous=ensure_row_contiguous,
        shared_memory=shared_memory,
    )
    return kernel


def _shorten(source: str) -> str:
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line) + "\n"
