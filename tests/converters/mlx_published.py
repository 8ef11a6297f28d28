"""Checkpoints as mlx-lm publishes them, made by mlx-lm's own functions from the golden cases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from funcrt.params import Params
from funcrt.storage import load_arrays, load_json
from tests.converters import shipped
from tests.families.cases import replace_keys
from tests.families.mlx_lm_changes import CHANGES
from tests.random_families import draw_params, write_folder
from tests.reference import golden

import mlx.core as mx

Predicate = Callable[[str, Any], bool | dict[str, Any]]


def source_of(case: str, folder: Path) -> Path:
    """A folder that mlx-lm's module reads as it is meant: the golden case, changed if need be."""
    golden_folder = golden.family_folder(case)
    if case == "gpt_oss":  # of yarns and gates, mlx-lm knows those of the published models only
        rope = {**load_json(golden_folder / "config.json")["rope_scaling"], "truncate": True}
        shipped.ship_gpt_oss(golden_folder, folder, swiglu_limit=7.0, rope_scaling=rope)
        return folder
    if case == "deepseek_v3":
        # There an expert outside of the best groups, whose score counts as 0, wins over negative
        # ones; transformers never takes it.
        arrays = load_arrays(golden_folder / "model.safetensors")
        bias = next(name for name in arrays if name.endswith("e_score_correction_bias"))
        arrays[bias] = arrays[bias] + 2
        return write_folder(_made(folder), load_json(golden_folder / "config.json"), arrays)
    if case not in CHANGES:
        return golden_folder
    config = load_json(golden_folder / "config.json")
    if case == "gemma3_text":  # its change leaves rows shorter than a group
        config = {**config, "hidden_size": 64}
        return write_folder(_made(folder), config, draw_params(config))
    arrays = load_arrays(golden_folder / "model.safetensors")
    for change in CHANGES[case]:
        config, arrays = replace_keys(config, change.config), change.weights(arrays)
    return write_folder(_made(folder), config, arrays)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def make(
    case: str,
    source: Path,
    folder: Path,
    *,
    packing: Mapping[str, Any] | None = None,
    predicate: Predicate | str | None = None,
) -> Any:
    """Write what `mlx_lm.convert` does, but for the tokenizer, which these cases have none of.

    Args:
        case: a golden case.
        source: what to read, see `source_of`.
        folder: where to.
        packing: bits, group_size and mode; None keeps the weights dense.
        predicate: which layers are packed, and how, or a recipe's name, as mlx-lm takes it.

    Returns:
        mlx-lm's module, packed: what is published are its arrays.
    """
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    original = load_json(source / "config.json")
    with contextlib.redirect_stdout(None):
        module, config = load_model(source, lazy=True, model_config=patch_of(original))
        if packing is not None:
            if isinstance(predicate, str):
                predicate = mixed_quant_predicate_builder(predicate, module, packing["group_size"])
            module, config = quantize_model(
                module, config, packing["group_size"], packing["bits"],
                mode=packing.get("mode", "affine"), quant_predicate=predicate,
            )  # fmt: skip
    save_model(folder, module)
    added = {key: config[key] for key in ("quantization", "quantization_config") if key in config}
    save_config({**original, **added}, config_path=folder / "config.json")
    return module


def patch_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What mlx-lm's module needs beside what transformers writes."""
    text = config.get("text_config")
    if text is None:
        return {}
    more: dict[str, Any] = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    if config["model_type"] == "qwen3_5":
        more["full_attention_interval"] = text["layer_types"].index("full_attention") + 1
    if "_vl" in config["model_type"]:
        more |= {"rope_theta": text["rope_parameters"]["rope_theta"], "norm_topk_prob": True}
        more["num_experts"] = text.get("num_local_experts", 0)
    return {"vocab_size": text["vocab_size"], "text_config": {**text, **more}}


def expanded(module: Any) -> Params:
    """The module's tensors with every packed matrix as float32."""
    from mlx.utils import tree_flatten

    params: Params = dict(tree_flatten(module.parameters()))
    for name, part in module.named_modules():
        if not hasattr(part, "bits"):
            continue
        scales, biases = params.pop(f"{name}.scales"), params.pop(f"{name}.biases", None)
        if biases is not None:  # MLX computes in their dtype
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        params[f"{name}.weight"] = mx.dequantize(
            part.weight, scales, biases, group_size=part.group_size, bits=part.bits, mode=part.mode,
            dtype=mx.float32,
        )  # fmt: skip
    return params
