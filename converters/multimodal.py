"""Checkpoints that see or hear: the text model within them, where it is one of the families.

Such a config.json has the text model's settings in `text_config` (older ones of Qwen: beside the
others), and its tensors carry a prefix. Images and sounds only ever add to what tokens are embedded
as, and to their positions, so that a text by itself meets nothing but the text model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcrt.errors import ConfigError, ParamsError
from funcrt.params import Params

import mlx.core as mx

# model_type of the whole -> of the text model, where text_config leaves it out.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
}
# Text models that are a known family once a token has one position, not three.
_SAME = {
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
# What transformers' config classes fill in and published `text_config`s leave out.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **dict(zip(_SIZES, (262208, 2304, 9216, 26), strict=True)),
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    },
    "llama": {
        **dict(zip(_SIZES, (32000, 4096, 11008, 32), strict=True)), "num_attention_heads": 32,
    },
    "mistral": {
        **dict(zip(_SIZES, (32000, 4096, 14336, 32), strict=True)), "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}  # fmt: skip
_INHERITED = ("eos_token_id", "quantization", "quantization_config")
_MULTI_ROPE = ("mrope_section", "mrope_interleaved")
# Keys of the whole that say nothing about the text.
_ELSEWHERE = {"vision_config", "audio_config", "text_config", "image_token_id", "video_token_id"}

# Longest first.
_TEXT = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
)
_OTHERS = (
    "audio_tower", "connector", "embed_vision", "image_newline", "mlp1", "multi_modal_projector",
    "vision_model", "vision_tower", "visual",
)  # fmt: skip


@dataclass(frozen=True)
class TextPart:
    """What is read of a checkpoint that sees or hears.

    Attributes:
        config: of the text model.
        special: ids of the text's vocabulary that stand for images, videos or sounds.
        kind: model_type of the whole.
    """

    config: dict[str, Any]
    special: tuple[int, ...]
    kind: str

    def take(self, params: Mapping[str, mx.array]) -> tuple[Params, str]:
        """The text model's tensors under its own names, and a note about the rest."""
        kept: Params = {}
        for name, array in params.items():
            if other_part(name):
                continue
            text = text_name(name)
            if text in kept:
                raise ParamsError(f"{name} and another tensor are both {text} of the text model")
            kept[text] = array
        if self.config["model_type"] == "qwen3_moe":
            kept = _split_experts(kept, self.config)
        return kept, note(self.kind, self.config["model_type"], params, self.special)


def note(kind: str, text: str, params: Iterable[str], special: Sequence[int]) -> str:
    """What to tell about a checkpoint of which only the text model is read."""
    left = Counter(part for name in params if (part := other_part(name)))
    parts = ", ".join(f"{part} (tensors: {count})" for part, count in sorted(left.items()))
    ids = ", ".join(map(str, special))
    marks = f"; ids that stand for images or sounds ({ids}) are plain tokens here" if ids else ""
    return (
        f"only the text model ({text}) of this {kind} is read; "
        f"left out: {parts or 'nothing, it holds no other part'}{marks}"
    )


def text_part(config: Mapping[str, Any]) -> TextPart | None:
    """What there is to read of a config; None if it is that of a text model.

    Raises ConfigError for a `text_config` that is none.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in WRAPPERS:
        return None
    inner = config.get("text_config")
    if inner is None and kind.startswith("qwen2"):  # as these were published first
        inner = {key: value for key, value in config.items() if not _is_elsewhere(key)}
        inner |= {"model_type": WRAPPERS[kind]}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config text_config: expected the text model's settings, got {inner!r}")
    model_type = inner.get("model_type") or WRAPPERS[kind]
    text = {**_DEFAULTS.get(str(model_type), {}), **inner, "model_type": model_type}
    text.pop("architectures", None)  # may name the whole
    text |= {key: config[key] for key in _INHERITED if config.get(key) is not None}
    if model_type in _SAME:
        text = _plain_positions({**text, "model_type": _SAME[model_type]})
        if model_type == "qwen3_vl_moe_text":
            text.setdefault("norm_topk_prob", True)
    return TextPart(text, special_ids(config), kind)


def special_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that a config says to stand for images, videos or sounds, sorted."""
    values = [value for key, value in config.items() if _is_elsewhere(key)]
    return tuple(sorted({value for value in values if type(value) is int}))


def _is_elsewhere(key: str) -> bool:
    ours = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id")
    mark = key.endswith(("_token_id", "_token_index")) and key.lstrip("_") not in ours
    return mark or key in _ELSEWHERE


def _plain_positions(text: dict[str, Any]) -> dict[str, Any]:
    """Rope without the split of its planes over three positions, which are one for texts."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if not isinstance(rope, Mapping):
            continue
        plain = {name: value for name, value in rope.items() if name not in _MULTI_ROPE}
        for name in ("type", "rope_type"):
            if plain.get(name) == "mrope":
                plain[name] = "default"
        only_default = set(plain) <= {"type", "rope_type"} and "default" in plain.values()
        text[key] = None if only_default or not plain else plain
    return text


def other_part(name: str) -> str:
    """Which other part than the text model a tensor belongs to; empty if to none."""
    words = name.removeprefix("model.").split(".")
    return words[0] if words[0] in _OTHERS else ""


def text_name(name: str) -> str:
    """Name of a tensor in the text model."""
    old, new = next((pair for pair in _TEXT if name.startswith(pair[0])), ("", ""))
    return new + name.removeprefix(old)


def _split_experts(params: Params, config: Mapping[str, Any]) -> Params:
    """Stacks `gate_up_proj` `[X, E, 2 F]`, `down_proj` `[X, F, E]` -> a matrix for each expert."""
    width = config.get("hidden_size")
    split: Params = {}
    for name, array in params.items():
        base, _, role = name.rpartition(".")
        if not base.endswith(".experts") or array.ndim != 3:
            split[name] = array
            continue
        axis = 1 if role == "gate_up_proj" else 2
        rows = array.swapaxes(1, 2) if array.shape[axis] == width else array
        for expert in range(array.shape[0]):
            if role == "gate_up_proj":
                halves = mx.split(rows[expert], 2, axis=0)
                for half, projection in zip(halves, ("gate_proj", "up_proj"), strict=True):
                    split[f"{base}.{expert}.{projection}.weight"] = half
            else:
                split[f"{base}.{expert}.{role}.weight"] = rows[expert]
    return split
