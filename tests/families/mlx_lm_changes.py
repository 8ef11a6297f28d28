"""What must change before mlx-lm's module computes what a case has, and why.

A module of mlx-lm may lack something, or take something for granted. Such a case is compared
after changes that go round the fault, made to the config and the weights of both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from funcrt.params import Params

import mlx.core as mx

Edit = Callable[[Params], Params]


class Change(NamedTuple):
    """One change, made for the hand-written model and for mlx-lm's module.

    Attributes:
        note: what is changed, and why; part of the row's `reason`.
        config: keys of config.json; a dot leads into a dict.
        weights: the tensors that the changed config takes.
        layout: the same tensors, as only mlx-lm's loader takes them.
    """

    note: str
    config: Mapping[str, Any] = {}
    weights: Edit = dict
    layout: Edit = dict


def note(changes: tuple[Change, ...]) -> str:
    """What the row of a case says of its changes."""
    return ", and ".join(change.note for change in changes)


# --- weights --------------------------------------------------------------------------------------


def _map(pattern: str, edit: Callable[[mx.array], mx.array]) -> Edit:
    """Edit the tensors whose names end as told."""
    ends = re.compile(rf"(?:{pattern})$")

    def apply(params: Params) -> Params:
        return {name: edit(a) if ends.search(name) else a for name, a in params.items()}

    return apply


def _pad_mlp(params: Params) -> Params:
    """MLPs of 64 as those of 128: the rows that are added give nothing."""
    wider = _map(
        r"h_to_4h\.(weight|bias)", lambda a: mx.pad(a, [(0, 64), *[(0, 0)] * (a.ndim - 1)])
    )
    return _map(r"4h_to_h\.weight", lambda a: mx.pad(a, [(0, 0), (0, 64)]))(wider(params))


def _narrow(params: Params) -> Params:
    """Half of the model's width."""
    inward = _map(r"(embed_tokens|[qkv]_proj|gate_proj|up_proj)\.weight", lambda a: a[:, :16])
    return _map(r"(o_proj|down_proj|layernorm|\.norm)\.weight", lambda a: a[:16])(inward(params))


def _repeat_mlp(params: Params) -> Params:
    """The experts of the second layer in the first one as well."""
    first, second = "model.layers.0.mlp.", "model.layers.1.mlp."
    kept = {name: a for name, a in params.items() if not name.startswith(first)}
    again = {
        name.replace(second, first): a for name, a in params.items() if name.startswith(second)
    }
    return {**kept, **again}


def _one_group(params: Params) -> Params:
    """A Mamba-2 with the first of its two groups of 16 states: x 64, b 32, c 32, steps 4."""
    inner = [*range(80), *range(96, 112)]
    rows = mx.array([*range(64), *(64 + i for i in (*inner, *range(128, 132)))])
    convolved = _map(r"conv1d\.(weight|bias)", lambda a: a[mx.array(inner)])
    return _map(r"in_proj\.(weight|bias)", lambda a: a[rows])(convolved(params))


def _split_experts(params: Params) -> Params:
    """GPT-OSS as mlx-lm saves it: gates and ups apart, rows before columns."""
    found: Params = {}
    for name, a in params.items():
        base, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            rows = a.swapaxes(1, 2)
            found |= {f"{base}.gate_proj.weight": rows[:, ::2]}
            found |= {f"{base}.up_proj.weight": rows[:, 1::2]}
        elif kind == "gate_up_proj_bias":
            found |= {f"{base}.gate_proj.bias": a[:, ::2], f"{base}.up_proj.bias": a[:, 1::2]}
        elif kind == "down_proj":
            found[f"{base}.down_proj.weight"] = a.swapaxes(1, 2)
        elif kind == "down_proj_bias":
            found[f"{base}.down_proj.bias"] = a
        else:
            found[name] = a
    return found


# --- cases ----------------------------------------------------------------------------------------

_WINDOW = Change(
    "without its sliding window, which mlx-lm's module does not know", {"sliding_window": None}
)
_LONG = Change(
    "with the long factors for short texts too, as mlx-lm's module takes them for every text",
    {"rope_scaling.short_factor": [1.2, 2.5, 6.0, 20.0]},
)
_FLOAT32 = Change(
    "with norms stored in float32, since mlx-lm's loader adds 1 to them as they are stored",
    weights=_map(r"norm\.weight", lambda a: a.astype(mx.float32)),
)
_NEOX = (
    Change(
        "with MLPs padded to four times the width, the only ones that mlx-lm's module has",
        {"intermediate_size": 128},
        _pad_mlp,
    ),
    Change("with the gelu of mlx-lm's module, by tanh", {"hidden_act": "gelu_pytorch_tanh"}),
)
_MAMBA2 = (
    Change("with an intermediate_size, which mlx-lm's module needs", {"intermediate_size": 64}),
    Change(
        "with one group, since mlx-lm's module norms all groups as one",
        {"n_groups": 1},
        _one_group,
    ),
    Change(
        "with the eps that mlx-lm's module has in the norms of layers",
        {"layer_norm_epsilon": 1e-5},
    ),
)

CHANGES: dict[str, tuple[Change, ...]] = {
    "deepseek_v2-lite": (
        Change(
            "with a rope_scaling, which mlx-lm's module needs",
            {
                "rope_scaling": {
                    "type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1,
                    "mscale": 1.4, "mscale_all_dim": 0.7,
                    "original_max_position_embeddings": 256,
                }
            },
        ),
    ),
    "dots1": (_WINDOW,),
    "ernie4_5_moe": (
        Change(
            "without the bias of the choice of experts, which mlx-lm's module leaves out",
            weights=_map("e_score_correction_bias", mx.zeros_like),
        ),
    ),
    "gemma2": (
        _WINDOW._replace(
            note="with a window longer than the text, since mlx-lm's module has none",
            config={"sliding_window": 4096},
        ),
    ),
    "gemma3_text": (
        Change(
            "with a width of 16, since mlx-lm's module rounds the root of the width to bfloat16",
            {"hidden_size": 16},
            _narrow,
        ),
    ),
    "glm": (
        Change(
            "with heads that turn as a whole, as mlx-lm's module has them",
            {"partial_rotary_factor": 1.0},
        ),
    ),
    "glm4_moe_lite": (
        Change(
            "with the eps of latents everywhere, since mlx-lm's module knows one",
            {"rms_norm_eps": 1e-6},
        ),
    ),
    "gpt_neox": _NEOX,
    "gpt_neox-in-turn": _NEOX,
    "gpt_oss": (
        Change(
            "with experts as mlx-lm saves them, since it takes others apart along a wrong axis",
            layout=_split_experts,
        ),
        Change(
            "with yarn's bounds rounded, as mlx-lm's module does",
            {"rope_scaling.truncate": True},
        ),
        Change("with the limit of 7 that mlx-lm's module has", {"swiglu_limit": 7.0}),
    ),
    "lfm2-bias": (
        Change(
            "with keys of older configs, which mlx-lm's module needs",
            {"block_dim": 32, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0},
        ),
    ),
    "mamba2": _MAMBA2,
    "mamba2-bias": _MAMBA2,
    "minicpm3": (
        Change(
            "with tie_word_embeddings, which mlx-lm's module does not take for granted",
            {"tie_word_embeddings": True},
        ),
        _LONG,
        Change(
            "with logits that are not divided, since mlx-lm's module divides none of a tied head",
            {"dim_model_base": 32},
        ),
    ),
    "mistral-window": (_WINDOW,),
    "mixtral-window": (_WINDOW,),
    "olmo3": (
        Change(
            "with yarn's own factor, since mlx-lm's module knows no attention_factor",
            {"rope_scaling.attention_factor": None},
        ),
    ),
    "phi3": (_WINDOW,),
    "phi3-longrope-short": (_LONG,),
    "qwen2-window": (_WINDOW._replace(config={"use_sliding_window": False}),),
    "qwen2_moe": (
        Change(
            "with experts in every layer, as mlx-lm's module has them",
            {"mlp_only_layers": []},
            _repeat_mlp,
        ),
    ),
    "qwen3_5": (
        Change(
            "with a full_attention_interval that says what layer_types does, "
            "which mlx-lm's module does not read",
            {"text_config.full_attention_interval": 3},
        ),
        _FLOAT32,
    ),
    "qwen3_5_moe": (_FLOAT32,),
    "qwen3_next": (_FLOAT32,),
    "starcoder2": (
        _WINDOW,
        Change("with the gelu of mlx-lm's module, the exact one", {"hidden_act": "gelu"}),
    ),
}  # fmt: skip
