"""The host loop over compiled functions: many requests at once, each as if it were alone."""

from __future__ import annotations

from funcrt.engine.engine import Engine
from funcrt.engine.handle import Handle
from funcrt.engine.options import Options
from funcrt.engine.request import Chunk, Completion
from funcrt.engine.stats import Stats, StepReport

__all__ = ["Chunk", "Completion", "Engine", "Handle", "Options", "Stats", "StepReport"]
