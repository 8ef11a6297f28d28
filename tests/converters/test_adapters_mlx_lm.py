"""Adapters as mlx-lm writes them, against its own layers with the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import converters
from converters import adapters
from funcrt.adapters import fuse, keep
from funcrt.errors import ConfigError, ParamsError
from funcrt.model import Model
from tests.converters.mlx_published import source_of
from tests.helpers import TOLERANCE, relative_error

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten

FAMILIES = Path(__file__).parents[1] / "reference" / "families"
TOKENS = [[5, 17, 33, 2, 80, 41, 9, 64]]


def save_mlx_lm(module: Any, folder: Path, **config: Any) -> None:
    """What mlx-lm's trainer leaves behind."""
    folder.mkdir()
    weights = dict(tree_flatten(module.trainable_parameters()))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps({"model": "some/base", **config}))


def tune(
    base: Path, folder: Path, kind: str = "lora", *, bits: int = 0, layers: int = 2, **lora: Any
) -> Any:
    """A fine-tune by mlx-lm's own layers with random weights, saved as an adapter."""
    pytest.importorskip("mlx_lm")
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model, quantize_model

    module, config = load_model(base)
    module.set_dtype(mx.float32)
    if bits:
        module, _ = quantize_model(module, config, 32, bits)
    module.freeze()
    settings = {"rank": 4, "scale": 3.0, "dropout": 0.0, **lora}
    if kind == "full":
        for layer in module.layers[-layers:]:
            layer.unfreeze()
    else:
        linear_to_lora_layers(module, layers, settings, use_dora=kind == "dora")
    keys = mx.random.split(mx.random.key(3), 1000)
    noise = {}
    for key, (name, array) in zip(keys, tree_flatten(module.trainable_parameters())):  # noqa: B905
        drawn = mx.random.normal(array.shape, key=key) * 0.1
        noise[name] = array * (1 + drawn) if kind == "full" or name.endswith(".m") else drawn
    module.update(tree_unflatten(list(noise.items())))
    module.eval()
    save_mlx_lm(module, folder, fine_tune_type=kind, num_layers=layers, lora_parameters=settings)
    return module


def fuse_layers(module: Any) -> Any:
    """As `mlx_lm.fuse` does it."""
    layers = [(name, part.fuse()) for name, part in module.named_modules() if hasattr(part, "fuse")]
    module.update_modules(tree_unflatten(layers))
    return module


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_fused_is_what_mlx_lm_computes(tmp_path, family, kind, layers):
    base = FAMILIES / family
    expected = tune(base, tmp_path / "a", kind, layers=layers)(mx.array(TOKENS))
    model = converters.load(base, "float32", tmp_path / "a")
    assert relative_error(model(TOKENS)[0], expected) < TOLERANCE
    assert relative_error(converters.load(base, "float32")(TOKENS)[0], expected) > 1e-3
    assert f"fine_tune_type {kind} (mlx-lm), made for some/base" in model.notes[0]


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neox", "phi3", "gemma2", "lfm2", "qwen3_next", "starcoder2"]
)
def test_fused_tensors_are_those_that_mlx_lm_fuses(tmp_path, family):
    base = source_of(family, tmp_path / "base")
    module = fuse_layers(tune(base, tmp_path / "a"))
    (tmp_path / "fused").mkdir()
    shutil.copy(base / "config.json", tmp_path / "fused")
    params = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(tmp_path / "fused" / "model.safetensors"), params)
    theirs = converters.load(tmp_path / "fused", "float32").params
    ours = converters.load(base, "float32", tmp_path / "a").params
    plain = converters.load(base, "float32").params
    moved = [name for name, array in ours.items() if not mx.array_equal(array, plain[name])]
    assert len(moved) > 5
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        if array.ndim == 1:  # some norms were rounded on their way through mlx-lm
            continue
        assert mx.allclose(array, theirs[name], atol=1e-6), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("keys", [None, ["down_proj"], ["gate_proj"], ["up_proj", "down_proj"]])
def test_experts_find_theirs_whether_stacked_or_not(tmp_path, family, keys):
    base = source_of(family, tmp_path / "base")
    chosen = {}
    if keys is not None:
        inner = {"mixtral": "block_sparse_moe.switch_mlp", "gpt_oss": "mlp.experts"}
        chosen["keys"] = [f"{inner.get(family, 'mlp.switch_mlp')}.{key}" for key in keys]
    module = tune(base, tmp_path / "a", **chosen)
    tensors = mx.load(str(tmp_path / "a" / "adapters.safetensors"))
    assert any(array.ndim == 3 for array in tensors.values())
    model = converters.load(base, "float32", tmp_path / "a")
    if "packed again" in model.notes[-1]:
        # That rounds. What is packed is exact, so the same on the dense matrices has to agree.
        plain = converters.load(base, "float32").in_float32()
        model = fuse(plain, adapters.read(tmp_path / "a", plain))
    assert relative_error(model(TOKENS)[0], module(mx.array(TOKENS))) < TOLERANCE
    with pytest.raises(ParamsError, match="experts"):
        converters.load(base, "float32", tmp_path / "a", fuse=False)


def test_an_embedding_that_is_the_last_projection_too(tmp_path):
    base = FAMILIES / "qwen2"
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    expected = tune(base, tmp_path / "a", keys=["model.embed_tokens"])(mx.array(TOKENS))
    for is_fused in (True, False):
        model = converters.load(base, "float32", tmp_path / "a", fuse=is_fused)
        assert relative_error(model(TOKENS)[0], expected) < TOLERANCE


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_bases_keep_or_pack_again(tmp_path, bits):
    module = tune(FAMILIES / "mistral", tmp_path / "a", bits=bits)
    plain = converters.load(FAMILIES / "mistral", "float32")
    packed = pack(plain, bits)
    adapter = adapters.read(tmp_path / "a", packed)
    kept = keep(packed, adapter)
    assert relative_error(kept(TOKENS)[0], module(mx.array(TOKENS))) < TOLERANCE
    fused = fuse(packed, adapter)
    theirs = dict(tree_flatten(fuse_layers(module).parameters()))
    assert relative_error(fused(TOKENS)[0], module(mx.array(TOKENS))) < TOLERANCE
    for name, array in fused.params.items():
        if array.dtype == mx.uint32:
            assert mx.array_equal(array, theirs[name]), name


def pack(model: Model, bits: int) -> Model:
    """As mlx-lm does it."""
    params = {}
    for name, array in model.params.items():
        if array.ndim == 1:
            params[name] = array
            continue
        parts = mx.quantize(array, group_size=32, bits=bits)
        base = name.removesuffix(".weight")
        pairs = zip(("weight", "scales", "biases"), parts, strict=True)
        params |= {f"{base}.{part}": value for part, value in pairs}
    return model.with_params(params)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fine_tune_type": "prefix"}, "fine_tune_type 'prefix' is not supported"),
        ({"lora_parameters": {"rank": 4}}, r"lora_parameters\.scale: expected a number"),
    ],
)
def test_settings_of_mlx_lm_are_checked(tmp_path, change, match):
    tune(FAMILIES / "mistral", tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=match):
        converters.load(FAMILIES / "mistral", "float32", tmp_path / "a")
