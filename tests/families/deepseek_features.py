"""Features of families with latent attention or DeepSeek's experts, see `features`."""

from __future__ import annotations

from typing import Any

_FEW_PLANES = "rope_scaling.beta_fast"  # of so few planes, only much slower turns reach another

EXTRA: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v2": {"groups": {"topk_method": "greedy"}},
    "deepseek_v2-lite": {"groups": {"topk_method": "group_limited_greedy", "n_group": 2}},
    "deepseek_v3": {
        "no yarn": {"rope_scaling": None},
        _FEW_PLANES: {_FEW_PLANES: 1},
        "halves": {"rope_interleave": False},
    },
    "ernie4_5_moe": {
        "divisor": {"moe_norm_min": 2.0},
        "fewer layers": {"moe_layer_end_index": 1},
    },
    "glm4_moe_lite": {"halves": {"rope_interleave": False}},
}

# Losses of training, how experts are spread over machines, layers that guess ahead.
IDLE: dict[str, set[str]] = {
    "deepseek_v2": {"aux_loss_alpha", "ep_size", "seq_aux", _FEW_PLANES},
    "deepseek_v2-lite": {"n_group", "topk_group"},  # chosen from all experts alike
    "deepseek_v3": {"ep_size", "num_nextn_predict_layers", _FEW_PLANES},
    "ernie4_5_moe": {
        "moe_capacity", "moe_layer_end_index", "moe_use_aux_free", "num_nextn_predict_layers",
    },
    "glm4_moe": {"num_nextn_predict_layers"},
    "glm4_moe_lite": {"num_nextn_predict_layers"},
    "minicpm3": {"rope_scaling.long_factor"},  # the prompt is shorter
    "youtu": {"embedding_initializer_range"},
}  # fmt: skip
