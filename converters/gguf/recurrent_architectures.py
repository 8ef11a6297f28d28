"""GGUF architectures with layers that remember otherwise than by keys, see `architectures`."""

from __future__ import annotations

from converters.gguf import changes, recurrent
from converters.gguf.changes import Change, chain, tiled, values
from converters.gguf.names import (
    ATTENTION,
    GATE_UP,
    GEMMA,
    MLP,
    SHARED_EXPERT,
    Architecture,
)

_DELTA = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{stem: name for stem, name in ATTENTION.items() if stem.startswith("attn_")},
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
# With a norm around the value heads that is as it is.
_DELTA_CHANGES: dict[str, Change] = {
    **GEMMA,
    "ssm_a": values(changes.log_decay),
    "ssm_conv1d": values(changes.channels),
}
_DELTA_5 = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_DELTA_5_CHANGES = {
    **_DELTA_CHANGES,
    "attn_qkv": tiled("last", "linear_value_head_dim"),
    "attn_gate": tiled("rows", "linear_value_head_dim"),
    "ssm_out": tiled("columns", "linear_value_head_dim"),
    "ssm_conv1d": chain(tiled("last", "linear_value_head_dim"), values(changes.channels)),
    "ssm_a": chain(tiled("rows"), values(changes.log_decay)),
    **dict.fromkeys(("ssm_dt.bias", "ssm_alpha", "ssm_beta"), tiled("rows")),
}

_LFM2_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "output": "lm_head",
}
_LFM2 = {
    **ATTENTION,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
RECURRENT = {
    "mamba2": Architecture(
        config=recurrent.mamba2,
        top={
            "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f",
            "output": "lm_head",
        },
        block={
            "attn_norm": "norm",
            "ssm_in": "mixer.in_proj",
            "ssm_out": "mixer.out_proj",
            "ssm_conv1d": "mixer.conv1d",
            "ssm_norm": "mixer.norm",
            "ssm_dt.bias": "mixer.dt_bias",
            "ssm_a": "mixer.A_log",
            "ssm_d": "mixer.D",
        },
        layers="backbone.layers",
        changes={
            "ssm_a": values(changes.log_decay),
            "ssm_d": values(changes.flat),
            "ssm_norm": values(changes.flat),
            "ssm_conv1d.weight": values(changes.channels),
        },
        families=("mamba2",),
    ),
    "lfm2": Architecture(
        config=recurrent.lfm2,
        top=_LFM2_TOP,
        block=_LFM2,
        changes={"shortconv.conv.weight": values(changes.channels)},
        families=("lfm2",),
    ),
    "lfm2moe": Architecture(
        config=recurrent.lfm2_moe,
        top=_LFM2_TOP,
        block={
            **_LFM2,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b.bias": "feed_forward.expert_bias",
            "ffn_gate_exps": "feed_forward.experts.{x}.w1",
            "ffn_up_exps": "feed_forward.experts.{x}.w3",
            "ffn_down_exps": "feed_forward.experts.{x}.w2",
        },
        changes={"shortconv.conv.weight": values(changes.channels)},
        families=("lfm2_moe",),
    ),
    "qwen3next": Architecture(
        config=recurrent.qwen3_next,
        block={
            **_DELTA,
            **SHARED_EXPERT,
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_in": "linear_attn.in_proj_qkvz",  # in older files
        },
        changes={**_DELTA_CHANGES, "ffn_gate_inp_shexp": values(changes.one_row)},
        joins={
            "linear_attn.in_proj_qkvz.weight": (
                ("attn_qkv.weight", "attn_gate.weight"), changes.by_key_heads,
            ),
        },
        families=("qwen3_next",),
    ),
    "qwen35": Architecture(
        config=recurrent.qwen3_5,
        block={**_DELTA, **MLP, **_DELTA_5},
        changes=_DELTA_5_CHANGES,
        families=("qwen3_5", "qwen3_5_text"),
    ),
    "qwen35moe": Architecture(
        config=recurrent.qwen3_5_moe,
        block={
            **_DELTA,
            **_DELTA_5,
            **SHARED_EXPERT,
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
        },
        changes={**_DELTA_5_CHANGES, "ffn_gate_inp_shexp": values(changes.one_row)},
        joins={"mlp.experts.gate_up_proj": (GATE_UP, changes.after_each_other)},
        families=("qwen3_5_moe", "qwen3_5_moe_text"),
    ),
}  # fmt: skip
