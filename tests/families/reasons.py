"""Why a column is false where it is; a check that passes must not stand here."""

from __future__ import annotations

_NO_WINDOW = "mlx-lm's module for it has no sliding window"
_NEOX = "mlx-lm's module has MLPs of four times its width only, and another gelu"
_ONE_ADDED = "mlx-lm's loader adds 1 to the weights of norms in the stored bfloat16"
_MAMBA2 = (
    "mlx-lm's module needs an intermediate_size, norms all groups of heads as one, "
    "and knows one eps of a layer's norm"
)

# (case, column) -> what the table says.
REASONS: dict[tuple[str, str], str] = {
    ("deepseek_v2-lite", "mlx_lm"): "mlx-lm's module for it needs a rope_scaling",
    ("dots1", "mlx_lm"): _NO_WINDOW,
    ("gemma", "mlx_lm"): "mlx-lm's module for it takes the exact gelu",
    ("gemma2", "mlx_lm"): _NO_WINDOW,
    ("gemma3_text", "mlx_lm"): "mlx-lm's module rounds the embedding's scale to bfloat16",
    ("glm", "mlx_lm"): "mlx-lm's module for it turns whole heads",
    ("glm4_moe_lite", "mlx_lm"): "mlx-lm's module norms latents with the eps of layers",
    ("gpt_neox", "mlx_lm"): _NEOX,
    ("gpt_neox-in-turn", "mlx_lm"): _NEOX,
    ("gpt_oss", "mlx_lm"): "mlx-lm's module takes dense experts apart along the wrong axis, "
    "and knows neither yarn that is not rounded nor other limits than 7",
    ("lfm2-bias", "mlx_lm"): "mlx-lm's module needs keys that its newer configs leave out",
    ("mamba2", "mlx_lm"): _MAMBA2,
    ("mamba2-bias", "mlx_lm"): _MAMBA2,
    ("minicpm3", "mlx_lm"): "mlx-lm's module divides no logits of a tied head, "
    "and takes the long factors for every text",
    ("mistral-window", "mlx_lm"): _NO_WINDOW,
    ("mixtral-window", "mlx_lm"): _NO_WINDOW,
    ("olmo3", "mlx_lm"): "mlx-lm's yarn has a factor of its own",
    ("phi3", "mlx_lm"): _NO_WINDOW,
    ("phi3-longrope-short", "mlx_lm"): "mlx-lm's module takes the long factors for every text",
    ("qwen2-window", "mlx_lm"): _NO_WINDOW,
    ("qwen2_moe", "mlx_lm"): "mlx-lm's module for it has experts in every layer",
    ("qwen3_5", "mlx_lm"): "mlx-lm's module for it reads full_attention_interval, not layer_types",
    ("qwen3_5_moe", "mlx_lm"): _ONE_ADDED,
    ("qwen3_5_moe_text", "mlx_lm"): "mlx-lm has no module of this name",
    ("qwen3_5_text", "mlx_lm"): "mlx-lm has no module of this name",
    ("qwen3_next", "mlx_lm"): _ONE_ADDED,
    ("starcoder2", "mlx_lm"): f"{_NO_WINDOW}, and another gelu",
    ("youtu", "mlx_lm"): "mlx-lm has no module of this name",
    ("ernie4_5_moe", "mlx_lm"): "mlx-lm's module leaves out the bias of the choice",
}
