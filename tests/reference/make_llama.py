"""Make tiny llama checkpoints and the logits that transformers computes from them.

    python make_llama.py            write llama/ beside this file
    python make_llama.py --check    make it again elsewhere, compare, exit 1 on a difference

Needs the pinned libraries of requirements.txt and nothing of this project, so that the two
implementations share no code. What is written:

    llama/cases.json            one entry per case: its weights, its config.json, golden positions
    llama/weights/*.safetensors Hugging Face names; several cases share one file
    llama/golden.safetensors    CASE.tokens [T], CASE.positions [P], CASE.logits [P, V] float32,
                                CASE.argmax [T], from a whole-prompt, uncached, eager float32 run;
                                with dynamic scaling also CASE.chunked_logits [P, V], the prompt
                                fed through a cache in pieces of CASE.chunks
    llama/versions.json         libraries that made the above
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from checking import check, save_versions
from llama_cases import CASES, MLP_WIDTH, VOCAB, WEIGHTS, WIDTH, make_config
from making import HEADER, load_model, measure, read_arguments, save_arrays
from safetensors.torch import save_file
from transformers import PreTrainedModel

HERE = Path(__file__).parent
CHUNKS = [200, 200, 139, 1]
POSITIONS = [0, 1, 2, 63, 127, 128, 270, 400, 538, 539]


def make_weights(name: str) -> dict[str, torch.Tensor]:
    """Random weights whose attention is sharp and whose every tensor matters to the logits."""
    shape = WEIGHTS[name]
    rng = np.random.default_rng(shape.seed)
    tensors: dict[str, np.ndarray] = {}

    def add(key: str, *dims: int, gain: float = 1.0, bias: float | None = None) -> None:
        std = gain / np.sqrt(dims[1])
        tensors[f"{key}.weight"] = rng.normal(0.0, std, dims)
        if bias is not None:
            tensors[f"{key}.bias"] = rng.normal(0.0, bias, dims[0])

    def add_norm(key: str) -> None:
        tensors[f"{key}.weight"] = rng.uniform(0.6, 1.4, WIDTH)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention_bias = 0.5 if shape.attention_bias else None
    mlp_bias = 0.3 if shape.mlp_bias else None
    add("model.embed_tokens", VOCAB, WIDTH, gain=2.5)
    for layer in range(shape.layers):
        block = f"model.layers.{layer}"
        add(f"{block}.self_attn.q_proj", queries, WIDTH, gain=1.4, bias=attention_bias)
        add(f"{block}.self_attn.k_proj", keys, WIDTH, gain=1.4, bias=attention_bias)
        add(f"{block}.self_attn.v_proj", keys, WIDTH, bias=attention_bias)
        add(f"{block}.self_attn.o_proj", WIDTH, queries, gain=0.3, bias=attention_bias)
        add(f"{block}.mlp.gate_proj", MLP_WIDTH, WIDTH, bias=mlp_bias)
        add(f"{block}.mlp.up_proj", MLP_WIDTH, WIDTH, bias=mlp_bias)
        add(f"{block}.mlp.down_proj", WIDTH, MLP_WIDTH, bias=mlp_bias)
        add_norm(f"{block}.input_layernorm")
        add_norm(f"{block}.post_attention_layernorm")
    add_norm("model.norm")
    if not shape.tied:
        add("lm_head", VOCAB, WIDTH, gain=2.5)
    dtype = getattr(torch, shape.dtype)
    return {key: torch.from_numpy(value).to(dtype) for key, value in tensors.items()}


def make(folder: Path) -> None:
    """Write weights, cases and golden logits under `folder`; print what was measured."""
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    weights = {name: make_weights(name) for name in WEIGHTS}
    for name, tensors in weights.items():
        path = folder / "weights" / f"{name}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
    golden: dict[str, np.ndarray] = {}
    print(HEADER)
    for name, (weights_name, _) in CASES.items():

        def load(name: str = name, tensors: str = weights_name) -> PreTrainedModel:
            return load_model(make_config(name), weights[tensors])

        depends = name.startswith("dynamic")
        measured = measure(name, load, POSITIONS, CHUNKS, depends=depends)
        golden |= {f"{name}.{key}": value for key, value in measured.arrays.items()}
    cases = [
        {"name": name, "weights": weights_name, "config": make_config(name)}
        for name, (weights_name, _) in CASES.items()
    ]
    save_arrays(golden, folder / "golden.safetensors")
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    save_versions(folder)


def main() -> int:
    if read_arguments("Make the llama references.").check:
        return check(HERE / "llama", make)
    make(HERE / "llama")
    return 0


if __name__ == "__main__":
    sys.exit(main())
