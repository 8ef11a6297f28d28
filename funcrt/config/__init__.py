"""What a model is, read once from a Hugging Face config.json and frozen.

`ModelConfig` has what all families share. What several of them add is beside it: layers of several
types, windows by a pattern, a rope for layers with windows, experts.
"""

from __future__ import annotations

from funcrt.config.base import ACTIVATIONS, DTYPES, ModelConfig
from funcrt.config.fields import setting
from funcrt.config.rope import RopeConfig

__all__ = ["ACTIVATIONS", "DTYPES", "ModelConfig", "RopeConfig", "setting"]
