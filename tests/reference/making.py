"""What the scripts that make golden files with transformers share: reading models, measuring.

Needs the pinned libraries of requirements.txt and nothing of this project, so that the two
implementations share no code.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from checking import difference
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

LENGTH = 540
TOLERANCE = 2e-5  # of the largest logit: what an implementation under test is allowed
FLATTEST = 0.82  # of the uniform entropy
HEADER = f"{'case':28} {'entropy':>8} {'margin':>8} {'noise':>8} {'chunked':>8} {'top':>6}"


class Measured(NamedTuple):
    """One case: the arrays of its golden file, and how far feeding it in pieces moves the logits.

    Attributes:
        arrays: tokens int32 `[T]`, positions int32 `[P]`, logits float32 `[P, V]`, argmax int32
            `[T]`; where the pieces matter also chunks int32 and chunked_logits float32 `[P, V]`.
        logits: float32 `[T, V]` of the whole prompt.
        chunking: largest difference between the two ways of feeding, over the largest logit.
    """

    arrays: dict[str, np.ndarray]
    logits: np.ndarray
    chunking: float


def load_folder(folder: Path) -> PreTrainedModel:
    """The float32 model as a user would read it; exits where a tensor finds no place."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise SystemExit(f"{folder.name}: transformers reports {problems}")
    return model.eval()


def load_model(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The float32 model of a config.json and tensors under their names in a file."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), config, weights)
        return load_folder(Path(folder))


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors, as Hugging Face lays them out."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def compute_logits(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Logits `[T, V]` of one uncached call over the whole prompt."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()


def compute_chunked(
    model: PreTrainedModel, tokens: np.ndarray, chunks: Sequence[int]
) -> np.ndarray:
    """Logits `[T, V]` of the prompt fed in pieces through a cache of transformers."""
    cache = DynamicCache(config=model.config)
    logits, start = [], 0
    with torch.no_grad():
        for size in chunks:
            chunk = torch.from_numpy(tokens[start : start + size])[None]
            logits.append(model(chunk, cache=cache, use_cache=True).logits[0].numpy())
            start += size
    return np.concatenate(logits)


def choose_prompt(model: PreTrainedModel) -> tuple[np.ndarray, np.ndarray, float]:
    """The first random prompt on which no top-1 choice is close to a tie.

    Returns:
        Its tokens `[T]`, logits `[T, V]`, and the smallest gap between the two largest logits of a
        position, over the largest logit of all.
    """
    for seed in range(100):
        tokens = np.random.default_rng(seed).integers(0, model.config.vocab_size, LENGTH)
        logits = compute_logits(model, tokens)
        top = np.sort(logits, axis=-1)
        margin = float((top[:, -1] - top[:, -2]).min() / np.abs(logits).max())
        if margin >= 5 * TOLERANCE:
            return tokens, logits, margin
    raise SystemExit("no prompt without near ties: make the logits more spread out")


def measure_entropy(model: PreTrainedModel, tokens: np.ndarray) -> float:
    """Mean attention entropy over the last half of the prompt, as a share of the uniform one.

    Uniform over the keys that a query sees; of the flattest layer; 0 for a model without attention.
    """
    with torch.no_grad():
        output = model(torch.from_numpy(tokens)[None], use_cache=False, output_attentions=True)
    shares = [0.0]
    for attention in getattr(output, "attentions", None) or ():
        rows = attention[0, :, LENGTH // 2 :]
        entropy = -(rows * (rows + 1e-30).log()).sum(-1)
        shares.append((entropy / (rows > 0).sum(-1).clamp(min=2).log()).mean().item())
    return max(shares)


def measure_noise(model: PreTrainedModel, tokens: np.ndarray, logits: np.ndarray) -> float:
    """How far the logits move when every weight and frequency moves by a rounding. Moves them."""
    generator = torch.Generator().manual_seed(0)
    tensors = [*model.parameters(), *(t for t in model.buffers() if t.is_floating_point())]
    with torch.no_grad():
        for tensor in tensors:
            step = torch.randn(tensor.shape, generator=generator) * 2.0**-24
            tensor.mul_(1 + step * (tensor != 1))  # 1 is exact in any implementation
    return difference(compute_logits(model, tokens), logits)


def measure(
    name: str,
    load: Callable[[], PreTrainedModel],
    positions: Sequence[int],
    chunks: Sequence[int],
    *,
    depends: bool = False,
) -> Measured:
    """Golden arrays of one case; prints a row, and exits where they could not catch an error.

    Args:
        name: for the row.
        load: reads the model; called more than once, because a model may keep the frequencies of
            its longest call so far.
        positions: where logits are kept.
        chunks: lengths of the pieces in which the prompt is fed a second time.
        depends: whether the logits are meant to depend on the pieces.
    """
    model = load()
    tokens, logits, margin = choose_prompt(model)
    chunked = compute_chunked(load(), tokens, chunks)
    chunking = difference(chunked, logits)
    entropy = measure_entropy(model, tokens)
    noise = measure_noise(model, tokens, logits)
    top = np.abs(logits).max()
    print(
        f"{name:28} {entropy:8.2f} {margin:8.1e} {noise:8.1e} {chunking:8.1e} {top:6.1f}",
        flush=True,
    )
    if entropy > FLATTEST or noise > TOLERANCE / 3:
        raise SystemExit(f"{name}: attention too flat, or logits too sensitive to rounding")
    if (chunking > TOLERANCE) != depends:
        raise SystemExit(f"{name}: pieces {'should' if depends else 'should not'} matter")
    kept = list(positions)
    arrays = {
        "tokens": tokens.astype(np.int32),
        "positions": np.array(kept, np.int32),
        "logits": logits[kept],
        "argmax": logits.argmax(-1).astype(np.int32),
    }
    if depends:
        arrays |= {"chunks": np.array(chunks, np.int32), "chunked_logits": chunked[kept]}
    return Measured(arrays, logits, chunking)


def save_arrays(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Write numpy arrays as safetensors."""
    save_file({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()}, path)


def read_arguments(description: str, *, cases: Sequence[str] = ()) -> argparse.Namespace:
    """Command line of a maker; also makes torch quiet and its sums come in one fixed order."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if cases:
        parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    arguments = parser.parse_args()
    unknown = set(getattr(arguments, "cases", ())) - set(cases)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return arguments
