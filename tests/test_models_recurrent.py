"""Families with a state beside the checklist: configs, files, engines, and mlx-lm's modules."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import converters
import funcrt
from funcrt import BucketPlan, Engine
from funcrt.cache import init_cache, kind_of
from funcrt.errors import ConfigError, InputError, ParamsError
from funcrt.model import Model
from funcrt.models import FAMILIES, read_config
from funcrt.params import Params
from tests.commands import run_here
from tests.families.cases import Case, causal, config_of, run_plain
from tests.random_families import assert_as_mlx_lm, draw_params, write_folder
from tests.reference.golden import FAMILIES as FOLDERS
from tests.reference.golden import family_folder
from tests.test_footprint import cpu_only, laid_out, measure

import mlx.core as mx
import numpy as np
import pytest

Config = dict[str, Any]
MAMBA2, LFM2, LFM2_BIAS, LFM2_MOE, NEXT, TEXT, IMAGES, EXPERTS, MOE = (
    config_of(name)
    for name in (
        "mamba2", "lfm2", "lfm2-bias", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5",
        "qwen3_5_moe_text", "qwen3_5_moe",
    )
)  # fmt: skip
ALL = (MAMBA2, LFM2, LFM2_BIAS, LFM2_MOE, NEXT, TEXT, IMAGES, EXPERTS, MOE)
DEFAULTS: dict[str, dict[str, Config]] = json.loads((FOLDERS / "defaults.json").read_text())
needs_mlx_lm = pytest.mark.skipif(
    importlib.util.find_spec("mlx_lm") is None, reason="compares with mlx-lm"
)


def names(configs: tuple[Config, ...]) -> list[str]:
    return [config["model_type"] for config in configs]


def without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


def inside(config: Config, **changes: Any) -> Config:
    """Changes of a config, made in its `text_config` if it has one."""
    if "text_config" not in config:
        return {**config, **changes}
    return {**config, "text_config": {**config["text_config"], **changes}}


# --- mlx-lm's modules, on what they can do --------------------------------------------------------


@needs_mlx_lm
@pytest.mark.parametrize(
    "config",
    [
        # One group, and the eps that its layers have whatever a config says.
        {**MAMBA2, "n_groups": 1, "layer_norm_epsilon": 1e-5, "intermediate_size": 64},
        {**LFM2_BIAS, "block_dim": 32, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0},
        NEXT,
        inside(IMAGES, full_attention_interval=3),
        inside(MOE, full_attention_interval=2),
    ],
    ids=["mamba2", "lfm2", "qwen3_next", "qwen3_5", "qwen3_5_moe"],
)
def test_as_mlx_lm_has_it(config: Config, tmp_path: Path) -> None:
    """With weights in float32, where adding 1 to those of norms rounds nothing away."""
    folder = write_folder(tmp_path, config, draw_params(config))
    assert_as_mlx_lm(converters.load(folder, dtype="float32"), folder)


@needs_mlx_lm
@pytest.mark.parametrize(
    "config", [LFM2, LFM2_MOE, NEXT, IMAGES, MOE], ids=lambda c: c["model_type"]
)
def test_mlx_lm_reads_a_written_config_alike(config: Config, tmp_path: Path) -> None:
    read = read_config(inside(config, full_attention_interval=3) if config is IMAGES else config)
    folder = write_folder(tmp_path, read.to_hf(), draw_params(config))
    assert_as_mlx_lm(converters.load(folder, dtype="float32"), folder)


# --- configs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mamba2", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
)
def test_what_is_left_out_is_what_transformers_fills_in(name: str) -> None:
    given, filled = DEFAULTS[name]["config"], DEFAULTS[name]["filled"]
    if name == "mamba2":  # its default groups do not fit the heads of a tiny one
        given = {**given, "num_heads": 16, "head_dim": 4}
    assert read_config(given) == read_config({**given, **filled})


@pytest.mark.parametrize("config", ALL, ids=names(ALL))
def test_a_written_config_reads_the_same(config: Config) -> None:
    read = read_config(config)
    written = json.loads(json.dumps(read.to_hf()))
    assert read_config(written) == read
    assert type(read).from_dict(json.loads(json.dumps(read.to_dict()))) == read
    assert written["architectures"] == config["architectures"]
    assert replace(read, architectures=()).to_hf()["architectures"] == config["architectures"]


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        ([0.0, float("inf")], (0.0,)),
        ([0.01, {"__float__": "Infinity"}], (0.01,)),
        ([0, 3], (0.0, 3.0)),
        (None, (0.0,)),
    ],
)
def test_steps_without_a_bound(limit: list[Any] | None, kept: tuple[float, ...]) -> None:
    config = read_config({**MAMBA2, "time_step_limit": limit})
    assert config.time_step_limit == kept  # type: ignore[attr-defined]
    assert read_config(config.to_hf()) == config


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 64),  # 2 / 3 of 96
        ({"block_ffn_dim_multiplier": 1.2}, 96),  # 76, up to a multiple of 32
        ({"block_ffn_dim_multiplier": None, "block_ff_dim": 100}, 66),
        ({"block_auto_adjust_ff_dim": False}, 96),
    ],
)
def test_the_width_of_lfm2s_mlp(changes: Config, width: int) -> None:
    spec = FAMILIES["lfm2"].param_spec(read_config({**LFM2, **changes}))
    assert spec["model.layers.0.feed_forward.w1.weight"] == (width, 32)


def test_older_spellings_of_lfm2() -> None:
    newer = {
        **without(LFM2, "block_ff_dim", "full_attn_idxs", "rope_theta"),
        "intermediate_size": 96,
        "layer_types": ["conv", "full_attention", "conv"],
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
    }
    assert read_config(newer) == read_config({**LFM2, "tie_embedding": True})
    assert not read_config({**newer, "tie_embedding": False}).tie_word_embeddings
    every = read_config(without(LFM2, "full_attn_idxs"))
    assert every.layer_types == ("full_attention",) * 3  # type: ignore[attr-defined]


def test_every_fourth_layer_attends_unless_the_config_says() -> None:
    config = {**without(TEXT, "layer_types", "full_attention_interval"), "num_hidden_layers": 8}
    kinds = read_config(config).layer_types  # type: ignore[attr-defined]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7]


BAD: dict[str, tuple[Config, Config, str]] = {
    "no heads' width": (MAMBA2, {"head_dim": 18}, "hidden_size \\* expand"),
    "another width": (MAMBA2, {"intermediate_size": 65}, "intermediate_size"),
    "odd groups": (MAMBA2, {"n_groups": 3}, "num_heads .* multiple of n_groups"),
    "bounds in the wrong order": (MAMBA2, {"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
    "three bounds": (MAMBA2, {"time_step_limit": [0.1, 0.2, 0.3]}, "time_step_limit"),
    "no bounds": (MAMBA2, {"time_step_limit": []}, "time_step_limit"),
    "bounds that are none": (MAMBA2, {"time_step_limit": "auto"}, "time_step_limit"),
    "one tap": (MAMBA2, {"conv_kernel": 1}, "conv_kernel"),
    "no norm": (MAMBA2, {"rms_norm": False}, "rms_norm"),
    "turns": (MAMBA2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    "no state": (MAMBA2, {"state_size": "16"}, "state_size"),
    "a negative eps": (MAMBA2, {"layer_norm_epsilon": 0.0}, "layer_norm_epsilon"),
    "two lists": (LFM2, {"layer_types": ["conv"] * 3}, "full_attn_idxs"),
    "a layer too many": (LFM2, {"full_attn_idxs": [1, 3]}, "full_attn_idxs"),
    "not a list": (LFM2, {"full_attn_idxs": 1}, "wrong type"),
    "another layer": (LFM2_BIAS, {"layer_types": ["conv", "ssm", "conv"]}, "'ssm'.*known: full"),
    "too few layers": (LFM2_BIAS, {"layer_types": ["conv"]}, "expected 3 entries"),
    "no width left": (LFM2, {"block_ffn_dim_multiplier": 0.0}, "block_ffn_dim_multiplier"),
    "another gate": (LFM2, {"block_use_swiglu": False}, "block_use_swiglu"),
    "an activation": (LFM2, {"hidden_act": "gelu"}, "hidden_act"),
    "no bias of the choice": (LFM2_MOE, {"use_expert_bias": False}, "use_expert_bias"),
    "no count of dense layers": (LFM2_MOE, {"num_dense_layers": -1}, "dense_layers"),
    "odd value heads": (NEXT, {"linear_num_value_heads": 3}, "multiple of linear_num_key_heads"),
    "no interval": (NEXT, {"full_attention_interval": 0}, "wrong type"),
    "an odd turn": (NEXT, {"partial_rotary_factor": 0.2}, "head_dim must be even"),
    "too many experts": (NEXT, {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    "a window": (NEXT, {"sliding_window": 24}, "sliding_window"),
    "no gate": (TEXT, {"attn_output_gate": False}, "attn_output_gate"),
    "a narrow state": (TEXT, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    "dense layers": (EXPERTS, {"mlp_only_layers": [0]}, "mlp_only_layers"),
    "another text": (IMAGES, {"text_config": {**TEXT, "model_type": "llama"}}, "model_type"),
    "a head tied outside": (IMAGES, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "no text": (IMAGES, {"text_config": [1]}, "wrong type"),
}


@pytest.mark.parametrize(("config", "changes", "words"), BAD.values(), ids=BAD)
def test_a_config_that_is_refused(config: Config, changes: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({**config, **changes})


@pytest.mark.parametrize("config", ALL, ids=names(ALL))
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_size_is_named(config: Config, key: str) -> None:
    config = without(config, key)
    if "text_config" in config:
        config["text_config"] = without(config["text_config"], key)
    with pytest.raises(ConfigError, match=key):
        read_config(config)


# --- files ----------------------------------------------------------------------------------------


def experts_apart(params: Params) -> Params:
    """Stacks of experts as transformers saves them: one matrix each."""
    apart: Params = {}
    for name, array in params.items():
        experts, _, stack = name.rpartition(".")
        if not experts.endswith(".experts"):
            apart[name] = array
            continue
        parts = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
        for i, rows in enumerate(array):
            for part, matrix in zip(parts, mx.split(rows, len(parts)), strict=True):
                apart[f"{experts}.{i}.{part}.weight"] = matrix
    return apart


def test_experts_saved_one_by_one(tmp_path: Path) -> None:
    with Case("qwen3_5_moe_text") as case:
        model = case.model
        apart = experts_apart(model.params)
    read = converters.load(write_folder(tmp_path, case.hf, apart), dtype="float32")
    assert list(read.params) == list(model.params)
    assert all(mx.array_equal(read.params[name], array) for name, array in model.params.items())
    lost = "model.layers.0.mlp.experts.5.up_proj.weight"
    with pytest.raises(ParamsError, match=r"missing: model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        converters.load(write_folder(tmp_path, case.hf, without(apart, lost)), dtype="float32")


@pytest.mark.parametrize(
    ("name", "embedding"),
    [("mamba2", "backbone.embeddings"), ("qwen3_5", "model.language_model.embed_tokens")],
)
def test_a_tied_head_that_is_stored(name: str, embedding: str, tmp_path: Path) -> None:
    config = inside(config_of(name), tie_word_embeddings=True)
    if "text_config" in config:
        config["tie_word_embeddings"] = True
    params = draw_params(config)
    params["lm_head.weight"] = params[f"{embedding}.weight"]
    model = converters.load(write_folder(tmp_path, config, params), dtype="float32")
    assert "lm_head.weight" not in model.params
    params["lm_head.weight"] = params["lm_head.weight"] + 1
    with pytest.raises(ParamsError, match=embedding.replace(".", r"\.")):
        converters.load(write_folder(tmp_path, config, params), dtype="float32")


# --- states ---------------------------------------------------------------------------------------


def test_states_are_float32_and_convolutions_as_wide_as_what_is_computed() -> None:
    for name in ("mamba2", "lfm2", "qwen3_next"):
        model = converters.load(family_folder(name), dtype="float16")
        kinds = {
            key.rpartition(".")[2]: array.dtype
            for key, array in model.init_cache(1, 4).items()
            if kind_of(key) == "recurrent"
        }
        expected = {"state": mx.float32, "conv": mx.float16}
        assert kinds == {key: expected[key] for key in kinds}


def test_mamba2_adds_up_in_float32_if_its_config_says() -> None:
    with Case("mamba2") as case:
        text, exact = case.tokens(30, 0), run_plain(case.model, case.tokens(30, 0))
        errors = []
        for wide in (True, False):
            model = case.load({**case.hf, "residual_in_fp32": wide}, dtype="bfloat16")
            logits = run_plain(model, text)
            assert logits.dtype == mx.bfloat16
            errors.append(mx.mean(mx.square(logits.astype(mx.float32) - exact)).item())
    assert errors[0] < errors[1]


def test_a_model_without_slots_takes_texts_of_any_capacity() -> None:
    model = converters.load(family_folder("mamba2"), dtype="float32")
    spec = model.cache_spec(funcrt.cache.FULL)
    assert [entry.name for entry in spec if "S" in entry.shape] == ["positions"]
    small, large = (init_cache(spec, 1, capacity) for capacity in (8, 64))
    assert sum(a.nbytes for a in large.values()) - sum(a.nbytes for a in small.values()) == 56 * 4


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3_next"])
def test_positions_and_other_masks_are_refused(name: str) -> None:
    model = converters.load(family_folder(name), dtype="float32")
    state, ids = model.init_cache(1, 8), mx.array([[3, 4, 5]], dtype=mx.int32)
    mask = causal(mx.ones_like(ids), state)
    with pytest.raises(InputError, match="positions"):
        model.forward(model.params, ids, mask, state, mx.array([[0, 1, 1]], dtype=mx.int32))
    blind = mx.array(np.array(mask) & (np.arange(8) != 0))
    with pytest.raises(InputError, match="causal"):
        model.forward(model.params, ids, blind, state)


# --- engines --------------------------------------------------------------------------------------

PLAN = BucketPlan(batch=(1, 2), tokens=(8, 16), capacity=(32, 64))


def greedy(case: Case, prompt: list[int], count: int) -> list[int]:
    """What follows a prompt: uncached, token by token, up to an end of text."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(mx.argmax(run_plain(case.model, tokens)[-1]).item()))
        if tokens[-1] in case.model.config.eos_token_ids:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_moe"])
def test_an_engine_completes_each_prompt_as_alone(name: str) -> None:
    """More prompts than rows, of other lengths, in pieces; caches grow; a text goes on."""
    with Case(name) as case, Engine(case.model, PLAN) as engine:
        prompts = [case.tokens(count, count) for count in (5, 1, 30, 9)]
        completions = engine.generate(prompts, max_tokens=6)
        expected = [greedy(case, prompt, 6) for prompt in prompts]
        assert [completion.tokens for completion in completions] == expected
        longer = [*prompts[2], *expected[2], 5, 6, 7]
        assert engine.generate([longer], max_tokens=4)[0].tokens == greedy(case, longer, 4)
        assert engine.stats.reused_tokens > 30
        assert set(engine.compiled.traces.values()) == {1}


def test_a_bundle_of_a_model_without_slots(tmp_path: Path) -> None:
    with Case("mamba2") as case:
        bundle = tmp_path / "mamba2.funcrt"
        funcrt.export(case.model, bundle, BucketPlan(batch=1, tokens=8, capacity=32))
        assert all(check.measured <= check.allowed for check in funcrt.verify(bundle))
        prompt = case.tokens(11, 3)
        with Engine(funcrt.load_bundle(bundle)) as engine:
            tokens = engine.generate([prompt], max_tokens=5)[0].tokens
        assert tokens == greedy(case, prompt, 5)


def test_a_plan_for_a_model_without_slots(tmp_path: Path) -> None:
    """Its capacities say how long texts may get, and cost next to nothing."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("[300, 100]\n[20, 50]\n")
    done = run_here("plan", trace, "--model", family_folder("mamba2"), "--json")
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)["capacity"]) >= 400


WIDE: dict[str, Config] = {
    "mamba2": {
        "hidden_size": 256, "num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 128,
        "num_hidden_layers": 4,
    },
    "qwen3_5_text": {
        "hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    },
}  # fmt: skip


@cpu_only
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", (1, 128, 256)),
        ("float32", (8, 1, 512)),
        ("bfloat16", (1, 32, 64)),  # products in 16 bits are slow here
        ("bfloat16", (4, 1, 64)),
    ],
    ids=str,
)
def test_a_call_takes_what_was_foretold(dtype: str, name: str, shape: tuple[int, int, int]) -> None:
    config = {**config_of(name), **WIDE[name]}
    params = {key: a.astype(getattr(mx, dtype)) for key, a in draw_params(config).items()}
    model = Model(read_config(config, dtype), params)
    step = "decode_greedy" if shape[1] == 1 else "prefill"
    measured = measure(model, step, shape, eager=True)
    assert 0.9 * measured <= laid_out(model, *shape).call(*shape, step) <= 2.1 * measured
