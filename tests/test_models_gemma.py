"""Gemma, OLMo, Command, GLM and EXAONE beside the checklist: what their configs may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import converters
from funcrt import ops
from funcrt.config.layer_types import FULL, SLIDING
from funcrt.errors import ConfigError
from funcrt.models import cohere, exaone4, gemma2, gemma3, olmo3, read_config
from tests.families.cases import config_of, run_plain
from tests.helpers import to_numpy
from tests.random_families import assert_filled_in, draw_params, some_tokens, write_folder
from tests.reference.golden import family_folder

import mlx.core as mx
import numpy as np
import pytest

CASES = [
    "cohere", "cohere2", "exaone4", "exaone4-full", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "olmo2", "olmo3",
]  # fmt: skip
GEMMA, GEMMA2, GEMMA3 = (config_of(name) for name in ("gemma", "gemma2", "gemma3_text"))
OLMO3, COHERE, COHERE2 = (config_of(name) for name in ("olmo3", "cohere", "cohere2"))
EXAONE4, GLM4 = (config_of(name) for name in ("exaone4", "glm4"))
LINEAR = {"rope_type": "linear", "factor": 4.0}


def read(hf: dict[str, Any], **changes: Any) -> Any:
    """A config with some keys replaced; those that are ... left out."""
    changed = {**hf, **changes}
    return read_config({key: value for key, value in changed.items() if value is not ...})


def refuses(hf: dict[str, Any], message: str, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read(hf, **changes)


@pytest.mark.parametrize("model_type", [name for name in CASES if name != "exaone4-full"])
def test_what_a_config_leaves_out_is_filled_in_as_transformers_does(model_type: str) -> None:
    sizes = {"num_attention_heads": 32, "hidden_size": 64}  # EXAONE's 32 key heads need as many
    assert_filled_in(model_type, **(sizes if model_type == "exaone4" else {}))


@pytest.mark.parametrize("case", CASES)
def test_a_config_is_written_so_that_it_reads_the_same(case: str, tmp_path: Path) -> None:
    """By mlx-lm too, which gets the same logits out of both."""
    model = converters.load(family_folder(case), dtype="float32")
    written = model.config.to_hf()
    assert read_config(written) == model.config
    assert written["architectures"] == config_of(case)["architectures"]
    model.save(tmp_path / "again")
    ours, theirs = (
        run_plain(converters.load(folder, dtype="float32", via="mlx_lm"), some_tokens())
        for folder in (tmp_path / "again", family_folder(case))
    )
    np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))


# --- which layers have a window -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(1, "GGG"), (2, "LGL"), (3, "LLG"), (9, "LLL"), ("LG", "LGL"), ("GL", "GLG")],
)
def test_a_pattern_repeats(pattern: Any, expected: str) -> None:
    config = read(EXAONE4, layer_types=..., sliding_window_pattern=pattern)
    assert config.layer_types == tuple(FULL if letter == "G" else SLIDING for letter in expected)
    assert [config.window(i) for i in range(3)] == [None if x == "G" else 24 for x in expected]


@pytest.mark.parametrize("pattern", [0, -1, True, 2.5, "", "LX", ["L"]])
def test_a_pattern_that_is_none_is_refused(pattern: Any) -> None:
    refuses(GEMMA3, "sliding_window_pattern: expected", sliding_window_pattern=pattern)


def test_layer_types_win_but_a_pattern_may_not_differ() -> None:
    types = [FULL, SLIDING, SLIDING]
    assert read(GEMMA3, layer_types=types, sliding_window_pattern=None).layer_types == tuple(types)
    refuses(GEMMA3, "sliding_window_pattern=3 does not fit", layer_types=types)
    refuses(COHERE2, "layer_switch=4 does not fit", layer_switch=4)
    # As transformers, which does not know it, reads a config that has nothing else.
    refuses(COHERE2, "layer_switch=2 does not fit", sliding_window_pattern=..., layer_switch=2)


@pytest.mark.parametrize("hf", [GEMMA2, GEMMA3, OLMO3, COHERE2])
def test_windows_need_a_size(hf: dict[str, Any]) -> None:
    refuses(hf, "there is no sliding_window", sliding_window=None)


def test_mlx_lm_is_told_the_period_if_there_is_one() -> None:
    for hf in (GEMMA3, COHERE2):
        free = {**hf, "layer_switch": None, "sliding_window_pattern": None}
        for letters, period in (("LLG", 3), ("GGG", 1), ("LLL", 4), ("GLL", None)):
            types = [FULL if letter == "G" else SLIDING for letter in letters]
            config = read(free, layer_types=types)
            assert config.to_hf()["sliding_window_pattern"] == period
            assert read_config(config.to_hf()) == config


def test_exaone_without_a_window_turns_everywhere() -> None:
    whole = [FULL] * 3
    for window, turns in ((None, True), (24, False)):
        config = read(
            EXAONE4, sliding_window=window, layer_types=whole, sliding_window_pattern=None
        )
        assert isinstance(config, exaone4.Config)
        layers = [exaone4.attention(config, i) for i in range(3)]
        assert [layer.rope is not None for layer in layers] == [turns] * 3
        assert [layer.window for layer in layers] == [None] * 3
    # transformers passes over the pattern then.
    assert read(EXAONE4, sliding_window=None, layer_types=...).layer_types == tuple(whole)


# --- two ropes ------------------------------------------------------------------------------------


def test_both_spellings_of_two_ropes_read_the_same() -> None:
    old = read(GEMMA3)
    assert (old.rope.theta, old.rope.kind, old.local_rope.theta) == (100000.0, "linear", 5000.0)
    new = {
        FULL: {**LINEAR, "rope_theta": 100000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
    }
    spelled = {"rope_theta": ..., "rope_scaling": ..., "rope_local_base_freq": ...}
    assert read(GEMMA3, rope_parameters=new, **spelled) == old
    assert read(GEMMA3, rope_parameters=new) == old  # both at once
    new[SLIDING]["rope_theta"] = 6000.0
    refuses(GEMMA3, "older spelling says 5000.0", rope_parameters=new)
    layers = [gemma3.attention(old, i).rope for i in range(3)]
    assert layers == [old.local_rope, old.local_rope, old.rope]


@pytest.mark.parametrize("local", [None, ...])
def test_the_local_base_is_10000_unless_said(local: Any) -> None:
    assert read(GEMMA3, rope_local_base_freq=local).local_rope.theta == 10000.0
    only = {FULL: {"rope_type": "default", "rope_theta": 7.0}}
    config = read(
        GEMMA3, rope_local_base_freq=local, rope_parameters=only, rope_theta=..., rope_scaling=...
    )
    assert (config.rope.theta, config.local_rope.theta) == (7.0, 10000.0)


@pytest.mark.parametrize("hf", [GEMMA3, OLMO3])
def test_only_layers_without_a_window_scale(hf: dict[str, Any]) -> None:
    scaled = {SLIDING: {**LINEAR, "rope_theta": 5.0}}
    bare = {"rope_theta": ..., "rope_scaling": ..., "rope_local_base_freq": ...}
    refuses(hf, "rope type 'linear' of 'sliding_attention'", rope_parameters=scaled, **bare)
    refuses(hf, "expected an entry for .* got rope_theta", rope_parameters={"rope_theta": 5.0})


def test_an_older_base_of_olmo3_that_versions_read_differently_is_refused() -> None:
    refuses(OLMO3, "rope_theta=20000: expected 500000.0", rope_theta=20000)
    both = {FULL: {**LINEAR, "rope_theta": 20000.0}, SLIDING: {"rope_theta": 3000.0}}
    config = read(OLMO3, rope_theta=..., rope_scaling=..., rope_parameters=both)
    assert (config.rope.theta, config.local_rope.theta) == (20000.0, 3000.0)
    assert read_config(config.to_hf()) == config
    assert "rope_theta" not in config.to_hf()  # so that mlx-lm refuses it
    ropes = [olmo3.attention(config, i).rope for i in range(3)]
    assert ropes == [config.local_rope, config.local_rope, config.rope]


# --- other settings -------------------------------------------------------------------------------


def test_first_gemmas_say_gelu_and_mean_its_approximation() -> None:
    assert GEMMA["hidden_act"] == "gelu"
    assert read(GEMMA).hidden_act == "gelu_pytorch_tanh"
    refuses(GEMMA, "hidden_activation='gelu'", hidden_activation="gelu")
    refuses(GEMMA2, "hidden_act='relu'", hidden_act="relu")  # hidden_activation is what counts


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_soft_caps_are_positive_or_absent(cap: float) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        refuses(GEMMA2, f"{key}: expected above 0 or null", **{key: cap})
        assert isinstance(read(GEMMA2, **{key: None}), gemma2.Config)
    refuses(GEMMA3, "attn_logit_softcapping=50.0 is not supported", attn_logit_softcapping=50.0)


@pytest.mark.parametrize(
    ("hf", "changes"),
    [
        (GEMMA2, {"use_bidirectional_attention": True}),
        (GEMMA3, {"use_bidirectional_attention": True}),
        (COHERE, {"layer_norm_bias": True}),
        (COHERE2, {"order_of_interleaved_layers": "global_attn_first"}),
        (COHERE2, {"position_embedding_type": "rope_neox"}),
        (COHERE2, {"rotary_pct": 0.5}),
        (COHERE2, {"use_gated_activation": False}),
        (COHERE2, {"use_parallel_block": False}),
        (COHERE2, {"use_qk_norm": True}),
        (EXAONE4, {"attention_bias": True}),
        (GLM4, {"mlp_bias": True}),
    ],
)
def test_what_is_not_computed_is_refused(hf: dict[str, Any], changes: dict[str, Any]) -> None:
    key, value = next(iter(changes.items()))
    refuses(hf, f"{key}={value!r} is not supported", **changes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_sizes_are_needed_and_whole(case: str, key: str) -> None:
    for value in (..., None, "many", 0, -1, 1.5, [3], 1 << 40):
        with pytest.raises(ConfigError):
            read(config_of(case), **{key: value})


def test_heads_normed_alone_have_weights_of_their_own(tmp_path: Path) -> None:
    """In 16 bits they are multiplied before they are rounded."""
    config = {**COHERE, "torch_dtype": "float16"}
    params = {name: array.astype(mx.float16) for name, array in draw_params(config).items()}
    model = converters.load(write_folder(tmp_path, config, params), dtype="float16")
    assert model.spec["model.layers.0.self_attn.k_norm.weight"] == (2, 8)
    norm = cohere.HeadsNorm("norm", 2, 8, 0.01)
    x = mx.random.normal((1, 2, 3, 8), key=mx.random.key(0)).astype(mx.float16)
    weight = mx.random.normal((2, 8), key=mx.random.key(1)).astype(mx.float16)
    found = norm(type("Run", (), {"params": {"norm.weight": weight}})(), x)
    wide, scale = to_numpy(x).astype(np.float64), to_numpy(weight)[:, None]
    centred = wide - wide.mean(-1, keepdims=True)
    exact = scale * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.01)
    assert found.dtype == mx.float16
    np.testing.assert_allclose(to_numpy(found), exact.astype(np.float16), rtol=1e-3)


def test_norms_around_one_lose_nothing_of_their_weights_in_16_bits() -> None:
    weight = mx.random.uniform(-0.4, 0.4, (64,), key=mx.random.key(0)).astype(mx.bfloat16)
    x = mx.random.normal((8, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    found = ops.rms_norm({"norm.weight": weight}, "norm", x, 0.01, offset=1.0)
    wide = to_numpy(x).astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.01) * (1 + to_numpy(weight))
    assert found.dtype == mx.bfloat16
    np.testing.assert_allclose(to_numpy(found), exact, rtol=2**-8)  # rounded once
