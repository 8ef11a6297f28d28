"""Names that GGUF architectures share.

In a table of names, `STEM` of a tensor `STEM.weight` or `STEM.bias` leads to the Hugging Face
module, and a whole `STEM.weight` to the whole name of a tensor. `{x}` in a module is the number of
an expert: GGUF stacks them in one tensor. `{qkv}` stands for q, k and v, one after another in the
rows of one tensor. Stems are those of blocks, without `blk.N.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from converters.gguf import changes
from converters.gguf.changes import Change, Join, unpermuted, values
from converters.gguf.config import Reader

Names = Mapping[str, str]

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one value of `general.architecture` becomes a Hugging Face config and params.

    Attributes:
        config: reads the metadata.
        top: names outside of blocks.
        block: names in blocks; see the module.
        layers: what Hugging Face calls `blk`.
        changes: by stem or whole name, for those that do not arrive as they left.
        joins: Hugging Face name of a block -> the whole names of its pieces, and what joins them.
        families: the `model_type`s that are written so (a mistral comes
            back as a llama, Qwen3.5 without what looks at images).
    """

    config: Reader
    block: Names
    families: tuple[str, ...]
    top: Names = field(default_factory=lambda: TOP)
    layers: str = "model.layers"
    changes: Mapping[str, Change] = field(default_factory=dict)
    joins: Mapping[str, tuple[tuple[str, ...], Join]] = field(default_factory=dict)


ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PLAIN = {**ATTENTION, **MLP}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{m}_exps": f"mlp.experts.{{x}}.{m}_proj" for m in ("gate", "up", "down")},
}
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{x}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{x}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{x}.w2",
}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
AROUND = {  # norms before and after both halves of a layer, or only after
    **PLAIN,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def shared(module: str) -> Names:
    """Experts that every token goes through, which Hugging Face calls `module`."""
    return {f"ffn_{m}_shexp": f"mlp.{module}.{m}_proj" for m in ("gate", "up", "down")}


CORRECTED = {
    **PLAIN,
    **EXPERTS,
    **shared("shared_experts"),
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
HEADS = {
    "attn_q": unpermuted("num_attention_heads"),
    "attn_k": unpermuted("num_key_value_heads"),
}
GEMMA = {
    stem: values(changes.minus_one)
    for stem in (
        "output_norm", "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm",
        "attn_q_norm", "attn_k_norm",
    )
}  # fmt: skip
SHARED_EXPERT = {
    **EXPERTS, **shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
