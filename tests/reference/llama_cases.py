"""The tiny llama checkpoints of `make_llama.py`: shapes, and a config.json for each case.

What transformers does with the rope settings of a llama config, for whoever must match it (D is
the head size, f_i = theta^(-2i/D) for i < D/2):

- Spelling: a non-empty `rope_scaling` replaces `rope_parameters` altogether. `rope_type` wins over
  `type`. `rope_theta` inside the dict wins over the one at the top; absent everywhere it is 10000.
- The angles are float32 products of position and float32 frequency; cos and sin are both multiplied
  by the attention factor, so scores grow by its square. Only yarn has a factor other than 1.
- linear: f_i / factor.
- dynamic: theta becomes theta * (factor * L / M - (factor - 1))^(D / (D - 2)) with M =
  max_position_embeddings and L = max(last position + 1, M), so every position of a prompt turns at
  the frequencies of the prompt's length. Fed through a cache in pieces, each piece turns at the
  length reached with it and cached keys stay as they were: other logits, in this kind alone.
  `original_max_position_embeddings` is not read.
- llama3: wavelength w_i = 2 pi / f_i. w_i > original / low_freq_factor divides f_i by factor,
  w_i < original / high_freq_factor keeps it; between, the two are mixed with weight
  (original / w_i - low) / (high - low) on the unscaled one.
- yarn: d(r) = D ln(original / (2 pi r)) / (2 ln theta); low = d(beta_fast), high = d(beta_slow),
  by default 32 and 1, a stored 0 or null too; floor and ceil unless `truncate` is false; then
  low >= 0 and high <= D - 1 (not D/2 - 1), and 0.001 is added to high where they are equal. The
  ramp clip((i - low) / (high - low), 0, 1) is the weight of f_i / factor, the rest keeps f_i.
  Attention factor: as given; else, when mscale and mscale_all_dim are both non-zero,
  m(mscale) / m(mscale_all_dim); else m(1); m(k) = 0.1 k ln(factor) + 1, or 1 where factor <= 1.
- llama3 and yarn: `original_max_position_embeddings` at the top of the config wins over the one in
  the dict; absent in both, it is max_position_embeddings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

VOCAB, WIDTH, MLP_WIDTH = 96, 32, 48


class Weights(NamedTuple):
    """Shapes and storage of one checkpoint."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    seed: int


WEIGHTS = {
    "mha": Weights(4, 4, 8, 2, False, False, False, "float32", 4),
    "gqa": Weights(4, 2, 16, 2, True, False, False, "bfloat16", 4),
    "mqa": Weights(4, 1, 24, 3, False, False, True, "float16", 4),
    "bias": Weights(4, 2, 8, 2, True, True, True, "float32", 5),
}

# What transformers 5 writes beside the shapes, and what older versions wrote.
NEW_EXTRAS = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "transformers_version": "5.24.0",
    "use_cache": True,
}
OLD_EXTRAS = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
}


def old(theta: float, scaling: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
    """The spelling before transformers 5: rope_theta and rope_scaling."""
    return {**OLD_EXTRAS, "rope_theta": theta, "rope_scaling": scaling, **rest}


def new(
    theta: float, kind: str = "default", *, top: dict[str, Any] | None = None, **rest: Any
) -> dict[str, Any]:
    """The spelling of transformers 5: everything about rope in rope_parameters."""
    rope = {"rope_theta": theta, "rope_type": kind, **rest}
    return {**NEW_EXTRAS, "rope_parameters": rope, **(top or {})}


def yarn(**rest: Any) -> dict[str, Any]:
    """Yarn scaling; some checkpoints name the kind twice or leave the original length out."""
    return {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, **rest}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# name: (weights, what its config.json holds besides the shapes)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("mha", old(500000.0, rms_norm_eps=0.01)),
    "mha-gelu": ("mha", old(500000.0, hidden_act="gelu")),
    "mha-gelu-tanh": ("mha", new(500000.0, top={"hidden_act": "gelu_pytorch_tanh"})),
    "gqa": ("gqa", new(50000.0)),
    "mqa": ("mqa", old(1000000.0)),
    "bias": ("bias", new(1000000.0)),
    "linear-type": ("gqa", old(50000.0, {"type": "linear", "factor": 4.0})),
    "linear-new": ("mqa", new(50000.0, "linear", factor=2.5)),
    "dynamic-type": (
        "gqa",
        old(50000.0, {"type": "dynamic", "factor": 4.0}, max_position_embeddings=128),
    ),
    "dynamic-new": (
        "mha",
        new(20000.0, "dynamic", factor=2.0, top={"max_position_embeddings": 256}),
    ),
    "llama3-old": (
        "gqa",
        old(
            500000.0,
            {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 256},
        ),
    ),
    "llama3-new": (
        "mqa",
        new(
            100000.0,
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=6.0,
            original_max_position_embeddings=192,
        ),
    ),
    "yarn-old": ("gqa", old(50000.0, yarn())),
    "yarn-new": ("mqa", new(50000.0, "yarn", factor=6.0, original_max_position_embeddings=200)),
    "yarn-attention-factor": ("gqa", old(50000.0, yarn(attention_factor=0.95))),
    "yarn-betas": ("gqa", new(50000.0, "yarn", **yarn(beta_fast=4.0, beta_slow=0.125))),
    "yarn-mscale": ("gqa", old(50000.0, yarn(type="yarn", mscale=1.4, mscale_all_dim=0.5))),
    "yarn-no-truncate": ("gqa", new(50000.0, "yarn", **yarn(truncate=False))),
    "yarn-original-from-max": (
        "gqa",
        old(50000.0, {"type": "yarn", "factor": 4.0}, max_position_embeddings=192),
    ),
    "yarn-original-at-top": (
        "gqa",
        old(50000.0, yarn(), original_max_position_embeddings=640),
    ),
}


def make_config(name: str) -> dict[str, Any]:
    """config.json of one case; keys that old checkpoints leave out are left out of mha."""
    weights_name, rest = CASES[name]
    shape = WEIGHTS[weights_name]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        **rest,
    }
    if name == "mha":
        for key in ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"):
            del config[key]
    return config
