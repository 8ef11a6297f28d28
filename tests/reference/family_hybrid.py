"""Family cases with experts, and a state instead of keys and values in some layers.

- lfm2_moe: layers as in lfm2, but the MLP of the first num_dense_layers has intermediate_size as it
  is; the others have experts N.w1, w3, w2 of moe_intermediate_size. Sigmoid of the router's logits;
  scores + expert_bias choose; the weights are the scores without the bias, divided by sum + 1e-6
  with norm_topk_prob, times routed_scaling_factor. layer_types has no default.
"""

from __future__ import annotations

from family_recurrent import LFM2_OFF
from family_weights import EPS, Case, Normal, make_config

HYBRID: dict[str, Case] = {
    "lfm2_moe": Case(
        make_config(
            "lfm2_moe", "Lfm2MoeForCausalLM", attention_dropout=..., conv_L_cache=3,
            conv_bias=False, hidden_act=..., layer_types=["conv", "full_attention", "conv"],
            moe_intermediate_size=32, norm_eps=EPS, norm_topk_prob=True, num_dense_layers=1,
            num_experts=6, num_experts_per_tok=2, num_hidden_layers=3, pad_token_id=0,
            rope_theta=1000000.0, routed_scaling_factor=1.5, use_expert_bias=True,
            use_pos_enc=True,
        ),
        rules={r"expert_bias$": Normal(0.2, axis=None)},
        off={
            **LFM2_OFF,
            "one expert": {"num_experts_per_tok": 1},
            "weights as they are": {"norm_topk_prob": False},
            "unscaled": {"routed_scaling_factor": 1.0},
        },
    ),
}  # fmt: skip
