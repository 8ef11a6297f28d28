"""The golden cases that exist as GGUF files too, and what such files cannot say of them.

llama.cpp assumes some values that config.json may hold otherwise (a window after every fourth
layer, for example), and its converter leaves some keys out. A case is changed until both can say
the same; a change makes it another model than the one of `golden.safetensors`.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FAMILIES = HERE / "families"
FILES = HERE / "gguf"

_NO_ROPE_BASE = {"rope_theta": 10000.0}  # not written, so the default is meant
_NO_WINDOW: dict[str, Any] = {"sliding_window": None}
_LATENT_YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip
_MINICPM = {
    **_NO_ROPE_BASE, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    "rope_scaling": {
        "type": "longrope", "original_max_position_embeddings": 2048,
        "long_factor": [1.2, 2.5, 6.0, 20.0], "short_factor": [1.0, 1.1, 1.4, 2.0],
    },
}  # fmt: skip

# Case -> what is changed in its config.json.
CHANGES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": {"layer_switch": 4, "sliding_window_pattern": 4},
    "deepseek_v2": {"rope_scaling": _LATENT_YARN},
    "deepseek_v2-lite": {},
    "deepseek_v3": {"rope_scaling": _LATENT_YARN},
    "dots1": {"scoring_func": "sigmoid", **_NO_WINDOW},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "gemma": _NO_ROPE_BASE,
    "gemma2": {**_NO_ROPE_BASE, "query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "gpt2": {},
    "gpt_neox": {"rotary_emb_base": 10000},
    "gpt_oss": {"swiglu_limit": 7.0},
    "granite": {},
    "granitemoe": {},
    "lfm2": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "mamba2": {},
    "minicpm3": _MINICPM,
    "mistral": {},
    "mixtral": {},
    "olmo2": {},
    "olmo3": {},
    "phi3-longrope": {},
    "phi3-partial": {},
    "qwen2": {},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen3_next": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layers": [1, 1, 1], "no_rope_layer_interval": 4},
    "stablelm": _NO_ROPE_BASE,
    "starcoder2": _NO_WINDOW,
    "youtu": {},
}  # fmt: skip

# Tensors that nothing computes with and that the converter does not know.
_UNUSED = (".eh_proj.weight", ".attn.bias")
# Cases whose first layer gets the experts of the second one, because all layers must have some.
_ALL_EXPERTS = ("qwen2_moe", "qwen3_moe", "qwen3_next")


def make_folder(case: str, folder: Path) -> Path:
    """Write the changed case as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((FAMILIES / case / "config.json").read_text()) | CHANGES[case]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: tensor
        for name, tensor in _read(FAMILIES / case / "model.safetensors").items()
        if not name.endswith(_UNUSED) and not name.startswith("mtp.")
    }
    if case in _ALL_EXPERTS:
        first, second = "model.layers.0.mlp.", "model.layers.1.mlp."
        kept = {name: t for name, t in tensors.items() if not name.startswith(first)}
        copied = {first + name.removeprefix(second): t for name, t in kept.items()
                  if name.startswith(second)}  # fmt: skip
        tensors = kept | copied
    _write(folder / "model.safetensors", tensors)
    return folder


# Bytes are copied as they are: whoever makes the files has PyTorch, whoever tests has MLX.
_Tensor = tuple[str, list[int], bytes]


def _read(path: Path) -> dict[str, _Tensor]:
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            entry["shape"],
            content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def _write(path: Path, tensors: dict[str, _Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)
