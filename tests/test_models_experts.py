"""Families with experts beside the checklist: configs, files, and what mlx-lm's modules can do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import converters
from converters.functional.doctor import diagnose
from funcrt import layers, ops
from funcrt.errors import ConfigError, ParamsError
from funcrt.model import Model
from funcrt.models import read_config
from funcrt.params import Params
from tests.families.cases import Case, config_of, run_plain
from tests.random_families import (
    assert_as_mlx_lm,
    assert_filled_in,
    draw_params,
    some_tokens,
    write_folder,
)

import mlx.core as mx
import pytest

TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe")
MIXTRAL, QWEN2, QWEN3, GPT_OSS, GRANITE = map(config_of, TYPES)
needs_mlx_lm = pytest.mark.skipif(
    importlib.util.find_spec("mlx_lm") is None, reason="compares with mlx-lm"
)


# --- mlx-lm's modules, on what they can do --------------------------------------------------------


@needs_mlx_lm
def test_qwen2_moe_with_experts_in_every_layer_is_mlx_lms(tmp_path: Path) -> None:
    config = {**QWEN2, "mlp_only_layers": []}
    folder = write_folder(tmp_path, config, draw_params(config))
    assert_as_mlx_lm(converters.load(folder, dtype="float32"), folder)


@needs_mlx_lm
def test_gpt_oss_as_mlx_lm_has_it(tmp_path: Path) -> None:
    """Its module splits a dense `gate_up_proj` along the inputs, which come first in it.

    It knows one limit, and rounds where yarn's ramp begins and ends.
    """
    scaling = {**GPT_OSS["rope_scaling"], "truncate": True}
    with Case("gpt_oss") as case:
        ours = case.load({**case.hf, "swiglu_limit": 7.0, "rope_scaling": scaling})
        config = {**case.hf, "rope_scaling": scaling}
    theirs = Params()
    for name, array in ours.params.items():
        if ".experts." not in name:
            theirs[name] = array
            continue
        base = name.removesuffix("_bias")
        part = "weight" if base == name else "bias"
        turned = array.swapaxes(1, 2) if base == name else array
        if base.endswith("gate_up_proj"):
            for i, half in enumerate(("gate_proj", "up_proj")):
                theirs[f"{base.replace('gate_up_proj', half)}.{part}"] = turned[:, i::2]
        else:
            theirs[f"{base}.{part}"] = turned
    assert_as_mlx_lm(ours, write_folder(tmp_path, config, theirs))


def test_sorting_is_decided_by_how_many_experts_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    totals = set[int]()

    def dispatch(x: mx.array, **inputs: Any) -> mx.array:
        totals.add(inputs["total"])
        return ops.experts.dispatch(x, **inputs)

    monkeypatch.setattr(layers.moe, "dispatch", dispatch)
    for config in (MIXTRAL, QWEN3, GPT_OSS):
        run_plain(Model(read_config(config), draw_params(config)), some_tokens(4))
    assert totals == {6}


def test_doctor_knows_that_16_bits_are_computed_on_a_cpu(tmp_path: Path) -> None:
    for config in (MIXTRAL, GPT_OSS):
        folder = write_folder(tmp_path, {**config, "torch_dtype": "bfloat16"}, Params())
        assert diagnose(folder).notes == ()


# --- configs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
def test_what_a_config_leaves_out_is_filled_in_as_transformers_does(model_type: str) -> None:
    assert_filled_in(model_type)


def test_transformers_5_spells_the_experts_of_qwen3_otherwise() -> None:
    config = {key: value for key, value in QWEN3.items() if key != "num_experts"}
    assert read_config({**config, "num_local_experts": 6}) == read_config(QWEN3)
    assert read_config(config).num_experts == 128


def test_keys_of_published_models_that_mean_nothing() -> None:
    coder = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert read_config({**QWEN3, **coder}) == read_config(QWEN3)
    noise = {"router_jitter_noise": 0.1}
    assert read_config({**MIXTRAL, **noise}) == read_config(MIXTRAL)


@pytest.mark.parametrize(
    ("config", "changes", "windows"),
    [
        (QWEN2, {"use_sliding_window": True, "sliding_window": 8}, [8, None, 8, None]),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            [8, None, None, None],
        ),
        (QWEN2, {"sliding_window": 8}, [None] * 4),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 8}, [8] * 4),
        (QWEN3, {"use_sliding_window": True, "sliding_window": None}, [None] * 4),
        (GPT_OSS, {"layer_types": None}, [24, None, 24, None]),
        (GPT_OSS, {"layer_types": ["full_attention"] * 4}, [None] * 4),
    ],
)
def test_windows(config: dict[str, Any], changes: Any, windows: list[int | None]) -> None:
    changed = {**config, "max_window_layers": 4, **changes, "num_hidden_layers": 4}
    if config is GPT_OSS:
        del changed["max_window_layers"]
    read = read_config(changed)
    assert [read.window(i) for i in range(4)] == windows


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (MIXTRAL, {"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most 6"),
        (MIXTRAL, {"num_local_experts": 0}, "num_experts: expected a positive"),
        (MIXTRAL, {"num_local_experts": 8.5}, "num_local_experts: expected a whole number"),
        (MIXTRAL, {"num_local_experts": None}, "no 'num_local_experts'"),
        (MIXTRAL, {"hidden_act": "relu6"}, "'relu6' is not supported; known: silu"),
        (MIXTRAL, {"shared_expert_intermediate_size": 8}, "unknown: shared_expert"),
        (MIXTRAL, {"sliding_window": 0}, "sliding_window"),
        (QWEN2, {"mlp_only_layers": 0}, "mlp_only_layers: expected a list"),
        (QWEN2, {"mlp_only_layers": ["0"]}, "mlp_only_layers: expected a whole number"),
        (QWEN2, {"decoder_sparse_step": 0}, "decoder_sparse_step: expected a positive"),
        (QWEN2, {"norm_topk_prob": "yes"}, "norm_topk_prob: expected true or false"),
        (QWEN3, {"scoring_func": "sigmoid"}, "unknown: scoring_func"),
        (QWEN3, {"use_qk_norm": False}, "use_qk_norm=False is not supported"),
        (QWEN3, {"qkv_bias": True}, "qkv_bias=True is not supported"),
        (GRANITE, {"logits_scaling": 0.0}, "logits_scaling: expected other than 0"),
        (GRANITE, {"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most 6"),
        (GPT_OSS, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types: expected 2 entries"),
        (GPT_OSS, {"sliding_window": None}, "no sliding_window"),
        (GPT_OSS, {"swiglu_limit": "7"}, "swiglu_limit: expected a finite number"),
        (
            GPT_OSS,
            {"quantization_config": {"quant_method": "mxfp4"}},
            "'mxfp4' are not supported",
        ),
    ],
)
def test_what_cannot_be_computed_is_named(
    config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({**config, **changes})


@pytest.mark.parametrize(
    "config",
    [
        MIXTRAL,
        {**MIXTRAL, "sliding_window": 8},
        QWEN2,
        {**QWEN2, "use_sliding_window": True, "sliding_window": 8, "qkv_bias": False},
        QWEN3,
        {**QWEN3, "use_sliding_window": True, "sliding_window": 8, "mlp_only_layers": None},
        GPT_OSS,
        {**GPT_OSS, "swiglu_alpha": 1.5, "layer_types": None},
        GRANITE,
    ],
)
def test_a_written_config_reads_the_same(config: dict[str, Any]) -> None:
    read = read_config(config)
    assert read_config(read.to_hf()) == read
    assert type(read).from_dict(read.to_dict()) == read
    assert read.to_hf()["architectures"] == config["architectures"]


def test_gpt_oss_without_scaling_has_that_of_the_published_models() -> None:
    rope = read_config({**GPT_OSS, "rope_scaling": None, "rope_theta": 150000}).rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 32.0, 4096)
    assert (rope.theta, rope.truncate) == (150000.0, False)


# --- files ----------------------------------------------------------------------------------------


def test_a_lost_expert_is_named(tmp_path: Path) -> None:
    params = draw_params(MIXTRAL)
    del params["model.layers.1.block_sparse_moe.experts.4.w3.weight"]
    with pytest.raises(ParamsError, match=r"missing: model\.layers\.1.*experts\.4\.w3\.weight"):
        converters.load(write_folder(tmp_path, MIXTRAL, params))


def test_experts_packed_differently_are_refused_where_they_meet() -> None:
    params = draw_params(MIXTRAL)
    name = "model.layers.0.block_sparse_moe.experts.0.w1"
    parts = mx.quantize(params.pop(f"{name}.weight"), group_size=32, bits=4)
    params |= {
        f"{name}.{part}": array
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True)
    }
    with pytest.raises(ParamsError, match="packed alike"):
        run_plain(Model(read_config(MIXTRAL), params), some_tokens())
