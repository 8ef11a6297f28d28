"""GPT-2 and GPT-NeoX beside the checklist: names in files, configs, and mlx-lm's module."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import converters
from funcrt.errors import CacheError, ConfigError, ParamsError
from funcrt.models import read_config
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

GPT2, NEOX = config_of("gpt2"), config_of("gpt_neox")


# --- files ----------------------------------------------------------------------------------------


def test_gpt2_files_with_a_prefix_a_head_and_masks(tmp_path: Path) -> None:
    """As transformers saves a GPT-2 today, and as old versions saved its buffers."""
    params = draw_params(GPT2)
    saved = {f"transformer.{name}": array for name, array in params.items()}
    saved["lm_head.weight"] = params["wte.weight"]
    for layer in range(2):
        saved[f"transformer.h.{layer}.attn.bias"] = mx.ones((1, 1, 544, 544))
        saved[f"transformer.h.{layer}.attn.masked_bias"] = mx.array(-1e4)
    model = converters.load(write_folder(tmp_path, GPT2, saved))
    assert list(model.params) == list(params)


@pytest.mark.parametrize(("config", "head"), [(GPT2, "lm_head"), (NEOX, "embed_out")])
def test_a_tied_head_that_differs_is_refused(
    tmp_path: Path, config: dict[str, Any], head: str
) -> None:
    config = {**config, "tie_word_embeddings": True}
    params = draw_params(config) | {f"{head}.weight": mx.zeros((96, 32))}
    with pytest.raises(ParamsError, match=rf"{head}\.weight differs from .*\.weight"):
        converters.load(write_folder(tmp_path, config, params))


def test_gpt_neox_buffers_are_left_out(tmp_path: Path) -> None:
    params, name = draw_params(NEOX), "gpt_neox.layers.1.attention"
    buffers = {
        f"{name}.bias": mx.ones((1, 1, 8, 8)),
        f"{name}.masked_bias": mx.array(-1e9),
        f"{name}.rotary_emb.inv_freq": mx.ones((2,)),
    }
    model = converters.load(write_folder(tmp_path, NEOX, params | buffers))
    assert list(model.params) == list(params)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    config = {**GPT2, "tie_word_embeddings": False}
    params = draw_params(config)
    assert params["lm_head.weight"].shape == (96, 32)
    model = converters.load(write_folder(tmp_path, config, params), dtype="float32")
    tied = {name: array for name, array in params.items() if name != "lm_head.weight"}
    other = converters.load(write_folder(tmp_path, GPT2, tied), dtype="float32")
    found, theirs = (run_plain(one, some_tokens()) for one in (model, other))
    assert mx.abs(found - theirs).max().item() > 0.1


def test_a_matrix_stored_the_other_way_is_refused(tmp_path: Path) -> None:
    params = draw_params(GPT2)
    params["h.0.mlp.c_fc.weight"] = mx.contiguous(params["h.0.mlp.c_fc.weight"].T)
    with pytest.raises(ParamsError, match=r"c_fc\.weight: expected shape \(32, 128\)"):
        converters.load(write_folder(tmp_path, GPT2, params))


# --- configs --------------------------------------------------------------------------------------


def test_what_a_config_leaves_out_is_filled_in_as_transformers_does() -> None:
    assert_filled_in("gpt2")
    assert_filled_in("gpt_neox", hidden_size=512)


def test_gpt2_may_have_another_width_inside() -> None:
    assert read_config(GPT2).intermediate_size == 128
    assert read_config({**GPT2, "n_inner": 48}).intermediate_size == 48


def test_gpt2_under_the_names_of_other_families() -> None:
    config = {key: value for key, value in GPT2.items() if not key.startswith("n_")}
    other = {
        "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
        "max_position_embeddings": 544,
    }  # fmt: skip
    assert read_config({**config, **other}) == read_config(GPT2)
    assert read_config({**GPT2, **other}) == read_config(GPT2)


def test_keys_of_published_gpts_that_mean_nothing() -> None:
    gpt2 = {
        "_num_labels": 1, "n_special": 0, "output_past": True, "predict_special_tokens": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "gradient_checkpointing": False, "reorder_and_upcast_attn": True,
    }  # fmt: skip
    assert read_config({**GPT2, **gpt2}) == read_config(GPT2)
    neox = {
        "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "classifier_dropout": 0.1,
        "custom_pipelines": {"text-generation": {"impl": "a.py"}}, "is_decoder": True,
    }  # fmt: skip
    assert read_config({**NEOX, **neox}) == read_config(NEOX)


@pytest.mark.parametrize(
    "spelled",
    [
        {"rotary_pct": 0.5, "rotary_emb_base": 20000},
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 20000.0}},
        {"rope_parameters": {"partial_rotary_factor": 0.5}, "rotary_emb_base": 20000},
    ],
)
def test_gpt_neox_ropes_in_either_spelling(spelled: dict[str, Any]) -> None:
    config = {key: value for key, value in NEOX.items() if not key.startswith("rotary")}
    rope = read_config({**config, **spelled}).rope
    assert (rope.theta, rope.partial) == (20000.0, 0.5)


def test_gpt_neox_turns_a_quarter_of_larger_heads() -> None:
    config = {key: value for key, value in NEOX.items() if not key.startswith("rotary")}
    rope = read_config({**config, "num_attention_heads": 2}).rope
    assert (rope.theta, rope.partial) == (10000.0, 0.25)


@pytest.mark.parametrize(
    "config",
    [
        GPT2,
        {**GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 48},
        NEOX,
        {**NEOX, "rotary_pct": 1.0, "use_parallel_residual": False},
        {**NEOX, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_a_written_config_reads_the_same(config: dict[str, Any]) -> None:
    read = read_config(config)
    assert read_config(read.to_hf()) == read
    assert type(read).from_dict(read.to_dict()) == read
    assert read.to_hf()["architectures"] == config["architectures"]


def test_fast_gelu_is_the_tanh_form() -> None:
    """As GPT-NeoX-20B was published."""
    with Case("gpt_neox") as case:
        fast, new = (
            run_plain(case.load({**NEOX, "hidden_act": act}), some_tokens())
            for act in ("gelu_fast", "gelu_new")
        )
    assert mx.array_equal(fast, new)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (GPT2, {"activation_function": "swish2"}, "'swish2' is not supported; known: silu"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        (GPT2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        (GPT2, {"rope_theta": 10000.0}, "rope_theta"),
        (GPT2, {"n_head": 5}, r"n_embd \(32\) is not a multiple of n_head \(5\)"),
        (GPT2, {"n_head": 0}, "wrong type|positive"),
        (GPT2, {"n_embd": None}, "no 'n_embd'"),
        (GPT2, {"n_positions": 0}, "max_positions: expected a positive"),
        (GPT2, {"n_layer": "2"}, "n_layer: expected a whole number"),
        (GPT2, {"hidden_size": 64}, "n_embd=32 and hidden_size=64; keep one"),
        (GPT2, {"n_inner": "48"}, "n_inner: expected a whole number"),
        (GPT2, {"num_key_value_heads": 3}, "must be a multiple"),
        (GPT2, {"attention_bias": False}, "attention_bias=False is not supported"),
        (GPT2, {"sliding_window": 8}, "sliding_window=8 is not supported"),
        (NEOX, {"rotary_pct": 0.4}, "must be even .* of which 3 turn"),
        (NEOX, {"rotary_pct": 1.5}, "partial_rotary_factor: expected above 0 and at most 1"),
        (NEOX, {"rotary_emb_base": "10000"}, "wrong type|finite number"),
        (NEOX, {"rope_theta": 10000.0}, "rope_theta=10000.0 is not supported"),
        (NEOX, {"rope_parameters": {"rope_theta": 10.0}}, "keep the one"),
        (NEOX, {"layer_norm_eps": 0.0}, "layer_norm_eps: expected above 0"),
    ],
)
def test_what_cannot_be_computed_is_named(
    config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({**config, **changes})


# --- positions that end ---------------------------------------------------------------------------


def test_a_capacity_beyond_the_positions_is_refused() -> None:
    with Case("gpt2") as case:
        state = case.model.init_cache(1, 546)
        mask = mx.ones((1, 1, 1, 546), dtype=mx.bool_)
        with pytest.raises(CacheError, match="544 positions, so its capacity is at most 545"):
            case.model.forward(case.model.params, mx.array([[1]], dtype=mx.int32), mask, state)


def test_defaults_end_where_the_positions_do() -> None:
    with Case("gpt2") as case:
        model = case.model
        assert model.default_plan.capacity == (256, 512, 545)
        assert [model.choose_size(1, count)[1] for count in (200, 500, 544)] == [256, 512, 545]
        assert model.choose_size(1, 545)[1] == 546  # refused by name, where it is used
        logits, state = model(mx.array([case.prompt]))
        assert logits.shape == (1, 540, 96)
        assert state["lengths"].tolist() == [540]


# --- mlx-lm's module, on what it can do -----------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="compares with mlx-lm")
@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_neox_as_mlx_lm_has_it(tmp_path: Path, parallel: bool) -> None:
    """Its module has MLPs of four times the width, and one activation."""
    config = {**NEOX, "intermediate_size": 128, "hidden_act": "gelu_new"}
    config["use_parallel_residual"] = parallel
    folder = write_folder(tmp_path, config, draw_params(config))
    assert_as_mlx_lm(converters.load(folder, dtype="float32"), folder)
