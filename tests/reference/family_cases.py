"""The tiny checkpoints of `make_families.py`, and what transformers does that is easy to get wrong.

H, K, D: heads, key/value heads, head size (`head_dim`, or hidden_size / H where the class has
none). Unless it is said: x + attn(norm(x)), then x + mlp(norm(x)); RMS norm in float32 that
multiplies by its weight after going back to the dtype; silu(gate) * up; scores times D^-0.5;
softmax in float32; rotation of halves (i with i + D/2); a window W sees 0 <= q - k < W; rope
settings as in llama_cases.py, theta 10000 where a config has none. What a class fills in is in
families/defaults.json. Published files may hold what nobody reads: see `ignored` of the cases.

Dense:

- mistral: a config without sliding_window has 4096, null is none. It is the window of every
  layer.
- qwen2: biases on q, k, v, not on o; no head_dim. sliding_window counts only with
  use_sliding_window, and then for layers i >= max_window_layers; layer_types, if given, wins.
  qwen3: RMS norm of each head of q and k (weight [D]) before rotating; no bias unless
  attention_bias, and then o has one as well; head_dim is a key of its own, by default 128.
- phi3: qkv_proj rows are q, k, v; gate_up_proj rows are gate, up. Only the first int(D *
  partial_rotary_factor) of D rotate. longrope (also spelled su or yarn): frequencies 1 /
  (factor_i theta^(2i/D')), D' of the rotated part, long_factor for all positions of a call whose
  last position + 1 > original_max_position_embeddings (a key at the top), else short_factor; cos
  and sin of both times sqrt(1 + ln s / ln original), s = max_position_embeddings / original, or
  the `factor` of the dict (1 where s <= 1; `attention_factor`, if given, wins). Cached keys stay
  as they were rotated: feeding in pieces over the switch gives other logits (golden
  chunked_logits), and `generate` starts the cache again there.
- gemma, gemma2, gemma3_text: embedding times sqrt(hidden_size), rounded to the dtype of the
  weights; norms multiply by 1 + weight, in float32, before going back; tied unless it says not;
  gelu_pytorch_tanh from hidden_activation (gemma: from hidden_act, where "gelu" means the same).
  gemma2, 3: scores times query_pre_attn_scalar^-0.5; norms before and after both parts, x +
  post(f(pre(x))): input_layernorm, post_attention_layernorm, pre_feedforward_layernorm,
  post_feedforward_layernorm. gemma2: cap * tanh(score / cap) before the mask; final cap on the
  logits; layers 0, 2, 4 .. have the window. gemma3: norm of each head of q and k (1 + weight)
  before rotating, no caps; layer i has the window unless (i + 1) % sliding_window_pattern == 0
  (by default 6); those rotate at rope_local_base_freq (10000) unscaled, the full ones at
  rope_theta (1000000) with rope_scaling. In the new spelling rope_parameters has one dict per
  layer type.
- olmo2: no norm before, x + post(f(x)) with post_attention_layernorm and
  post_feedforward_layernorm; q and k are normed over all heads at once (weights [H D], [K D])
  before they are split; the weight multiplies in float32. olmo3: also windows (by default all but
  each fourth layer), and rope_scaling for the full layers alone.
- granite: embedding times embedding_multiplier, scores times attention_multiplier instead of
  D^-0.5, x + residual_multiplier * f, logits divided by logits_scaling.
- smollm3: no_rope_layers[i] = 1 means that layer i DOES rotate; absent, all do but each
  no_rope_layer_interval-th (4). theta 2000000 by default.
- cohere, cohere2: layer norm without bias, in float32 with the weight; one norm, x + attn(n) +
  mlp(n); rotation of neighbours (2i with 2i + 1); logits times logit_scale; tied. cohere:
  use_qk_norm norms each head with a weight of its own ([H, D], [K, D]) before rotating. cohere2:
  D = hidden_size / H always; layer i has the window and rotates unless (i + 1) %
  sliding_window_pattern == 0 (by default 4): full layers do not rotate.
- glm4: norms around, x + post_self_attn_layernorm(attn(input_layernorm(x))), then x +
  post_mlp_layernorm(mlp(post_attention_layernorm(x))); gate_up_proj rows are gate, up; rotation
  of neighbours in the first half of D (partial_rotary_factor, by default 0.5); biases on q, k, v
  with attention_bias, never on o.
- exaone4: as olmo2, but q and k are normed per head (weight [D]); with a sliding_window full
  layers do not rotate, without one all do. sliding_window_pattern is a number, or letters (LLLG)
  beside layer_types, which wins.
- ernie4_5: rotation of neighbours; use_bias puts biases on all seven matrices.

Layer norm and biases:

- gpt2: matrices are [inputs, outputs]; c_attn columns are q, k, v; learned positions wpe added to
  wte; gelu_new (the tanh one); MLP width 4 n_embd where n_inner is null; head tied to wte. Names
  have no prefix on the hub, `transformer.` when saved by newer versions; attn.bias is a mask.
- gpt_neox: query_key_value rows are, per head, q, k, v of that head ([H, 3, D]); the first int(D
  * rotary_pct) rotate (halves), base rotary_emb_base; exact gelu; with use_parallel_residual x +
  attn(n1(x)) + mlp(n2(x)), else in turn. Head embed_out, untied.
- starcoder2: c_fc, gelu_pytorch_tanh, c_proj; norm_epsilon. stablelm: partial_rotary_factor 0.25
  by default; norms with bias, biases on q, k, v with use_qkv_bias; qk_layernorm: a norm without
  bias per head, named q_layernorm.norms.HEAD; parallel: x + attn(n) + mlp(n) and no second norm.

Experts (shared ones are added unweighted unless it is said):

- mixtral: softmax in float32 over all, the best k divided by their sum. w1 gate, w2 down, w3 up.
- qwen2_moe, qwen3_moe, qwen3_next: the same, divided by the sum only with norm_topk_prob. Layer i
  is dense if it is in mlp_only_layers or (i + 1) % decoder_sparse_step != 0. qwen2_moe,
  qwen3_next: + sigmoid(shared_expert_gate(x)) * shared_expert(x).
- granitemoe, gpt_oss: the best k logits, then softmax over these. granitemoe: input_linear [X,
  2F, E] rows are gate, up.
- gpt_oss: router with bias; gate_up_proj [X, E, 2F] (x @ w + bias) columns alternate gate, up;
  gate = min(gate, limit), up = clip(up, -limit, limit), out = (up + 1) * gate * sigmoid(1.702
  gate); down_proj [X, F, E] with bias. Each head's sink is one more score, after the scaling,
  that takes its share of the softmax and brings no value. Layers 0, 2, 4 .. have the window.
  Biases on q, k, v, o. yarn with truncate false; theta 150000 by default; 5.x adds swiglu_alpha
  as a key.
- deepseek_v2, deepseek_v3: q_b(norm(q_a(x))) or q_proj; per head [nope, rope]. kv_a_proj_with_mqa
  gives [latent, rope key]; kv_b(norm(latent)) gives per head [nope key, value]. The norms of the
  latents have eps 1e-6 whatever rms_norm_eps is. Scores times (nope + rope)^-0.5 * m^2 where
  scaling has mscale_all_dim, m = 0.1 mscale_all_dim ln(factor) + 1, on top of yarn's factor on
  cos and sin (m(mscale) / m(mscale_all_dim)). Rotation of neighbours (deepseek_v3: unless
  rope_interleave is false). Layers before first_k_dense_replace are dense; shared width
  moe_intermediate_size * n_shared_experts. v2: softmax in float32 over all, group_limited_greedy
  keeps the topk_group groups with the largest single score, others count 0; weights times
  routed_scaling_factor, never divided by their sum (norm_topk_prob is not read). v3, glm4_moe:
  sigmoid in float32; scores + bias (e_score_correction_bias, float32) choose: groups by the sum
  of their two best, other groups -inf; the weights are the scores without the bias, divided by
  sum + 1e-20 with norm_topk_prob, times routed_scaling_factor. Layers from num_hidden_layers on
  (multi-token prediction) are not read.
- glm4_moe: attention as qwen3 with use_qk_norm, halves, the first half of D; o has no bias.
- dots1: attention as qwen3, experts as deepseek_v3; layers i >= max_window_layers have the window.
- ernie4_5_moe: attention as ernie4_5; softmax in float32, + moe_statics.e_score_correction_bias
  ([1, X]) chooses, weights without it divided by max(sum, moe_norm_min); layer i has experts if
  (i + 1) % moe_layer_interval == 0 and it is from moe_layer_start_index to moe_layer_end_index (-1:
  the last); use_bias puts none on experts, but one on the head.
- glm4_moe_lite: deepseek_v3 in all, but mlp_layer_types says which layers are dense (by default the
  first); first_k_dense_replace is not read.
- youtu: attention as deepseek_v3, all layers dense. minicpm3: attention as deepseek_v2 but with
  halves, all layers dense; embedding times scale_emb, x + scale_depth / sqrt(layers) * f, last
  hidden states times dim_model_base / hidden_size; a null is a factor of 1. v_head_dim is
  hidden_size / H where there is none. Both are tied unless the config says not.

States:

- mamba2: in_proj rows are z [I], x [I], B [G N], C [G N], dt [heads], I = expand * hidden_size;
  the convolution (causal, conv_kernel taps, bias with use_conv_bias) and silu go over x, B, C
  together; dt = clip(softplus(dt + dt_bias), time_step_limit); h = exp(-exp(A_log) dt) h + dt x
  B^T, y = h C + D x; head h reads group h // (heads / G). Then RMS norm(y * silu(z)), gate before
  norm, over each of the G groups of I by itself. One norm per layer, no MLP, no rope; norm_f,
  `backbone.` names. transformers does not clip dt in a step of one token. The state is float32.
- lfm2: in_proj rows are B, C, x: out_proj(C * conv(B * x)), no activation; biases with conv_bias
  (in_proj, conv, out_proj). q_layernorm and k_layernorm per head; out_proj, not o_proj; w1 gate,
  w3 up, w2 down of width block_ff_dim (over intermediate_size), with block_auto_adjust_ff_dim
  int(multiplier * int(2 w / 3)) rounded up to block_multiple_of. Which layers attend:
  layer_types, or full_attn_idxs, or all. The last norm is embedding_norm, the eps norm_eps; tied.
- qwen3_next, qwen3_5: norms multiply by 1 + weight, but linear_attn.norm by weight. Attention:
  q_proj rows are per head [q, gate] (2 D each head), attn * sigmoid(gate) before o_proj; q and k
  norms per head; the first D * partial_rotary_factor (0.25 by default) rotate. Linear layers:
  qwen3_next's in_proj_qkvz rows are per key head q, k, v, z (its value heads together),
  in_proj_ba per key head b, a; qwen3_5 has in_proj_qkv (all q, all k, all v), in_proj_z,
  in_proj_b, in_proj_a. Convolution without bias and silu over q, k, v together; q and k divided
  by sqrt(sum x^2 + 1e-6) in float32, then q times Dk^-0.5; a key head serves Hv / Hk consecutive
  value heads; beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias); S = exp(g) S; S += k
  (beta (v - S^T k))^T; o = S^T q. Then RMS norm(o) * weight * silu(z), norm before gate, per
  value head. Layer i attends if (i + 1) % full_attention_interval == 0 (4), unless layer_types
  says. qwen3_5 is the text part of a model for images: config in text_config, names below
  model.language_model., head lm_head. qwen3_5_moe: experts in every layer, routed as in
  qwen3_next with norm_topk_prob, stored stacked: gate_up_proj [X, 2F, E] rows gate, up; down_proj
  [X, E, F].
"""

from __future__ import annotations

from family_dense import DENSE
from family_experts import EXPERTS
from family_hybrid import HYBRID
from family_latent import LATENT
from family_layernorm import LAYERNORM
from family_recurrent import RECURRENT
from family_relatives import RELATIVES
from family_weights import Case

CASES: dict[str, Case] = {
    **DENSE,
    **LAYERNORM,
    **EXPERTS,
    **LATENT,
    **RECURRENT,
    **HYBRID,
    **RELATIVES,
}
