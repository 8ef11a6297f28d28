"""Files made by llama.cpp's converter from the golden cases: `tests/reference/make_gguf.py`."""

from __future__ import annotations

import json
from pathlib import Path

import converters
from converters import gguf as reader
from converters.gguf.architectures import ARCHITECTURES
from funcrt.models import FAMILIES
from tests.converters.gguf_copies import requantized, write
from tests.families.cases import run_plain
from tests.helpers import TOLERANCE, relative_error
from tests.reference import gguf_cases, golden

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

TOKENS = 60  # of the golden prompt; windows are shorter


def is_known(case: str) -> bool:
    """Whether the case and the family that it needs are here."""
    config = gguf_cases.FAMILIES / case / "config.json"
    return config.is_file() and json.loads(config.read_text())["model_type"] in FAMILIES


CASES = [case for case in gguf_cases.CHANGES if is_known(case)]
# `log(exp(A))` is A but for its last bit.
ROUNDED = (".A_log",)


@pytest.mark.parametrize("case", CASES)
def test_tensors_and_logits_are_those_of_the_hugging_face_folder(case, tmp_path):
    folder = converters.load(gguf_cases.make_folder(case, tmp_path), dtype="float32")
    model = converters.load(gguf_cases.FILES / f"{case}.gguf", dtype="float32")
    assert list(model.params) == list(folder.params)
    for name, array in folder.params.items():
        if name.endswith(ROUNDED):
            assert relative_error(model.params[name], array) < 1e-6
        else:
            assert mx.array_equal(model.params[name], array).item(), name
    tokens = [int(t) for t in np.array(golden.read_family_golden(case).tokens)[0, :TOKENS]]
    assert relative_error(run_plain(model, tokens), run_plain(folder, tokens)) <= TOLERANCE


@pytest.mark.parametrize("case", [case for case in CASES if not gguf_cases.CHANGES[case]])
def test_logits_are_those_of_transformers(case):
    expected = golden.read_family_golden(case)
    model = converters.load(gguf_cases.FILES / f"{case}.gguf", dtype="float32")
    logits = run_plain(model, [int(t) for t in np.array(expected.tokens)[0]])
    assert relative_error(logits[expected.positions], expected.logits) <= TOLERANCE


def test_every_architecture_has_a_file():
    found = {
        str(reader.read_header(path).metadata["general.architecture"])
        for path in gguf_cases.FILES.glob("*.gguf")
    }
    assert found | {"chatglm"} == set(ARCHITECTURES)  # see below


@pytest.mark.parametrize("case", CASES)
def test_names_come_from_the_header_alone(case):
    """What a converter that reads piece by piece relies on."""
    opened = reader.open_gguf(gguf_cases.FILES / f"{case}.gguf")
    shapes = {name: a.shape for params in opened.params() for name, a in params.items()}
    assert len(opened.pieces) <= len(shapes)
    spec = converters.load(gguf_cases.FILES / f"{case}.gguf").spec
    assert shapes.keys() == spec.keys()


def test_heads_of_norms_are_split(tmp_path: Path):
    """StableLM keeps a tensor for each head, which GGUF stacks; llama.cpp's converter cannot."""
    from converters.gguf.file import GGUFTensor
    from converters.gguf.placing import Piece, read_piece

    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    (tmp_path / "data").write_bytes(values.tobytes())
    tensor = GGUFTensor("blk.0.attn_q_norm.weight", (4, 8), "F32", tmp_path / "data", 0, 128)
    block = ARCHITECTURES["stablelm"].block
    name = f"model.layers.0.{block['attn_q_norm']}.weight"
    params = read_piece(Piece(name, (tensor,)), ARCHITECTURES["stablelm"], {})
    assert list(params) == [
        f"model.layers.0.self_attn.q_layernorm.norms.{i}.weight" for i in range(4)
    ]
    for i, array in enumerate(params.values()):
        np.testing.assert_array_equal(np.array(array), values[i])


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.MXFP4])
@pytest.mark.parametrize("case", CASES)
def test_packed_matrices_are_put_in_order_like_dense_ones(case, kind, tmp_path):
    packed, expanded = (
        converters.load(path, dtype="float32")
        for path in requantized(gguf_cases.FILES / f"{case}.gguf", kind, tmp_path)
    )
    assert any(name.endswith(".scales") for name in packed.params)
    tokens = [int(t) for t in np.array(golden.read_family_golden(case).tokens)[0, :TOKENS]]
    logits = run_plain(packed, tokens, packed.prepared)
    assert relative_error(logits, run_plain(expanded, tokens)) <= TOLERANCE


# The converter gives heads of E / H to a GLM, which the golden case has not.
GLM = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GLM_METADATA = {
    "general.architecture": "chatglm", "chatglm.context_length": 2048,
    "chatglm.embedding_length": 32, "chatglm.feed_forward_length": 64, "chatglm.block_count": 2,
    "chatglm.attention.head_count": 4, "chatglm.attention.head_count_kv": 2,
    "chatglm.attention.layer_norm_rms_epsilon": 0.01, "chatglm.rope.dimension_count": 8,
    "chatglm.rope.freq_base": 20000.0,
}  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
def test_glm_whose_queries_keys_and_values_may_be_one_tensor(fused, tmp_path):
    """As the first files of GLM-4 had them, before transformers knew it."""
    arrays: dict[str, np.ndarray] = {}
    for name, array in mx.load(str(golden.family_folder("glm") / "model.safetensors")).items():
        module, _, part = name.rpartition(".")
        block, _, rest = module.removeprefix("model.layers.").partition(".")
        stem = GLM[module] if module in GLM else f"blk.{block}.{GLM[rest]}"
        arrays[f"{stem}.{part}"] = np.array(array.astype(mx.float32))
    for start in [f"blk.{i}.attn_{{}}.{part}" for i in (0, 1) for part in ("weight", "bias")]:
        if fused:
            three = [arrays.pop(start.format(letter)) for letter in "qkv"]
            arrays[start.format("qkv")] = np.concatenate(three)
    tensors = {name: (array, Kind.F32) for name, array in arrays.items()}
    metadata = {**GLM_METADATA, **({"chatglm.attention.key_length": 16} if fused else {})}
    model = converters.load(write(tmp_path / "glm.gguf", metadata, tensors), dtype="float32")
    expected = golden.read_family_golden("glm")
    logits = run_plain(model, [int(t) for t in np.array(expected.tokens)[0]])
    assert relative_error(logits[expected.positions], expected.logits) <= TOLERANCE
