"""Makes `exported/reference.funcrt`: a bundle of a tiny random llama, to try loaders on.

    python exported/make_reference.py [FOLDER]

One layer, 98 characters as vocabulary, float32, drawn with a fixed seed; a batch of two, so that
rows can differ in length, and one capacity, because with two it would be larger than 200 kB. It
says nothing sensible, but the same everywhere. Graphs run on the CPU with one version of MLX only:
run this again, and commit what it makes, whenever constraints.txt gets another one.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

from funcrt import models
from funcrt.buckets import BucketPlan
from funcrt.bundle.exporter import export
from funcrt.bundle.format.checks import load_manifest, save_manifest
from funcrt.bundle.format.manifest import CERTIFICATE
from funcrt.config import ModelConfig, RopeConfig
from funcrt.model import Model
from funcrt.text import Tokenizer

import mlx.core as mx
import tokenizers

FOLDER = Path(__file__).parent / "reference.funcrt"
# No T from 2 to 16, and none from 32 up: more functions exist for those, which take room.
PLAN = BucketPlan(batch=(2,), tokens=(24,), capacity=(64,))
TOKENS = ["<unk>", "<end>", "\n", *map(chr, range(32, 127))]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=len(TOKENS),
    hidden_size=8,
    intermediate_size=12,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0, original_max_positions=256),
    max_positions=256,
    tie_word_embeddings=True,
    eos_token_ids=(TOKENS.index("<end>"),),
)


def make_model() -> Model:
    """The model with its weights and its tokenizer."""
    random = Random(0)
    params = {}
    for name, shape in models.family(CONFIG.model_type).param_spec(CONFIG).items():
        mean, spread = 0.0, 2 / math.sqrt(shape[-1])
        if "norm" in name:
            mean, spread = 1.0, 0.2
        elif "embed" in name:
            spread = 0.3  # small beside what the layer adds: a token is not its own successor
        values = [random.gauss(mean, spread) for _ in range(math.prod(shape))]
        params[name] = mx.array(values, dtype=mx.float32).reshape(shape)
    return Model(CONFIG, params, make_tokenizer())


def make_tokenizer() -> Tokenizer:
    """Every character is a token."""
    numbers = {token: number for number, token in enumerate(TOKENS)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, [], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<unk>", "<end>"])
    return Tokenizer(backend, {"eos_token": "<end>"}, TEMPLATE, CONFIG.eos_token_ids)


def make(folder: Path) -> None:
    """Export into `folder`, without what differs between machines and from day to day."""
    with mx.stream(mx.cpu):
        export(make_model(), folder, PLAN)
    manifest = load_manifest(folder)
    target = manifest.targets["cpu"]
    producer = {name: target.producer[name] for name in ("funcrt", "mlx")}
    targets = {"cpu": replace(target, producer=producer, report=None)}
    save_manifest(folder, replace(manifest, targets=targets))
    (folder / CERTIFICATE).unlink()  # it is for the manifest as it was


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
