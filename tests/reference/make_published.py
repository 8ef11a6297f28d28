"""Make `published/`: tiny checkpoints with eyes, or quantized, and transformers' logits of texts.

python tests/reference/make_published.py [--check] [CASE ...]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checking import check, save_versions
from making import compute_logits, read_arguments, save_arrays, write_folder
from published_cases import MULTIMODAL, QUANTIZED
from safetensors.torch import load_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedModel,
)

HERE = Path(__file__).parent
LENGTH = 40
# Codes of 4 bits: a sign, 2 bits of exponent, 1 of mantissa.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LARGEST_FP8 = 448.0


def draw(config: Any, kind: Any) -> PreTrainedModel:
    """A random model that is stored in bfloat16, as published ones are."""
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            vector = tensor.ndim < 2
            around = 1.0 if vector and name.endswith("norm.weight") else 0.0
            tensor.normal_(around, 0.1 if vector else 0.3)
    return model.to(torch.bfloat16)


def make_multimodal(name: str, folder: Path) -> PreTrainedModel:
    """Write a model with eyes; what transformers reads of it."""
    config = CONFIG_MAPPING[name](**MULTIMODAL[name])
    draw(config, AutoModelForImageTextToText).save_pretrained(folder)
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def make_quantized(name: str, folder: Path) -> PreTrainedModel:
    """Write a model as its makers quantize it; what transformers expands of it."""
    arguments, settings = QUANTIZED[name]
    config = CONFIG_MAPPING[arguments["model_type"]](
        **{key: value for key, value in arguments.items() if key != "model_type"}
    )
    draw(config, AutoModelForCausalLM).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    quantize = quantize_mxfp4 if settings["quant_method"] == "mxfp4" else quantize_fp8
    weights = {}
    for key, tensor in stored.items():
        weights |= quantize(key, tensor, settings)
    written = {**config.to_dict(), "quantization_config": settings}
    write_folder(folder, written, weights)
    own = {key: value for key, value in settings.items() if key not in ("quant_method", "fmt")}
    kind = Mxfp4Config if settings["quant_method"] == "mxfp4" else FineGrainedFP8Config
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=kind(dequantize=True, **own),
    )
    return model.float()


def quantize_fp8(
    name: str, tensor: torch.Tensor, settings: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """A projection as e4m3 with a scale for each block, or one; other tensors as they are."""
    if not name.endswith("_proj.weight") and not name.endswith("_mqa.weight"):
        return {name: tensor}
    down, across = settings["weight_block_size"] or tensor.shape
    tall, wide = -(-tensor.shape[0] // down), -(-tensor.shape[1] // across)
    codes, scales = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(tall, wide)
    for i in range(tall):
        for j in range(wide):
            part = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
            scales[i, j] = tensor[part].float().abs().max() / LARGEST_FP8
            codes[part] = (tensor[part].float() / scales[i, j]).to(torch.float8_e4m3fn)
    made = {name: codes, f"{name}_scale_inv": scales}
    if settings["weight_block_size"] is None:
        made[f"{name}_scale_inv"] = scales.reshape(())
        made[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(1.0)
    return made


def quantize_mxfp4(name: str, tensor: torch.Tensor, _: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Stacks of experts in blocks of 32 values and powers of two; other tensors as they are."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: tensor}
    rows = tensor.float().transpose(-1, -2)
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    power = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = (groups / 2.0 ** power[..., None])[..., None].sub(E2M1).abs().argmin(-1)
    blocks = (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": (power + 127).to(torch.uint8)}


def make_case(name: str, folder: Path) -> None:
    """Write one case."""
    folder.mkdir(parents=True, exist_ok=True)
    make_one = make_multimodal if name in MULTIMODAL else make_quantized
    model = make_one(name, folder).eval()
    for extra in folder.glob("generation_config.json"):
        extra.unlink()
    tokens = np.random.default_rng(0).integers(1, 90, LENGTH)  # no marks of images
    logits = compute_logits(model, tokens)
    if not np.isfinite(logits).all():
        raise SystemExit(f"{name}: logits are not finite")
    arrays = {"tokens": tokens.astype(np.int32), "logits": logits}
    save_arrays(arrays, folder / "golden.safetensors")
    print(f"{name:20} {np.abs(logits).max():6.1f}", flush=True)


def make(folder: Path, names: list[str]) -> None:
    """Write cases under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        make_case(name, folder / name)
    save_versions(folder)


def main() -> int:
    known = [*MULTIMODAL, *QUANTIZED]
    arguments = read_arguments("Make the references of published forms.", cases=known)
    work = partial(make, names=arguments.cases or known)
    if arguments.check:
        return check(HERE / "published", work, complete=not arguments.cases)
    work(HERE / "published")
    return 0


if __name__ == "__main__":
    sys.exit(main())
