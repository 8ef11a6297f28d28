"""Family cases that differ from others by a few settings, names or parts."""

from __future__ import annotations

from family_dense import EPS_OFF, GEMMA, GEMMA_RULES, MIXED_OFF, RMS
from family_weights import EPS, THETA, Case, Changes, Normal, Uniform, make_config

LAYER_EPS_OFF: Changes = {"layer_norm_eps": {"layer_norm_eps": 1e-5}}
OLMO3_YARN = {
    "attention_factor": 1.2,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "rope_type": "yarn",
}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 256,
    "rope_type": "llama3",
}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]

RELATIVES: dict[str, Case] = {
    "olmo2": Case(
        make_config(
            "olmo2", "Olmo2ForCausalLM", attention_bias=False, pad_token_id=0, rope_scaling=None,
            rope_theta=500000, tie_word_embeddings=False, **RMS,
        ),
        off={**EPS_OFF, **THETA},
    ),
    "olmo3": Case(
        make_config(
            "olmo3", "Olmo3ForCausalLM", attention_bias=False, layer_types=LAYERS,
            num_hidden_layers=3, pad_token_id=0, rope_scaling=OLMO3_YARN, rope_theta=500000,
            sliding_window=24, tie_word_embeddings=False, **RMS,
        ),
        off={
            **EPS_OFF,
            **THETA,
            **MIXED_OFF,
            "no scaling": {"rope_scaling": None},
            "attention factor": {"rope_scaling": {**OLMO3_YARN, "attention_factor": 1.0}},
            "pattern": {"layer_types": LAYERS[::-1]},
        },
    ),
    "exaone4": Case(
        make_config(
            "exaone4", "Exaone4ForCausalLM", head_dim=16, layer_types=LAYERS, num_hidden_layers=3,
            pad_token_id=0, rope_scaling=LLAMA3, rope_theta=1000000, sliding_window=24,
            sliding_window_pattern="LLG", tie_word_embeddings=False, **RMS,
        ),
        rules={r"\.[qk]_norm\.weight$": Uniform(0.8, 1.8)},
        off={
            **EPS_OFF,
            **THETA,
            **MIXED_OFF,
            "no scaling": {"rope_scaling": None},
            "pattern": {"layer_types": LAYERS[::-1]},
        },
    ),
    # As the 1.2B model is: no window, and then all layers rotate.
    "exaone4-full": Case(
        make_config(
            "exaone4", "Exaone4ForCausalLM", head_dim=16, layer_types=["full_attention"] * 2,
            pad_token_id=0, rope_scaling=LLAMA3, rope_theta=1000000, sliding_window=None,
            sliding_window_pattern=None, tie_word_embeddings=True, **RMS,
        ),
        off={**EPS_OFF, **THETA},
    ),
    "ernie4_5": Case(
        make_config(
            "ernie4_5", "Ernie4_5ForCausalLM", attention_dropout=..., head_dim=16, pad_token_id=0,
            rope_theta=500000.0, tie_word_embeddings=True, use_bias=True, **RMS,
        ),
        rules={r"\.[qk]_proj\.weight$": Normal(1.7)},
        off={**EPS_OFF, **THETA},
    ),
    "gemma": Case(
        make_config(
            "gemma", "GemmaForCausalLM", hidden_act="gelu", hidden_activation=None,
            rope_scaling=None, rope_theta=20000.0, **GEMMA,
        ),
        rules={
            **GEMMA_RULES,
            r"\.[qk]_proj\.weight$": Normal(1.7),
            r"embed_tokens": Normal(1.5),
        },
        off={**EPS_OFF, **THETA, "silu": {"hidden_act": "silu"}},
    ),
    "cohere": Case(
        make_config(
            "cohere", "CohereForCausalLM", attention_bias=False, layer_norm_eps=EPS,
            logit_scale=0.25, pad_token_id=0, rope_theta=20000.0, use_qk_norm=True,
        ),
        off={**LAYER_EPS_OFF, **THETA, "logit_scale": {"logit_scale": 1.0}},
    ),
    "glm": Case(
        make_config(
            "glm", "GlmForCausalLM", attention_bias=True, eos_token_id=[2, 3], head_dim=16,
            pad_token_id=0, partial_rotary_factor=0.5, rope_theta=20000.0,
            tie_word_embeddings=False, **RMS,
        ),
        off={**EPS_OFF, **THETA, "partial": {"partial_rotary_factor": 1.0}},
    ),
    "starcoder2": Case(
        make_config(
            "starcoder2", "Starcoder2ForCausalLM", attention_dropout=0.1, embedding_dropout=0.1,
            eos_token_id=0, bos_token_id=0, hidden_act="gelu_pytorch_tanh", mlp_type="default",
            norm_epsilon=EPS, norm_type="layer_norm", residual_dropout=0.1, rope_theta=100000,
            sliding_window=24, use_bias=True,
        ),
        off={
            **THETA,
            **MIXED_OFF,
            "norm_epsilon": {"norm_epsilon": 1e-5},
            "no window": {"sliding_window": None},
            "silu": {"hidden_act": "silu"},
        },
    ),
    "stablelm": Case(
        make_config(
            "stablelm", "StableLmForCausalLM", hidden_dropout=0.0, layer_norm_eps=EPS,
            partial_rotary_factor=0.5, qk_layernorm=False, rope_scaling=None, rope_theta=20000,
            tie_word_embeddings=False, use_parallel_residual=False, use_qkv_bias=True,
        ),
        off={**LAYER_EPS_OFF, **THETA, "partial": {"partial_rotary_factor": 1.0}},
    ),
    # As the 12B model is.
    "stablelm-parallel": Case(
        make_config(
            "stablelm", "StableLmForCausalLM", hidden_dropout=0.0, layer_norm_eps=EPS,
            partial_rotary_factor=0.5, qk_layernorm=True, rope_scaling=None, rope_theta=20000,
            tie_word_embeddings=False, use_parallel_residual=True, use_qkv_bias=False,
        ),
        rules={r"layernorm\.norms\.(\d+|\*)\.weight$": Uniform(1.0, 2.2)},
        off={**LAYER_EPS_OFF, **THETA, "partial": {"partial_rotary_factor": 1.0}},
    ),
}  # fmt: skip
