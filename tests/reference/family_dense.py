"""Family cases with attention and a dense MLP in every layer."""

from __future__ import annotations

from typing import Any

from family_weights import (
    EPS,
    NEW,
    OFFSET_NORM,
    THETA,
    Case,
    Changes,
    Normal,
    Rules,
    Uniform,
    make_config,
)

RMS: dict[str, Any] = {"rms_norm_eps": EPS}
EPS_OFF: Changes = {"rms_norm_eps": {"rms_norm_eps": 1e-5}}
WINDOW_OFF: Changes = {
    "no window": {"sliding_window": None},
    "window - 1": {"sliding_window": 23},
    "window + 1": {"sliding_window": 25},
}
MIXED_OFF: Changes = {key: WINDOW_OFF[key] for key in ("window - 1", "window + 1")}

MISTRAL = make_config(
    "mistral", "MistralForCausalLM", head_dim=16, max_position_embeddings=32768,
    tie_word_embeddings=False, **RMS,
)  # fmt: skip
QWEN2 = make_config(
    "qwen2", "Qwen2ForCausalLM", max_position_embeddings=32768, max_window_layers=28,
    rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, use_sliding_window=False,
    **RMS,
)  # fmt: skip
PHI3 = make_config(
    "phi3", "Phi3ForCausalLM", attention_bias=False, embd_pdrop=0.0, resid_pdrop=0.0,
    max_position_embeddings=4096, original_max_position_embeddings=4096, pad_token_id=0,
    rope_scaling=None, rope_theta=20000.0, sliding_window=None, tie_word_embeddings=False, **RMS,
)  # fmt: skip
SHORT = [1.0, 1.1, 1.4, 2.0]
LONG = [1.2, 2.5, 6.0, 20.0]
GEMMA: dict[str, Any] = {
    "attention_bias": False,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 16,
    **RMS,
}
GEMMA_RULES: Rules = {
    r"\.[qk]_norm\.weight$": Uniform(0.0, 1.4),
    r"norm\.weight$": OFFSET_NORM,
    r"\.[qk]_proj\.weight$": Normal(2.2),
}


def longrope(original: int, **rest: Any) -> dict[str, Any]:
    """Phi-3 with a short and a long set of factors, as the 128k models have."""
    scaling = {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}
    return {
        **PHI3,
        "max_position_embeddings": 8 * original,
        "original_max_position_embeddings": original,
        "rope_scaling": scaling,
        **rest,
    }


def other_factors(key: str) -> dict[str, Any]:
    """The same scaling with one set of factors replaced by ones."""
    scaling = longrope(1)["rope_scaling"]
    return {"rope_scaling": {**scaling, key: [1.0] * len(SHORT)}}


DENSE: dict[str, Case] = {
    "mistral": Case(
        {**MISTRAL, "rope_theta": 1000000.0, "sliding_window": None},
        off={**EPS_OFF, **THETA, "window": {"sliding_window": 24}},
    ),
    # As the first Mistral 7B was published, with a smaller window.
    "mistral-window": Case(
        {**MISTRAL, "rope_theta": 20000.0, "sliding_window": 24},
        off={**EPS_OFF, **THETA, **WINDOW_OFF},
    ),
    # In the spelling of transformers 5.
    "mistral-new": Case(
        {
            **{key: value for key, value in MISTRAL.items() if key != "torch_dtype"},
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_window": None,
            **NEW,
        },
        off=EPS_OFF,
    ),
    "qwen2": Case(QWEN2, off={**EPS_OFF, **THETA}),
    "qwen2-window": Case(
        {
            **QWEN2,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
        },
        off={
            **THETA,
            **MIXED_OFF,
            "use_sliding_window": {"use_sliding_window": False},
            "max_window_layers": {"max_window_layers": 2},
        },
    ),
    "qwen3": Case(
        make_config(
            "qwen3", "Qwen3ForCausalLM", attention_bias=False, head_dim=16, max_window_layers=2,
            max_position_embeddings=40960, rope_scaling=None, rope_theta=1000000,
            sliding_window=None, tie_word_embeddings=True, use_sliding_window=False, **RMS,
        ),
        off={**EPS_OFF, **THETA},
    ),
    "phi3": Case(
        {**PHI3, "sliding_window": 24},
        off={**EPS_OFF, **THETA, **WINDOW_OFF},
    ),
    "phi3-partial": Case(
        {**PHI3, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
        off={**THETA, "partial": {"partial_rotary_factor": 1.0}},
    ),
    "phi3-longrope": Case(
        longrope(256),
        off={
            **THETA,
            "long_factor": other_factors("long_factor"),
            "switch": {"original_max_position_embeddings": 640},
            "attention factor": {"max_position_embeddings": 256},
        },
        depends=True,
    ),
    "phi3-longrope-short": Case(
        longrope(640),
        off={
            **THETA,
            "short_factor": other_factors("short_factor"),
            "switch": {"original_max_position_embeddings": 256},
            "attention factor": {"max_position_embeddings": 640},
        },
    ),
    "gemma2": Case(
        make_config(
            "gemma2", "Gemma2ForCausalLM", attn_logit_softcapping=6.0,
            cache_implementation="hybrid", final_logit_softcapping=10.0,
            hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=24, rope_theta=20000.0, sliding_window=24, **GEMMA,
        ),
        rules=GEMMA_RULES,
        off={
            **EPS_OFF,
            **THETA,
            **MIXED_OFF,
            "attention cap": {"attn_logit_softcapping": None},
            "logit cap": {"final_logit_softcapping": None},
            "query scale": {"query_pre_attn_scalar": 16},
            "order of layers": {"layer_types": ["full_attention", "sliding_attention"]},
            "silu": {"hidden_activation": "silu"},
        },
    ),
    "gemma3_text": Case(
        make_config(
            "gemma3_text", "Gemma3ForCausalLM", attn_logit_softcapping=None,
            cache_implementation="hybrid", final_logit_softcapping=None, hidden_act=...,
            hidden_activation="gelu_pytorch_tanh", num_hidden_layers=3, query_pre_attn_scalar=24,
            rope_local_base_freq=5000.0, rope_scaling={"factor": 4.0, "rope_type": "linear"},
            rope_theta=100000.0, sliding_window=24, sliding_window_pattern=3, **GEMMA,
        ),
        rules=GEMMA_RULES,
        off={
            **EPS_OFF,
            **THETA,
            **MIXED_OFF,
            "local base": {"rope_local_base_freq": 10000.0},
            "scaling": {"rope_scaling": None},
            "pattern": {"sliding_window_pattern": 2},
            "query scale": {"query_pre_attn_scalar": 16},
            "silu": {"hidden_activation": "silu"},
        },
    ),
    "granite": Case(
        make_config(
            "granite", "GraniteForCausalLM", attention_bias=False, attention_multiplier=0.2,
            embedding_multiplier=3.0, logits_scaling=2.0, mlp_bias=False, pad_token_id=0,
            residual_multiplier=0.6, rope_scaling=None, rope_theta=1000000.0,
            tie_word_embeddings=True, **RMS,
        ),
        rules={r"\.[qk]_proj\.weight$": Normal(2.2)},
        off={
            **EPS_OFF,
            **THETA,
            "attention": {"attention_multiplier": 8**-0.5},
            "embedding": {"embedding_multiplier": 1.0},
            "residual": {"residual_multiplier": 1.0},
            "logits": {"logits_scaling": 1.0},
        },
    ),
    "smollm3": Case(
        make_config(
            "smollm3", "SmolLM3ForCausalLM", attention_bias=False,
            layer_types=["full_attention"] * 3, max_window_layers=28, mlp_bias=False,
            no_rope_layer_interval=3, no_rope_layers=[1, 0, 1], num_hidden_layers=3, pad_token_id=0,
            pretraining_tp=2, rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
            tie_word_embeddings=True, use_sliding_window=False, **RMS,
        ),
        rules={r"\.[qk]_proj\.weight$": Normal(1.7)},
        off={
            **EPS_OFF,
            **THETA,
            "all rotate": {"no_rope_layers": [1, 1, 1]},
            "by interval": {"no_rope_layers": None},
        },
    ),
    "cohere2": Case(
        make_config(
            "cohere2", "Cohere2ForCausalLM", attention_bias=False, cache_implementation="hybrid",
            head_dim=8, layer_norm_eps=EPS, layer_switch=3, logit_scale=0.25, num_hidden_layers=3,
            order_of_interleaved_layers="local_attn_first", pad_token_id=0,
            position_embedding_type="rope_gptj", rope_scaling=None, rope_theta=50000,
            rotary_pct=1.0, sliding_window=24, sliding_window_pattern=3, use_embedding_sharing=True,
            use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=False,
            use_qk_norm=False,
        ),
        off={
            "layer_norm_eps": {"layer_norm_eps": 1e-5},
            **THETA,
            **MIXED_OFF,
            "logit_scale": {"logit_scale": 1.0},
            "pattern": {"sliding_window_pattern": 2},
        },
    ),
    "glm4": Case(
        make_config(
            "glm4", "Glm4ForCausalLM", attention_bias=True, eos_token_id=[2, 3], head_dim=16,
            pad_token_id=0, partial_rotary_factor=0.5, rope_theta=20000.0,
            tie_word_embeddings=False, **RMS,
        ),
        off={**EPS_OFF, **THETA, "partial": {"partial_rotary_factor": 1.0}},
    ),
}  # fmt: skip
