"""Features of GPT-2 and GPT-NeoX, see `features`."""

from __future__ import annotations

from typing import Any

EXTRA: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {"scaled by layer": {"scale_attn_by_inverse_layer_idx": True}},
}

# Of heads that classify; n_ctx is what n_positions says.
IDLE: dict[str, set[str]] = {
    "gpt2": {"n_ctx", "summary_first_dropout", "summary_proj_to_labels", "summary_use_proj"},
}
