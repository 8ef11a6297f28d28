"""Tiny checkpoints as they are published: with eyes, or with weights that other tools quantized.

Logits of texts without images; see `make_published.py`.
"""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 2048, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}
_CLIP = {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 16}
_QWEN = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "num_heads": 2,
    "patch_size": 4,
}  # fmt: skip
_QWEN3 = {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_MARKS = {
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}  # fmt: skip


def _text(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": model_type, **changes}


def _turning(model_type: str, sections: list[int], **changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    if model_type.startswith("qwen3"):
        rope["mrope_interleaved"] = True
    return _text(model_type, rope_parameters=rope, **changes)


# model_type -> arguments of its config class.
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _text("gemma3_text", query_pre_attn_scalar=8, sliding_window=16),
        "vision_config": _SIGLIP, "mm_tokens_per_image": 4,
        "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92,
    },
    "internvl": {
        "text_config": _text("qwen2"), "image_token_id": 90, "image_seq_length": 1,
        "vision_config": {
            **_TOWER, "model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4],
        },
    },
    "lfm2_vl": {
        "text_config": _text(
            "lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
        ),
        "vision_config": {
            key: value
            for key, value in {
                **_TOWER, "model_type": "siglip2_vision_model", "num_patches": 16,
            }.items()
            if key != "image_size"
        },
        "image_token_id": 90, "projector_hidden_size": 16,
    },
    "llava": {
        "text_config": _text("llama"), "vision_config": _CLIP, "image_token_index": 90,
        "vision_feature_layer": -1,
    },
    "llava_next": {
        "text_config": _text("mistral", sliding_window=None), "vision_config": _CLIP,
        "image_token_index": 90, "vision_feature_layer": -1, "image_grid_pinpoints": [[8, 8]],
    },
    "llava_onevision": {
        "text_config": _text("qwen2"), "vision_config": _SIGLIP, "image_token_index": 90,
        "video_token_index": 91, "vision_feature_layer": -1, "image_grid_pinpoints": [[8, 8]],
    },
    "mistral3": {
        "text_config": _text("mistral", sliding_window=None),
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 90, "spatial_merge_size": 1,
    },
    "qwen2_5_vl": {
        "text_config": _turning("qwen2_5_vl_text", [1, 1, 2]), **_MARKS,
        "vision_config": {**_QWEN, "fullatt_block_indexes": [0], "window_size": 16},
    },
    "qwen2_vl": {
        "text_config": _turning("qwen2_vl_text", [1, 1, 2]), **_MARKS,
        "vision_config": {
            "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4,
            "mlp_ratio": 1,
        },
    },
    "qwen3_vl": {
        "text_config": _turning("qwen3_vl_text", [2, 1, 1]), "vision_config": _QWEN3, **_MARKS,
    },
    "qwen3_vl_moe": {
        "text_config": _turning(
            "qwen3_vl_moe_text", [2, 1, 1], moe_intermediate_size=24, num_experts=4,
            num_experts_per_tok=2,
        ),
        "vision_config": _QWEN3, **_MARKS,
    },
    "smolvlm": {
        "text_config": _text("llama"), "vision_config": _TOWER, "image_token_id": 90,
        "scale_factor": 1, "pad_token_id": 0,
    },
}  # fmt: skip

# Case -> (arguments of the config class, settings of quantization).
QUANTIZED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3-fp8": (
        _text(
            "deepseek_v3", moe_intermediate_size=32, n_routed_experts=4, n_group=2, topk_group=1,
            num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=32,
            kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=8,
            num_key_value_heads=4, head_dim=8,
        ),
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [8, 16],
        },
    ),
    "qwen3-fp8": (
        _text("qwen3"),
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"],
        },
    ),
    "qwen3-fp8-static": (
        _text("qwen3"),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ),
    "gpt_oss-mxfp4": (
        _text(
            "gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
            intermediate_size=32,
        ),
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    ),
}  # fmt: skip
