"""Why a column is false where it is; a check that passes must not stand here."""

from __future__ import annotations

# What changes go round is in mlx_lm_changes.py.
_NO_MODULE = "mlx-lm has no module of this name"

# (case, column) -> what the table says.
REASONS: dict[tuple[str, str], str] = {
    ("gemma", "mlx_lm"): "mlx-lm's module takes the exact gelu, which no config of Gemma asks for",
    ("qwen3_5_moe_text", "mlx_lm"): _NO_MODULE,
    ("qwen3_5_text", "mlx_lm"): _NO_MODULE,
    ("youtu", "mlx_lm"): _NO_MODULE,
}
