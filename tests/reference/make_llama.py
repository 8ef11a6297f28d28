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

import argparse
import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from llama_cases import CASES, MLP_WIDTH, VOCAB, WEIGHTS, WIDTH, make_config
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils import logging

HERE = Path(__file__).parent
LENGTH = 540
CHUNKS = [200, 200, 139, 1]
POSITIONS = [0, 1, 2, 63, 127, 128, 270, 400, 538, 539]
TOLERANCE = 2e-5  # of the largest logit: what an implementation under test is allowed
CHECK_TOLERANCE = 1e-5  # the same libraries on another processor


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


def load_case(name: str, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """The float32 model, read by transformers from a folder as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(make_config(name)))
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model, info = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise SystemExit(f"{name}: transformers reports {problems}")
    return model.eval()


def compute_logits(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one uncached call over the whole prompt."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()


def compute_chunked(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of the prompt fed in CHUNKS through a cache of rotated keys."""
    cache = DynamicCache(config=model.config)
    logits, start = [], 0
    with torch.no_grad():
        for size in CHUNKS:
            chunk = torch.from_numpy(tokens[start : start + size])[None]
            logits.append(model(chunk, cache=cache, use_cache=True).logits[0].numpy())
            start += size
    return np.concatenate(logits)


def choose_prompt(model: LlamaForCausalLM) -> tuple[np.ndarray, np.ndarray, float]:
    """The first random prompt on which no top-1 choice is close to a tie."""
    for seed in range(100):
        tokens = np.random.default_rng(seed).integers(0, VOCAB, LENGTH)
        logits = compute_logits(model, tokens)
        top = np.sort(logits, axis=-1)
        margin = float((top[:, -1] - top[:, -2]).min() / np.abs(logits).max())
        if margin >= 5 * TOLERANCE:
            return tokens, logits, margin
    raise SystemExit("no prompt without near ties: make the logits more spread out")


def measure_entropy(model: LlamaForCausalLM, tokens: np.ndarray) -> float:
    """Mean attention entropy over the last half of the prompt, as a share of the uniform one."""
    with torch.no_grad():
        output = model(torch.from_numpy(tokens)[None], use_cache=False, output_attentions=True)
    queries = torch.arange(LENGTH // 2, LENGTH)
    shares = []
    for attention in output.attentions:
        rows = attention[0, :, queries]
        entropy = -(rows * (rows + 1e-30).log()).sum(-1)
        shares.append((entropy / (queries + 1.0).log()).mean().item())
    return max(shares)


def measure_noise(model: LlamaForCausalLM, tokens: np.ndarray, logits: np.ndarray) -> float:
    """How far the logits move when every weight and frequency moves by a rounding. Moves them."""
    generator = torch.Generator().manual_seed(0)
    rotary = model.model.rotary_emb
    with torch.no_grad():
        for tensor in [*model.parameters(), rotary.inv_freq]:
            step = torch.randn(tensor.shape, generator=generator) * 2.0**-24
            tensor.mul_(1 + step * (tensor != 1))  # 1 is exact in any implementation
    return float(np.abs(compute_logits(model, tokens) - logits).max() / np.abs(logits).max())


def make_golden(name: str, weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Arrays of one case; exits where they could not catch an error."""
    model = load_case(name, weights)
    tokens, logits, margin = choose_prompt(model)
    # A fresh model: with dynamic scaling one keeps the frequencies of its longest call so far.
    chunked = compute_chunked(load_case(name, weights), tokens)
    largest = np.abs(logits).max()
    chunking = np.abs(chunked - logits).max() / largest
    entropy = measure_entropy(model, tokens)
    noise = measure_noise(model, tokens, logits)
    print(
        f"{name:24} {entropy:8.2f} {margin:8.1e} {noise:8.1e} {chunking:8.1e} {largest:6.1f}",
        flush=True,
    )
    if entropy > 0.82 or noise > TOLERANCE / 3:
        raise SystemExit(f"{name}: attention too flat, or logits too sensitive to rounding")
    if (chunking > TOLERANCE) != name.startswith("dynamic"):
        raise SystemExit(f"{name}: only dynamic scaling may depend on how the prompt is fed")
    golden = {
        "tokens": tokens.astype(np.int32),
        "positions": np.array(POSITIONS, np.int32),
        "logits": logits[POSITIONS],
        "argmax": logits.argmax(-1).astype(np.int32),
    }
    if chunking > TOLERANCE:
        golden |= {"chunks": np.array(CHUNKS, np.int32), "chunked_logits": chunked[POSITIONS]}
    return golden


def make(folder: Path) -> None:
    """Write weights, cases and golden logits under `folder`; print what was measured."""
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    weights = {name: make_weights(name) for name in WEIGHTS}
    for name, tensors in weights.items():
        path = folder / "weights" / f"{name}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
    golden: dict[str, torch.Tensor] = {}
    print(f"{'case':24} {'entropy':>8} {'margin':>8} {'noise':>8} {'chunked':>8} {'top':>6}")
    for name, (weights_name, _) in CASES.items():
        for key, value in make_golden(name, weights[weights_name]).items():
            golden[f"{name}.{key}"] = torch.from_numpy(np.ascontiguousarray(value))
    cases = [
        {"name": name, "weights": weights_name, "config": make_config(name)}
        for name, (weights_name, _) in CASES.items()
    ]
    save_file(golden, folder / "golden.safetensors")
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    packages = ("torch", "transformers", "safetensors", "numpy")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


def compare_tensors(ours: Path, made: Path) -> list[str]:
    """Differences between two safetensors files: shapes, integers exactly, floats within bounds."""
    left, right = load_file(ours), load_file(made)
    if left.keys() != right.keys():
        return [f"{ours.name}: names differ: {sorted(left.keys() ^ right.keys())}"]
    problems = []
    for key, value in left.items():
        other = right[key]
        if value.shape != other.shape or value.dtype != other.dtype:
            problems.append(f"{ours.name}: {key}: {value.shape} against {other.shape}")
        elif not value.is_floating_point():
            if not torch.equal(value, other):
                problems.append(f"{ours.name}: {key}: integers differ")
        else:
            value, other = value.float(), other.float()
            error = ((value - other).abs().max() / value.abs().max()).item()
            if error > CHECK_TOLERANCE:
                problems.append(f"{ours.name}: {key}: {error:.1e} > {CHECK_TOLERANCE:.0e}")
    return problems


def check(folder: Path) -> int:
    """Make everything again in a temporary folder; 1 where it differs from `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        again = Path(temporary)
        make(again)
        problems = []
        if (folder / "cases.json").read_text() != (again / "cases.json").read_text():
            problems.append("cases.json differs")
        for path in sorted(again.rglob("*.safetensors")):
            problems += compare_tensors(folder / path.relative_to(again), path)
        if (folder / "versions.json").read_text() != (again / "versions.json").read_text():
            print("note: other library versions than those in versions.json")
    print("\n".join(problems) if problems else "llama: same")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the llama references.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # sums in one fixed order
    if arguments.check:
        return check(HERE / "llama")
    make(HERE / "llama")
    return 0


if __name__ == "__main__":
    sys.exit(main())
