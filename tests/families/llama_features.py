"""Features of the families that are Llama with changes, see `tests.families.features`."""

from __future__ import annotations

from typing import Any

_WINDOWS = {"use_sliding_window": True, "sliding_window": 24}
_GELU = {"other activation": {"hidden_act": "gelu"}}
_SILU = {"other activation": {"hidden_act": "silu"}}

EXTRA: dict[str, dict[str, dict[str, Any]]] = {
    "ernie4_5": {
        "halves turn": {
            "model_type": "llama", "attention_bias": True, "mlp_bias": True, "use_bias": None,
        },
        **_GELU,
    },
    "granite": {
        "usual scale": {"attention_multiplier": 8**-0.5},
        **_GELU,
    },
    "phi3": {"window": {"sliding_window": 12}, **_GELU},
    "phi3-longrope": {
        "not past the switch": {"original_max_position_embeddings": 640},
        "no attention factor": {"max_position_embeddings": 256},
    },
    "phi3-longrope-short": {
        "past the switch": {"original_max_position_embeddings": 256},
        "no attention factor": {"max_position_embeddings": 640},
    },
    "qwen2": {"with windows": {**_WINDOWS, "max_window_layers": 0}, **_GELU},
    "qwen2-window": {
        "without windows": {"use_sliding_window": False},
        "smaller windows": {"sliding_window": 23},
        "larger windows": {"sliding_window": 25},
        "one window less": {"max_window_layers": 2},
        "windows in the first layers": {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    },
    "qwen3": {"with windows": {**_WINDOWS, "max_window_layers": 0}, **_GELU},
    "smollm3": {
        "every layer turns": {"no_rope_layers": [1, 1, 1]},
        "another layer does not turn": {"no_rope_layers": [1, 1, 0]},
        "by interval": {"no_rope_layers": None},
        "by another interval": {"no_rope_layers": None, "no_rope_layer_interval": 4},
        "with windows": {**_WINDOWS, "layer_types": None},
        **_GELU,
    },
    "stablelm": _GELU,
    "starcoder2": _SILU,
}  # fmt: skip

_UNUSED_WINDOWS = {"max_window_layers", "sliding_window", "use_sliding_window"}
IDLE: dict[str, set[str]] = {
    "phi3": {"original_max_position_embeddings"},  # of the default rope
    "phi3-longrope": {"rope_scaling.short_factor"},
    "phi3-longrope-short": {"rope_scaling.long_factor"},
    "qwen2": _UNUSED_WINDOWS,
    "qwen3": _UNUSED_WINDOWS,
    "smollm3": {
        *_UNUSED_WINDOWS, "no_rope_layer_interval", "no_rope_layers", "pretraining_tp",
    },
    "starcoder2": {"embedding_dropout", "residual_dropout"},
}  # fmt: skip
