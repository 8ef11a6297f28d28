"""Every tensor type: what it stands for, and a model that is made of it."""

from __future__ import annotations

from pathlib import Path

import converters
from converters.gguf.changes import dense
from converters.gguf.file import GGUFTensor, read_header
from converters.gguf.tensors import AFFINE, EXPANDED, read_tensor
from funcrt.errors import ParamsError
from tests.converters.conftest import permute, write_folder
from tests.converters.gguf_blocks import KINDS, expand, random_blocks
from tests.families.cases import run_plain
from tests.helpers import TOLERANCE, relative_error

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

PACKED = {**{kind: bits for kind, (_, bits, _) in AFFINE.items()}, "MXFP4": 4}
HALF = ("TQ1_0", "TQ2_0")
TOKENS = [1, 5, 200, 7, 7, 91, 3]


def stored(path: Path, kind: str, shape: tuple[int, ...], blocks: np.ndarray) -> GGUFTensor:
    path.write_bytes(blocks.tobytes())
    return GGUFTensor("x.weight", shape, kind, path, 0, blocks.size)


def test_all_types_are_covered():
    assert {*PACKED, *EXPANDED} == {*KINDS}


@pytest.mark.parametrize("shape", [(6, 512), (3, 2, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_gguf_package_bit_for_bit(kind, shape, tmp_path):
    blocks = random_blocks(kind, shape, np.random.default_rng(1))
    parts = read_tensor(stored(tmp_path / "data", kind, shape, blocks))
    np.testing.assert_array_equal(np.array(dense(parts)), expand(kind, blocks).reshape(shape))
    if kind not in PACKED:
        assert parts[""].dtype == (mx.float16 if kind in HALF else mx.float32)
        return
    assert parts["weight"].shape == (*shape[:-1], shape[-1] * PACKED[kind] // 32)
    float32 = kind.endswith("_K")
    expected = mx.uint8 if kind == "MXFP4" else mx.float32 if float32 else mx.float16
    assert parts["scales"].dtype == expected
    assert ("biases" in parts) == (kind != "MXFP4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_is_expanded(kind, tmp_path):
    blocks = random_blocks(kind, (256,), np.random.default_rng(2))
    parts = read_tensor(stored(tmp_path / "data", kind, (256,), blocks))
    np.testing.assert_array_equal(
        np.array(parts[""].astype(mx.float32)), expand(kind, blocks).reshape(256)
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("IQ1_M", "MXFP4")])
def test_scales_that_are_not_finite(kind, tmp_path):
    from tests.converters.gguf_blocks import _SCALES

    blocks = random_blocks(kind, (2, 256), np.random.default_rng(3))
    at = _SCALES[kind][0]
    blocks[1, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ParamsError, match=rf"the scales of its {kind} blocks are not finite"):
        read_tensor(stored(tmp_path / "data", kind, (2, 256), blocks))


def test_scales_of_mxfp4_that_are_not_finite(tmp_path):
    blocks = random_blocks("MXFP4", (2, 256), np.random.default_rng(3))
    blocks[1, 17] = 0xFF
    with pytest.raises(ParamsError, match="the scales of its MXFP4 blocks are not finite"):
        read_tensor(stored(tmp_path / "data", "MXFP4", (2, 256), blocks))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_expanded_weights(kind, tiny):
    """The same values as a Hugging Face folder in float32, which goes another way."""
    tiny.change(
        vocab_size=256, hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1
    )
    rng = np.random.default_rng(0)
    blocks = {}
    for name, array in tiny.weights.items():
        if array.ndim == 2:
            blocks[name] = random_blocks(kind, array.shape, rng)
            tiny.weights[name] = expand(kind, blocks[name]).reshape(array.shape)
    path = tiny.folder / "blocks.gguf"
    base = read_header(tiny.gguf())
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in base.metadata.items():
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    heads = {"q_proj": 4, "k_proj": 2}
    for name, array in tiny.weights.items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if name not in blocks:
            writer.add_tensor(target, array)
            continue
        count = heads.get(name.split(".")[-2])
        rows = blocks[name] if count is None else permute(blocks[name], count)
        writer.add_tensor(target, rows, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = converters.load(path, dtype="float32" if kind in HALF else None)
    folder = write_folder(tiny.folder / "hf", tiny.config, tiny.weights)
    expected = converters.load(folder, dtype="float32")
    assert any(name.endswith(".scales") for name in model.params) == (kind in PACKED)
    logits = run_plain(model, TOKENS, model.prepared)
    assert relative_error(logits, run_plain(expected, TOKENS)) <= TOLERANCE
