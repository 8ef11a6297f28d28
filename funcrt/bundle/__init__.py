"""Bundles: an exported model that another process, in another language, runs without its code.

What is loaded is imported on first use, so that loading never imports what exporting needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcrt.bundle.bundle import Bundle
    from funcrt.bundle.exporter import export, extend, refresh
    from funcrt.bundle.format.checks import load_manifest
    from funcrt.bundle.format.manifest import Manifest
    from funcrt.bundle.loader import load_bundle
    from funcrt.bundle.proof.certificate import Check
    from funcrt.bundle.proof.verifier import verify

_HOMES = {
    "Bundle": "bundle",
    "Check": "proof.certificate",
    "Manifest": "format.manifest",
    "export": "exporter",
    "extend": "exporter",
    "refresh": "exporter",
    "load_bundle": "loader",
    "load_manifest": "format.checks",
    "verify": "proof.verifier",
}

__all__ = [
    "Bundle", "Check", "Manifest", "export", "extend", "load_bundle", "load_manifest", "refresh",
    "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"funcrt.bundle.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'funcrt.bundle' has no attribute {name!r}")
