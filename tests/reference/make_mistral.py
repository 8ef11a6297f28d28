"""Make a tiny mistral checkpoint and the logits that transformers computes from it.

    python make_mistral.py            write mistral/ beside this file
    python make_mistral.py --check    make it again elsewhere, compare, exit 1 on a difference

Needs the pinned libraries of requirements.txt and nothing of this project. What is written:

    mistral/cases.json             per case its config.json; and, for a config.json that leaves out
                                   all it can, what transformers fills in (`defaults`)
    mistral/weights.safetensors    Hugging Face names, one file for all cases
    mistral/golden.safetensors     CASE.tokens [T], CASE.positions [P], CASE.logits [P, V] float32,
                                   CASE.argmax [T], from a whole-prompt, uncached, eager float32 run
    mistral/versions.json          libraries that made the above

What transformers does: a query at position q sees the keys k with q - k < sliding_window, so itself
and the sliding_window - 1 before it; `null` is no window, and a config without the key has one
of 4096.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_llama import (
    TOLERANCE,
    choose_prompt,
    compare_tensors,
    measure_entropy,
    measure_noise,
)
from safetensors.torch import save_file
from transformers import DynamicCache, MistralConfig, MistralForCausalLM
from transformers.utils import logging

HERE = Path(__file__).parent
VOCAB, WIDTH, MLP_WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 96, 32, 48, 4, 2, 16, 2
POSITIONS = [0, 1, 22, 23, 24, 25, 47, 128, 300, 538, 539]  # around the window and far behind it
CHUNKS = [200, 24, 7, 308, 1]

SHAPE: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": MLP_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
}
CASES: dict[str, dict[str, Any]] = {
    # As the first Mistral 7B was published, with a smaller window.
    "window": {
        **SHAPE, "rope_theta": 10000.0, "sliding_window": 24, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
    },
    # As later ones are, in the spelling of transformers 5.
    "no-window": {
        **SHAPE, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_window": None, "dtype": "bfloat16", "transformers_version": "5.24.0",
    },
}  # fmt: skip
LEFT_OUT = (
    "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings",
    "tie_word_embeddings", "sliding_window",
)  # fmt: skip


def make_weights() -> dict[str, torch.Tensor]:
    """Random bfloat16 weights whose attention is sharp."""
    rng = np.random.default_rng(11)
    tensors: dict[str, np.ndarray] = {}

    def add(key: str, *dims: int, gain: float = 1.0) -> None:
        tensors[f"{key}.weight"] = rng.normal(0.0, gain / np.sqrt(dims[1]), dims)

    def add_norm(key: str) -> None:
        tensors[f"{key}.weight"] = rng.uniform(0.6, 1.4, WIDTH)

    add("model.embed_tokens", VOCAB, WIDTH, gain=2.5)
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        add(f"{block}.self_attn.q_proj", HEADS * HEAD_DIM, WIDTH, gain=1.4)
        add(f"{block}.self_attn.k_proj", KV_HEADS * HEAD_DIM, WIDTH, gain=1.4)
        add(f"{block}.self_attn.v_proj", KV_HEADS * HEAD_DIM, WIDTH)
        add(f"{block}.self_attn.o_proj", WIDTH, HEADS * HEAD_DIM, gain=0.3)
        add(f"{block}.mlp.gate_proj", MLP_WIDTH, WIDTH)
        add(f"{block}.mlp.up_proj", MLP_WIDTH, WIDTH)
        add(f"{block}.mlp.down_proj", WIDTH, MLP_WIDTH)
        add_norm(f"{block}.input_layernorm")
        add_norm(f"{block}.post_attention_layernorm")
    add_norm("model.norm")
    add("lm_head", VOCAB, WIDTH, gain=2.5)
    return {key: torch.from_numpy(value).to(torch.bfloat16) for key, value in tensors.items()}


def load_case(name: str, weights: dict[str, torch.Tensor]) -> MistralForCausalLM:
    """The float32 model, read by transformers from a folder as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CASES[name]))
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model, info = MistralForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise SystemExit(f"{name}: transformers reports {problems}")
    return model.eval()


def compute_chunked(model: MistralForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of the prompt fed in CHUNKS through transformers' own sliding cache."""
    cache = DynamicCache(config=model.config)
    logits, start = [], 0
    with torch.no_grad():
        for size in CHUNKS:
            chunk = torch.from_numpy(tokens[start : start + size])[None]
            output = model(chunk, cache=cache, use_cache=True)
            logits.append(output.logits[0].numpy())
            start += size
    return np.concatenate(logits)


def make_golden(name: str, weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Arrays of one case; exits where they could not catch an error."""
    model = load_case(name, weights)
    tokens, logits, margin = choose_prompt(model)
    largest = np.abs(logits).max()
    chunking = np.abs(compute_chunked(model, tokens) - logits).max() / largest
    entropy = measure_entropy(model, tokens)
    noise = measure_noise(model, tokens, logits)
    print(
        f"{name:12} {entropy:8.2f} {margin:8.1e} {noise:8.1e} {chunking:8.1e} {largest:6.1f}",
        flush=True,
    )
    if entropy > 0.82 or noise > TOLERANCE / 3 or chunking > TOLERANCE:
        raise SystemExit(f"{name}: attention too flat, logits too sensitive, or chunks that differ")
    return {
        "tokens": tokens.astype(np.int32),
        "positions": np.array(POSITIONS, np.int32),
        "logits": logits[POSITIONS],
        "argmax": logits.argmax(-1).astype(np.int32),
    }


def read_defaults() -> dict[str, Any]:
    """What transformers makes of a config.json that leaves out all it can."""
    given = {key: value for key, value in SHAPE.items() if key not in LEFT_OUT}
    given["num_attention_heads"] = 16  # other than the key/value heads that it assumes
    config = MistralForCausalLM(MistralConfig.from_dict(given)).config
    filled = {key: getattr(config, key) for key in LEFT_OUT}
    filled["rope_theta"] = float(config.rope_parameters["rope_theta"])
    return {"config": given, "filled": filled}


def make(folder: Path) -> None:
    """Write weights, cases and golden logits under `folder`; print what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = make_weights()
    save_file(weights, folder / "weights.safetensors", metadata={"format": "pt"})
    golden: dict[str, torch.Tensor] = {}
    print(f"{'case':12} {'entropy':>8} {'margin':>8} {'noise':>8} {'chunked':>8} {'top':>6}")
    for name in CASES:
        for key, value in make_golden(name, weights).items():
            golden[f"{name}.{key}"] = torch.from_numpy(np.ascontiguousarray(value))
    save_file(golden, folder / "golden.safetensors")
    cases = {"cases": CASES, "defaults": read_defaults()}
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    packages = ("torch", "transformers", "safetensors", "numpy")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


def check(folder: Path) -> int:
    """Make everything again in a temporary folder; 1 where it differs from `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        again = Path(temporary)
        make(again)
        problems = []
        if (folder / "cases.json").read_text() != (again / "cases.json").read_text():
            problems.append("cases.json differs")
        for path in sorted(again.glob("*.safetensors")):
            problems += compare_tensors(folder / path.name, path)
        if (folder / "versions.json").read_text() != (again / "versions.json").read_text():
            print("note: other library versions than those in versions.json")
    print("\n".join(problems) if problems else "mistral: same")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the mistral references.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # sums in one fixed order
    if arguments.check:
        return check(HERE / "mistral")
    make(HERE / "mistral")
    return 0


if __name__ == "__main__":
    sys.exit(main())
