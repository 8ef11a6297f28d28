"""Features of Gemma, OLMo, Command, GLM and EXAONE, and keys of theirs that change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"

EXTRA: dict[str, dict[str, Mapping[str, Any]]] = {
    "gemma": {"the activation": {"hidden_act": "silu"}},
    "gemma2": {
        "the activation": {"hidden_activation": "silu"},
        "the cap of scores": {"attn_logit_softcapping": None},
        "the cap of logits": {"final_logit_softcapping": None},
        "which layers have windows": {"layer_types": [FULL, SLIDING]},
        "layers without a window": {"layer_types": [SLIDING, SLIDING]},
    },
    "gemma3_text": {
        "the activation": {"hidden_activation": "silu"},
        "a base of its own under the window": {"rope_local_base_freq": 100000.0},
        "the scaling of the others": {"rope_scaling": None},
        "which layers have windows": {
            "sliding_window_pattern": None, "layer_types": [FULL, SLIDING, SLIDING],
        },
        "layers without a window": {"sliding_window_pattern": 4},
    },
    "olmo3": {
        "the scaling": {"rope_scaling": None},
        "which layers have windows": {"layer_types": [FULL, SLIDING, SLIDING]},
        "layers without a window": {"layer_types": [SLIDING] * 3},
    },
    "cohere2": {
        "which layers turn": {
            "sliding_window_pattern": None, "layer_switch": None,
            "layer_types": [FULL, SLIDING, SLIDING],
        },
        "layers without a window": {"sliding_window_pattern": 4, "layer_switch": None},
    },
    "glm": {"the part that turns": {"partial_rotary_factor": 1.0}},
    "glm4": {"the part that turns": {"partial_rotary_factor": 1.0}},
    "exaone4": {
        "which layers turn": {
            "sliding_window_pattern": "GLL", "layer_types": [FULL, SLIDING, SLIDING],
        },
        "windows": {"sliding_window": None, "layer_types": [FULL] * 3},
        "the scaling": {"rope_scaling": None},
    },
    "exaone4-full": {
        "which layers turn": {"sliding_window": 24},
        "windows": {"sliding_window": 24, "layer_types": [SLIDING] * 2},
    },
}  # fmt: skip

IDLE: dict[str, set[str]] = {
    "cohere2": {"use_parallel_embedding"},  # how training shares its work
    # Its heads are so small that the ramp ends between the first two planes anyway.
    "olmo3": {"rope_scaling.beta_fast", "rope_scaling.beta_slow"},
}
