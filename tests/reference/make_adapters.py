"""Make adapters with PEFT for tiny models of `families/`, and the logits that PEFT computes.

    python make_adapters.py            write adapters/ beside this file
    python make_adapters.py --check    make it again elsewhere, compare; exit 1 where it differs

Needs the pinned libraries of requirements.txt and nothing of this project. What is written:

    adapters/CASE/adapter_config.json          as PEFT writes it; its base is a case of families/
    adapters/CASE/adapter_model.safetensors    likewise
    adapters/CASE/golden.safetensors           tokens [T], logits [T, V] float32, from a
                                               whole-prompt, uncached, eager float32 run
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checking import check, difference
from making import compute_logits, load_folder, read_arguments, save_arrays
from peft import LoraConfig, get_peft_model

HERE = Path(__file__).parent
LENGTH = 24
FELT = 1e-2  # of the largest logit: what every adapter must move

# Base, and what is adapted how. Together: every setting that changes the sum.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-plain": ("mistral", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}),
    "mistral-whole": (
        "mistral",
        {
            "target_modules": ["embed_tokens", "gate_proj", "down_proj"],
            "modules_to_save": ["lm_head"], "r": 3, "lora_alpha": 5, "use_rslora": True,
        },
    ),
    "qwen2-patterns": (
        "qwen2",
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"],
            "r": 4, "lora_alpha": 8, "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 5},
            "alpha_pattern": {"v_proj": 3, r"layers\.0.*q_proj": 20},
        },
    ),
    "qwen3-dora": (
        "qwen3",
        {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 4, "use_dora": True},
    ),
    "gpt2-turned": (
        "gpt2",
        {
            "target_modules": ["c_attn", "c_proj", "c_fc"], "r": 4, "lora_alpha": 8,
            "fan_in_fan_out": True,
        },
    ),
    "deepseek_v3-latent": (
        "deepseek_v3",
        {
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            "r": 4, "lora_alpha": 8,
        },
    ),
}  # fmt: skip


def make_case(name: str, folder: Path) -> None:
    """Write one case."""
    base, settings = CASES[name]
    plain = load_folder(HERE / "families" / base)
    tokens = np.random.default_rng(0).integers(0, plain.config.vocab_size, LENGTH)
    before = compute_logits(plain, tokens)
    config = LoraConfig(task_type="CAUSAL_LM", **settings)
    model = get_peft_model(plain, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_" in parameter_name and "magnitude" not in parameter_name:
                parameter.copy_(noise * 0.2)  # PEFT begins with B = 0, which changes nothing
            else:
                parameter.mul_(1 + noise * 0.1)
    logits = compute_logits(model, tokens)
    moved = difference(logits, before)
    print(f"{name:20} moves the logits by {moved:.3f}")
    if moved < FELT:
        raise SystemExit(f"{name}: the adapter changes too little to be missed")
    folder.mkdir(parents=True)
    model.peft_config["default"].base_model_name_or_path = f"families/{base}"
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    saved = json.loads(path.read_text())
    saved["target_modules"] = sorted(saved["target_modules"])  # a set, in any order
    path.write_text(json.dumps(saved, indent=1) + "\n")
    arrays = {"tokens": tokens.astype(np.int32), "logits": logits}
    save_arrays(arrays, folder / "golden.safetensors")


def make(root: Path) -> None:
    """Write all cases."""
    for name in CASES:
        make_case(name, root / name)


def main() -> int:
    arguments = read_arguments(__doc__ or "")
    if arguments.check:
        return check(HERE / "adapters", make)
    make(HERE / "adapters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
