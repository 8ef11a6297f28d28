"""Checkpoints that mlx-lm saved, read without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import converters
import tests.mlx_lm_extra  # noqa: F401 (skips without mlx-lm)
from converters.functional import mlx_lm_source
from funcrt.errors import ParamsError
from tests.families.cases import Case, run_plain
from tests.helpers import TOLERANCE, relative_error

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

CASES = ["deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "qwen3_moe"]


def save(module: nn.Module, config: dict[str, Any], folder: Path) -> Path:
    """As mlx-lm does it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def quantized(module: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    """Pack what can be packed in place, and say so in the config."""

    def fits(path: str, part: nn.Module) -> bool:
        return hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0

    nn.quantize(module, group_size=32, bits=4, class_predicate=fits)
    return {**config, "quantization": {"group_size": 32, "bits": 4}}


@pytest.mark.parametrize("name", CASES)
def test_saved_by_mlx_lm(name: str, tmp_path: Path):
    with Case(name) as case:
        module, config = mlx_lm_source.load_module(case.folder)
        model = converters.load(save(module, config, tmp_path / name), "float32")
        assert model.params.keys() == case.model.params.keys()
        assert relative_error(run_plain(model, case.prompt), case.whole) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "wider"), [("deepseek_v3", {"qk_nope_head_dim": 32}), ("mixtral", {})]
)
def test_packed_by_mlx_lm(name: str, wider: dict[str, int], tmp_path: Path):
    """All matrices in 4 bits, the halves of an absorbed one too."""
    with Case(name) as case:
        hf = {**case.hf, **wider}
        mx.random.seed(0)
        module = mlx_lm_source.make_module(hf)
        for path, part in module.named_modules():
            if path.endswith("gate"):  # zeros choose any experts
                part.weight = mx.random.normal(part.weight.shape)
        folder = save(module, quantized(module, hf), tmp_path / name)
        stored = mx.load(str(folder / "model.safetensors"))
        assert isinstance(stored, dict)
        assert any("switch_mlp" in key and key.endswith("scales") for key in stored)
        assert any(key.endswith("embed_q.scales") for key in stored) == (name == "deepseek_v3")
        ours, theirs = (
            run_plain(converters.load(folder, "float32", via=via), case.prompt)
            for via in (None, "mlx_lm")
        )
        assert relative_error(ours, theirs) < TOLERANCE


def test_stacks_of_other_sizes_are_refused(tmp_path: Path):
    with Case("mixtral") as case:
        module, config = mlx_lm_source.load_module(case.folder)
        folder = save(module, {**config, "num_local_experts": 5}, tmp_path / "model")
        with pytest.raises(ParamsError, match="expected 5 matrices, got shape"):
            converters.load(folder)
