"""funcrt: language models as pure functions on MLX, compiled once per fixed shape and exported.

f(params, tokens, mask, cache_state) -> (logits, cache_state)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from funcrt.blas import check_backend as _check_backend
from funcrt.blas import load as _load_blas

_check_backend()
_load_blas()  # a host BLAS only takes effect when it is loaded before mlx

from funcrt.streams import reserve as _reserve_streams  # noqa: E402

_reserve_streams()  # only the first streams of a process can be shared by its threads

if TYPE_CHECKING:
    from funcrt import adapters, cache, masks
    from funcrt.buckets import Bucket, BucketPlan
    from funcrt.bundle import Bundle, export, extend, load_bundle, refresh, verify
    from funcrt.config import ModelConfig
    from funcrt.engine import Chunk, Completion, Engine, Handle
    from funcrt.errors import FuncrtError
    from funcrt.expectation import expect
    from funcrt.flat import flatten
    from funcrt.model import Model, load_model

# Imported on first use: a process that runs a bundle never loads the models' code.
_HOMES = {
    "Bucket": "buckets",
    "BucketPlan": "buckets",
    "Bundle": "bundle",
    "Chunk": "engine",
    "Completion": "engine",
    "Engine": "engine",
    "Handle": "engine",
    "FuncrtError": "errors",
    "Model": "model",
    "ModelConfig": "config",
    "expect": "expectation",
    "export": "bundle",
    "extend": "bundle",
    "flatten": "flat",
    "load_bundle": "bundle",
    "load_model": "model",
    "refresh": "bundle",
    "verify": "bundle",
}
_MODULES = {"adapters", "cache", "masks"}

__all__ = [
    "Bucket",
    "BucketPlan",
    "Bundle",
    "Chunk",
    "Completion",
    "Engine",
    "FuncrtError",
    "Handle",
    "Model",
    "ModelConfig",
    "adapters",
    "cache",
    "expect",
    "export",
    "extend",
    "flatten",
    "load_bundle",
    "load_model",
    "masks",
    "refresh",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"funcrt.{name}")
    if name in _HOMES:
        return getattr(import_module(f"funcrt.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'funcrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
