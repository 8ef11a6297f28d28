"""The architectures of GGUF: which config, which names, and what was changed in their tensors."""

from __future__ import annotations

from converters.gguf import changes, dense, mixtures
from converters.gguf.changes import values
from converters.gguf.names import (
    AROUND,
    ATTENTION,
    CORRECTED,
    EXPERTS,
    FUSED_MLP,
    GATE_UP,
    GEMMA,
    HEADS,
    LATENT,
    MIXTRAL,
    PLAIN,
    SHARED_EXPERT,
    Architecture,
)
from converters.gguf.recurrent_architectures import RECURRENT

ARCHITECTURES = {
    "llama": Architecture(
        config=dense.llama,
        block={**PLAIN, **MIXTRAL},
        changes=HEADS,
        families=("llama", "mistral", "mixtral"),
    ),
    "qwen2": Architecture(config=dense.qwen2, block=PLAIN, families=("qwen2",)),
    "qwen3": Architecture(config=dense.qwen3, block=PLAIN, families=("qwen3",)),
    "qwen2moe": Architecture(
        config=mixtures.qwen2_moe,
        block={
            **PLAIN, **SHARED_EXPERT,
        },
        changes={"ffn_gate_inp_shexp": values(changes.one_row)},
        families=("qwen2_moe",),
    ),
    "qwen3moe": Architecture(
        config=mixtures.qwen3_moe, block={**PLAIN, **EXPERTS}, families=("qwen3_moe",)
    ),
    "gemma": Architecture(
        config=dense.gemma, block=PLAIN, changes=GEMMA, families=("gemma",)
    ),
    "gemma2": Architecture(
        config=dense.gemma2, block=AROUND, changes=GEMMA, families=("gemma2",)
    ),
    "gemma3": Architecture(
        config=dense.gemma3, block=AROUND, changes=GEMMA, families=("gemma3_text",)
    ),
    "phi3": Architecture(
        config=dense.phi3,
        block={**ATTENTION, **FUSED_MLP, "attn_qkv": "self_attn.qkv_proj"},
        families=("phi3",),
    ),
    "olmo2": Architecture(config=dense.olmo2, block=AROUND, families=("olmo2", "olmo3")),
    "exaone4": Architecture(config=dense.exaone4, block=AROUND, families=("exaone4",)),
    "granite": Architecture(
        config=dense.granite, block=PLAIN, changes=HEADS, families=("granite",)
    ),
    "smollm3": Architecture(
        config=dense.smollm3, block=PLAIN, changes=HEADS, families=("smollm3",)
    ),
    "ernie4_5": Architecture(config=dense.ernie, block=PLAIN, families=("ernie4_5",)),
    "command-r": Architecture(config=dense.cohere, block=PLAIN, families=("cohere",)),
    "cohere2": Architecture(config=dense.cohere2, block=PLAIN, families=("cohere2",)),
    "glm4": Architecture(
        config=dense.glm4,
        block={
            **ATTENTION,
            **FUSED_MLP,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        families=("glm4",),
    ),
    "chatglm": Architecture(
        config=dense.glm,
        block={**ATTENTION, **FUSED_MLP, "attn_qkv": "self_attn.{qkv}_proj"},
        families=("glm",),
    ),
    "glm4moe": Architecture(
        config=mixtures.glm4_moe,
        block={**CORRECTED, "post_attention_norm": "post_attention_layernorm"},
        families=("glm4_moe",),
    ),
    "dots1": Architecture(config=mixtures.dots1, block=CORRECTED, families=("dots1",)),
    "ernie4_5-moe": Architecture(
        config=mixtures.ernie_moe,
        block={**CORRECTED, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        changes={"exp_probs_b.bias": values(changes.one_row)},
        families=("ernie4_5_moe",),
    ),
    "deepseek2": Architecture(
        config=mixtures.deepseek,
        block={**CORRECTED, **LATENT},
        joins={
            "self_attn.kv_b_proj.weight": (
                ("attn_k_b.weight", "attn_v_b.weight"), changes.latent_maps,
            )
        },
        families=("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"),
    ),
    "minicpm3": Architecture(
        config=mixtures.minicpm3, block={**PLAIN, **LATENT}, families=("minicpm3",)
    ),
    "gpt-oss": Architecture(
        config=mixtures.gpt_oss,
        block={
            **ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        changes={"ffn_down_exps.weight": changes.transposed},
        joins={
            "mlp.experts.gate_up_proj": (
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"), changes.in_turns,
            ),
            "mlp.experts.gate_up_proj_bias": (
                ("ffn_gate_exps.bias", "ffn_up_exps.bias"), changes.biases_in_turns,
            ),
        },
        families=("gpt_oss",),
    ),
    "gpt2": Architecture(
        config=dense.gpt2,
        top={
            "token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head",
        },
        block={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        layers="h",
        changes={
            f"{stem}.weight": changes.transposed
            for stem in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        },
        families=("gpt2",),
    ),
    "gptneox": Architecture(
        config=dense.gpt_neox,
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        block={
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        layers="gpt_neox.layers",
        changes={"attn_qkv": changes.by_heads},
        families=("gpt_neox",),
    ),
    "stablelm": Architecture(
        config=dense.stablelm,
        block={
            **PLAIN,
            "attn_q_norm": "self_attn.q_layernorm.norms.{x}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{x}",
        },
        families=("stablelm",),
    ),
    "starcoder2": Architecture(
        config=dense.starcoder2,
        block={**ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        families=("starcoder2",),
    ),
    "granitemoe": Architecture(
        config=mixtures.granitemoe,
        block={
            **ATTENTION,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_exps": "block_sparse_moe.output_linear",
        },
        changes=HEADS,
        joins={
            "block_sparse_moe.input_linear.weight": (GATE_UP, changes.after_each_other),
        },
        families=("granitemoe",),
    ),
    **RECURRENT,
}  # fmt: skip
