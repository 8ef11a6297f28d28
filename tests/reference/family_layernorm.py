"""Family cases whose norms subtract the mean, and whose matrices have biases."""

from __future__ import annotations

from family_weights import EPS, Case, Changes, Normal, make_config

EPS_OFF: Changes = {"layer_norm_eps": {"layer_norm_eps": 1e-5}}
GPT_NEOX = make_config(
    "gpt_neox", "GPTNeoXForCausalLM", num_key_value_heads=..., attention_dropout=...,
    bos_token_id=0, eos_token_id=0, hidden_act="gelu", layer_norm_eps=EPS,
    rotary_emb_base=20000, rotary_pct=0.5, tie_word_embeddings=False, use_parallel_residual=True,
    torch_dtype="float16",
)  # fmt: skip
NEOX_OFF: Changes = {
    **EPS_OFF,
    "rotary_emb_base": {"rotary_emb_base": 10000},
    "rotary_pct": {"rotary_pct": 1.0},
    "silu": {"hidden_act": "silu"},
}

LAYERNORM: dict[str, Case] = {
    # Its files hold float32 and no prefix.
    "gpt2": Case(
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 0,
            "embd_pdrop": 0.1,
            "eos_token_id": 0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": EPS,
            "model_type": "gpt2",
            "n_ctx": 544,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 544,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "vocab_size": 96,
        },
        rules={
            r"attn\.c_attn\.weight$": Normal(1.6, axis=0),
            r"attn\.c_proj\.weight$": Normal(0.5, axis=0),
            r"\.c_\w+\.weight$": Normal(1.0, axis=0),
            r"wpe\.weight$": Normal(0.2, axis=None),
        },
        off={
            "layer_norm_epsilon": {"layer_norm_epsilon": 1e-5},
            "silu": {"activation_function": "silu"},
            "unscaled": {"scale_attn_weights": False},
            "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
        },
        dtype="float32",
        renamed={r"^transformer\.": ""},
        # The causal mask; real ones have n_positions rows and columns.
        ignored={f"h.{layer}.attn.bias": (1, 1, 1, 1) for layer in range(2)},
    ),
    "gpt_neox": Case(
        GPT_NEOX, off={**NEOX_OFF, "in turn": {"use_parallel_residual": False}}, dtype="float16"
    ),
    "gpt_neox-in-turn": Case(
        {**GPT_NEOX, "use_parallel_residual": False},
        off={**NEOX_OFF, "parallel": {"use_parallel_residual": True}},
        dtype="float16",
    ),
}  # fmt: skip
