"""Features of families that choose among gated experts, see `features`."""

from __future__ import annotations

from typing import Any

_WINDOW = {"with a window": {"use_sliding_window": True, "sliding_window": 128}}
_ONE = {"one expert": {"num_experts_per_tok": 1}}
_TRAINING = {"output_router_logits", "router_aux_loss_coef"}
# There is no window that these could switch on.
_QWEN = {*_TRAINING, "max_window_layers", "use_sliding_window"}

_FAST = "rope_scaling.beta_fast"  # of so few planes, only slower turns reach another

EXTRA: dict[str, dict[str, dict[str, Any]]] = {
    "granitemoe": _ONE,
    "mixtral": _ONE,
    "mixtral-window": {"without a window": {"sliding_window": None}},
    "qwen2_moe": {**_ONE, **_WINDOW},
    "qwen3_moe": {**_ONE, **_WINDOW},
    "gpt_oss": {
        **_ONE,
        _FAST: {_FAST: 4.0},
        "without yarn": {"rope_scaling": {"rope_type": "default"}},
        "windows in other layers": {"layer_types": ["full_attention", "sliding_attention"]},
        "windows nowhere": {"layer_types": ["full_attention", "full_attention"]},
        "alpha": {"swiglu_alpha": 1.0},
    },
}

IDLE: dict[str, set[str]] = {
    "granitemoe": _TRAINING,
    "mixtral": _TRAINING,
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    # Two of them are repeated by other keys.
    "gpt_oss": {*_TRAINING, "experts_per_token", "initial_context_length", _FAST},
}
