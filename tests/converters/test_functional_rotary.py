"""`rope_parameters`, as transformers 5 writes them, for modules that read the older spelling."""

from __future__ import annotations

from typing import Any

import tests.mlx_lm_extra  # noqa: F401 (skips without mlx-lm)
from converters.functional import mlx_lm_source
from funcrt.errors import ConfigError
from tests.reference.mlx_lm_configs import make_config

import pytest
from mlx import nn
from mlx_lm.models.base import BaseModelArgs

OLD = ("rope_theta", "rope_scaling", "rope_local_base_freq", "rope_parameters")
FLAT = {"rope_type": "default", "rope_theta": 777.0}
FULL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 777.0}
BY_TYPE = {
    "full_attention": FULL,
    "sliding_attention": {"rope_type": "default", "rope_theta": 333.0},
}


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in make_config(name).items() if v is not None and k not in OLD}


def make(name: str, rope: Any, **more: Any) -> nn.Module:
    return mlx_lm_source.make_module({**without(name), "rope_parameters": rope, **more})


def make_nested(name: str, rope: Any) -> nn.Module:
    config = without(name)
    text = {k: v for k, v in config.get("text_config", config).items() if k not in OLD}
    return mlx_lm_source.make_module({**config, "text_config": {**text, "rope_parameters": rope}})


def bases(module: nn.Module) -> set[float]:
    parts = [part for _, part in module.named_modules()]
    return {float(part.base) for part in parts if isinstance(getattr(part, "base", None), float)}


def test_one_for_each_type_of_layer() -> None:
    args = make("gemma3_text", BY_TYPE).args
    assert (args.rope_theta, args.rope_local_base_freq) == (777.0, 333.0)
    assert args.rope_scaling["factor"] == 8.0
    assert args.rope_scaling["rope_type"] == "linear"
    same = {"full_attention": FLAT, "sliding_attention": FLAT}
    assert bases(make("qwen2", same)) == {777.0}


@pytest.mark.parametrize("name", ["kimi_vl", "mistral3", "pixtral", "qwen2_vl"])
def test_those_of_a_text_config(name: str) -> None:
    assert bases(make_nested(name, FLAT)) == {777.0}


def test_one_for_each_type_of_layer_of_a_text_config() -> None:
    assert bases(make_nested("gemma3", BY_TYPE)) == {777.0, 333.0}


@pytest.mark.parametrize("name", ["exaone4", "llama4_text", "phi3"])
def test_flat_ones(name: str) -> None:
    assert 777.0 in bases(make(name, FLAT))


def test_what_a_module_reads_itself_is_left_to_it() -> None:
    assert make("mellum", BY_TYPE).args.rope_parameters == BY_TYPE


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("qwen2", BY_TYPE),  # one rotary embedding for all layers
        ("gemma3_text", {"full_attention": FLAT, "chunked_attention": FLAT | {"rope_theta": 1.0}}),
        ("gemma3_text", {"full_attention": FULL, "sliding_attention": FULL | {"factor": 2.0}}),
        ("gemma3_text", {"full_attention": FULL, "rope_theta": 1.0}),
        ("qwen2", {**FLAT, "partial_rotary_factor": 0.5}),
        ("gpt2", FLAT),
    ],
)
def test_what_nothing_reads_is_refused(name: str, rope: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^rope_parameters: mlx-lm's module for '{name}'"):
        make(name, rope)


def test_what_nothing_reads_in_a_text_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^text_config\.rope_parameters: "):
        make_nested("qwen2_vl", BY_TYPE)


def test_two_spellings_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope_theta=777\.0, rope_theta says 5\.0"):
        make("qwen2", FLAT, rope_theta=5.0)


def test_mlx_lm_is_left_as_it_was() -> None:
    before = BaseModelArgs.__dict__["from_dict"]
    make("qwen2", FLAT)
    with pytest.raises(ConfigError):
        make("gpt2", FLAT)
    assert BaseModelArgs.__dict__["from_dict"] is before
