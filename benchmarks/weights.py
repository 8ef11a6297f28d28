"""The models that are measured: SmolLM2 in the forms that subjects read, and random ones by shape.

A *source* names one: a folder, or `SHAPE:FORM` for random weights, which every process draws alike
on its own device, so that gigabytes of them never touch a disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcrt.model import Model
    from funcrt.params import Params

Config = dict[str, Any]

_LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 128256,
    "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_ROPE = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_SMALL = {"vocab_size": 8192, "max_position_embeddings": 8192, "rope_theta": 1e6,
          "tie_word_embeddings": True}  # fmt: skip

SHAPES: Mapping[str, Config] = {
    # Llama 3.2 1B and Llama 3.1 8B.
    "llama-1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "tie_word_embeddings": True, "rope_scaling": {**_ROPE, "factor": 32.0},
    },
    "llama-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False, "rope_scaling": {**_ROPE, "factor": 8.0},
    },
    # For trying every command on a CPU: nothing measured with it means anything.
    "llama-tiny": {
        **_LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    # Sixteen experts, two of them for each token.
    "moe": {
        **_SMALL, "model_type": "qwen3_moe", "hidden_size": 512, "intermediate_size": 1024,
        "moe_intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
        "hidden_act": "silu", "rms_norm_eps": 1e-5,
    },
    # Short convolutions, and full attention in every third layer.
    "hybrid": {
        **_SMALL, "model_type": "lfm2", "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 2,
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False, "block_dim": 512, "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "layer_types": ["conv", "conv", "full_attention"] * 3,
    },
}  # fmt: skip
GROUP_SIZE, BITS = 64, 4


def read_config(source: str) -> Config:
    """The config.json of a source."""
    if Path(source).is_dir():
        config: Config = json.loads((Path(source) / "config.json").read_text("utf-8"))
        return config
    return dict(SHAPES[source.split(":")[0]])


def draw(config: Mapping[str, Any], form: str) -> Params:
    """Random weights under Hugging Face names.

    Args:
        config: a config.json.
        form: a dtype, or "4bit": every matrix packed in groups of 64, scales in bfloat16.
    """
    from funcrt import models

    import mlx.core as mx

    dtype = mx.bfloat16 if form == "4bit" else getattr(mx, form)
    params: Params = {}
    spec = models.FAMILIES[config["model_type"]].param_spec(models.read_config(config))
    for i, (name, shape) in enumerate(spec.items()):
        if len(shape) == 1:
            params[name] = mx.ones(shape, dtype)
        else:
            scale = shape[-1] ** -0.5
            params[name] = mx.random.normal(shape, dtype, scale=scale, key=mx.random.key(i))
        if form == "4bit" and len(shape) == 2:
            base = name.removesuffix(".weight")
            parts = mx.quantize(params.pop(name), group_size=GROUP_SIZE, bits=BITS)
            params |= zip(
                (f"{base}.{p}" for p in ("weight", "scales", "biases")), parts, strict=True
            )
        mx.eval(params)  # one by one, so that nothing but the weights piles up
    return params


def make_model(source: str) -> Model:
    """A source as a `funcrt.Model` that decodes for ever: without a tokenizer or end tokens."""
    import funcrt
    from funcrt import models
    from funcrt.params import choose_dtype

    if Path(source).is_dir():
        model = funcrt.load_model(source)
        return funcrt.Model(replace(model.config, eos_token_ids=()), model.params)
    shape, form = source.split(":")
    params = draw(SHAPES[shape], form)
    return funcrt.Model(models.read_config(SHAPES[shape], choose_dtype(params)), params)


def make_mlx_lm(source: str, dtype: str = "") -> Any:
    """A source as mlx-lm's module, its floating weights cast to `dtype` ("" keeps them)."""
    import funcrt  # noqa: F401 (before mlx: it has to choose the BLAS, or to be told not to)

    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_map
    from mlx_lm.utils import _get_classes, load_model

    if Path(source).is_dir():
        model, _ = load_model(Path(source))
    else:
        config = read_config(source)
        params = draw(config, source.split(":")[1])
        make, arguments = _get_classes(config)
        model = make(arguments.from_dict(config))
        params = model.sanitize(params) if hasattr(model, "sanitize") else params
        packed = {name.removesuffix(".scales") for name in params if name.endswith(".scales")}
        nn.quantize(model, GROUP_SIZE, BITS, class_predicate=lambda path, _: path in packed)
        model.load_weights(list(params.items()))
    if dtype:
        kind = getattr(mx, dtype)

        def cast(array: mx.array) -> mx.array:
            return array.astype(kind) if mx.issubdtype(array.dtype, mx.floating) else array

        model.update(tree_map(cast, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def make_smollm2(
    scratch: Path, plan: Mapping[str, Sequence[int]] | None = None
) -> tuple[dict[str, Path], list[int]]:
    """SmolLM2 in the forms that subjects read, and the ids of `benchmarks.prompts.TEXT`.

    Returns:
        Folders "packed" (4 bits, as published) and "dense" (the same weights in float32), and with
        a plan a bundle "bundle". None has end tokens or a tokenizer, so every request gets
        all the tokens that it asks for.
    """
    import converters
    import funcrt
    from benchmarks.prompts import TEXT
    from converters import smollm2

    folders = {name: scratch / name for name in ("packed", "dense")}
    full = converters.load(smollm2.fetch())
    assert full.tokenizer is not None
    packed = funcrt.Model(replace(full.config, eos_token_ids=()), full.params)
    packed.save(folders["packed"])
    dense = packed.in_float32()
    dense.save(folders["dense"])
    if plan is not None:
        folders["bundle"] = scratch / "bundle.funcrt"
        funcrt.export(packed, folders["bundle"], funcrt.BucketPlan(**plan))
    return folders, list(full.tokenizer.encode(TEXT))


def read_bytes(config: Mapping[str, Any], arrays: Mapping[str, int]) -> int:
    """Bytes of weights that a decode step of one row reads.

    That is all of them, but of a table of embeddings that is not also the output matrix one row,
    and of experts those that are chosen.

    Args:
        config: a config.json.
        arrays: name -> bytes.
    """
    tied = not any("lm_head" in name for name in arrays)
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    share = (config.get("num_experts_per_tok") or 1) / experts if experts > 1 else 1.0
    total = 0.0
    for name, size in arrays.items():
        if "embed_tokens" in name and not tied:
            continue
        total += size * (share if "experts." in name or "switch_mlp." in name else 1.0)
    return int(total)


def cache_bytes(config: Mapping[str, Any], item: int) -> int:
    """Bytes of keys and values of one token, for `item` bytes a number."""
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    return 2 * sum("attention" in kind for kind in types) * int(heads) * int(width) * item
